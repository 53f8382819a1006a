"""Whom a rank works with, epoch after epoch: groups, placement, experts and agreement (docs/design.md, D5 and 5).

An epoch begins with `begin`, when a Membership says who takes part. While its groups open, a higher epoch may begin
instead. `form` does the rest: the ranks tell each other which placement they have, repair the newest one for the live
ones, and each reads the experts that are new to it (engine/recovery/reading.py). While one of them reads, all of them
go on to hear the front, and tell each other how far they are. All ranks come to the same placement, because `repair` is
a pure function; the first record of the agreement proves it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct, structs

from dbo.alive import AGREEING, goes_on, meets
from dbo.steps import Steps
from engine.agreement import Agreement
from engine.recovery.reading import Read, Reading
from ep.parallel import Parallel
from ep.place import SlotTable
from ep.protocol import AllToAll, PeerLost
from ep.recorder import Kind
from ep.transport.comm import gather_bytes
from ep.transport.group import Group, LocalGroup
from eplb.placement import Placement
from eplb.repair import SlotUpdate, diff, ranks_needed, repair
from front.messages import Joined
from models.base import CausalLM

log = logging.getLogger("moesaic.team")

FILL_SECONDS = 0.05  # for experts that have been read; then the rank looks up
# How soon `form` is to be called again.
LOOK_SECONDS = 0.002
STAND_INS = 8  # experts of a layer that stand in for all
TROUBLED_LOOK_SECONDS = 0.05  # while experts cannot be read


class Groups(NamedTuple):
    """Two, because the next step is agreed on while the last one's tokens still travel."""

    agreement: Group
    experts: Group

    def close(self) -> None:
        self.agreement.close()
        self.experts.close()


class Opening(Protocol):
    """Groups that are about to be open."""

    def done(self) -> bool: ...

    def take(self) -> Groups:
        """When done. Raises PeerLost when a rank did not come."""
        ...

    def drop(self) -> None:
        """They are not wanted any more."""
        ...


Meet = Callable[[int, int, int], Opening]  # (epoch, this rank among the live ones, their number)
MakeLanes = Callable[[Group, int, int], Sequence[AllToAll]]  # (group, slots of a rank, hidden size)


class Opened:
    """Groups that open at once."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def done(self) -> bool:
        return True

    def take(self) -> Groups:
        return self._groups

    def drop(self) -> None:
        self._groups.close()


class OpeningThread:
    """Groups that open on a thread of their own, because a thread that waits for others there cannot hear the front
    meanwhile.

    open_groups(stop): its waits are bounded; it may give up when stop() is True. A thread that is not wanted any more
    is left to end by itself.
    """

    def __init__(self, open_groups: Callable[[Callable[[], bool]], Groups]) -> None:
        self._lock = threading.Lock()
        self._result: Groups | BaseException | None = None
        self._dropped = False
        self._thread = threading.Thread(target=self._run, args=(open_groups,), name="meeting", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return self._result is not None

    def take(self) -> Groups:
        result = self._result
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        return result

    def drop(self) -> None:
        with self._lock:
            self._dropped = True
            if isinstance(self._result, Groups):
                self._result.close()

    def _run(self, open_groups: Callable[[Callable[[], bool]], Groups]) -> None:
        try:
            groups = open_groups(lambda: self._dropped)
        except BaseException as error:
            self._result = error
            return
        finally:
            goes_on(AGREEING)
        with self._lock:
            self._result = groups
            if self._dropped:
                groups.close()


class Team:
    """live: the ranks of the epoch, by their numbers in the placement. working: the epoch has been formed, and still
    is.

    Without a placement (a dense model) a rank needs no other: every epoch has it alone.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        placement: Placement | None,
        model: CausalLM,
        fingerprint: int,
        meet: Meet,
        make_lanes: MakeLanes,
        read: Read,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """placement: which experts the model's slots hold. fingerprint: of whatever else must be equal on all ranks.
        read: how experts come that are new to this rank."""
        self.rank = rank
        self.epoch = -1
        self.live: tuple[int, ...] = ()
        self.working = False
        self.agreement = Agreement(LocalGroup(), -1, 0)
        self._num_ranks = num_ranks
        self._placement = placement
        self._model = model
        self._fingerprint = fingerprint
        self._meet = meet
        self._make_lanes = make_lanes
        self._read = read
        self._clock = clock
        self.look_seconds = LOOK_SECONDS
        self._opening: Opening | None = None
        self._forming: _Forming | None = None
        self._filled: dict[
            tuple[int, int], int
        ] = {}  # (layer, slot) -> expert, where that is not what `placement` says
        self._groups: Groups | None = None
        self._alive: tuple[bool, ...] = ()
        self._began = 0.0

    @property
    def opening(self) -> bool:
        """An epoch has begun and is not formed yet."""
        return self._opening is not None or self._forming is not None

    @property
    def num_alive(self) -> int:
        """The ranks that take part, whether this one needs them or not."""
        return sum(self._alive)

    @property
    def trouble(self) -> str:
        """Why the experts that this rank reads do not come; "": they do."""
        return "" if self._forming is None else self._forming.reading.trouble

    @property
    def opened(self) -> bool:
        """`form` may be called."""
        return self._forming is not None or (self._opening is not None and self._opening.done())

    @property
    def placement(self) -> Placement | None:
        """What the model's slots hold, on this rank for certain; None: a dense model."""
        return self._placement

    @property
    def experts_group(self) -> Group:
        """Where tokens travel in the epoch that is formed."""
        assert self._groups is not None
        return self._groups.experts

    def expect(self, placement: Placement) -> None:
        """All ranks go over to `placement` with the step that is now agreed on."""
        self.agreement.placement = placement.checksum()

    def hosts(self, placement: Placement, tables: Sequence[SlotTable]) -> None:
        """The slots now hold that; route by it. Called by the thread that runs the steps, between two of them."""
        self._placement = placement
        self._model.update_expert_map(structs.replace(self._model.parallel, placement=placement), tables)

    def begin(self, epoch: int, alive: Sequence[bool]) -> None:
        """Meet the live ranks of this epoch. When they are too few to hold every expert nothing opens: the next
        epoch is waited for."""
        self.close()
        self._began = self._clock()
        self.epoch = epoch
        self._alive = tuple(alive)
        self._num_ranks = len(alive)
        placement = self._placement
        if placement is None:
            self.live = (self.rank,)
        else:
            self.live = tuple(rank for rank, lives in enumerate(alive) if lives)
            needed = ranks_needed(placement.num_experts, placement.slots_per_rank)
            if len(self.live) < needed:
                log.warning("epoch %d: %d live rank(s), but it takes %d", epoch, len(self.live), needed)
                return
        meets(epoch, self.live, Kind.MEETING)
        size = len(self.live)
        if size == 1:
            self._opening = Opened(Groups(LocalGroup(), LocalGroup()))
        else:
            self._opening = self._meet(epoch, self.live.index(self.rank), size)

    def work_alone(self) -> None:
        """Work without having met the others: this rank's experts stand in for all; a few of them, where it has every
        expert, as to read them all would take the memory's time from ranks that serve. What comes out is of no use, but
        whatever is slow at its first time is over then (engine/process/warm_up.py). For the same reason a few layers
        stand in for all. An epoch that is about to begin stays so."""
        self._update_group(self._placement, LocalGroup())
        if self._placement is not None and self._placement.everywhere:
            tables = [moe.table.folded(STAND_INS) for _, moe in self._model.moe_layers if moe.table is not None]
            self._model.update_expert_map(self._model.parallel, tables)
        self._model.shorten(True)
        self.agreement = Agreement(LocalGroup(), self.epoch, 0)
        self.working = True

    def stop_alone(self) -> None:
        """What has been computed since `work_alone` is over."""
        self._model.shorten(False)
        self.working = False

    def form(self) -> Steps[Joined | None]:
        """The groups have opened: agree on the placement and bring the experts. None: some rank still reads, so call it
        again in `look_seconds`. Raises PeerLost."""
        if self._forming is None:
            self._forming = yield from self._agree()
        forming, groups = self._forming, self._groups
        assert groups is not None
        self._fill(forming)
        # Ranks that start together all have the placement they start with, and load for different times.
        if forming.placement is not None and self.epoch > 0:
            gathered = groups.agreement.all_gather_ints([forming.reading.left, bool(forming.reading.trouble)])
            yield
            states = gathered.wait()
            self.look_seconds = TROUBLED_LOOK_SECONDS if any(state[1] for state in states) else LOOK_SECONDS
            if any(state[0] for state in states):
                return None
        return self._formed(forming, groups)

    def _agree(self) -> Steps[_Forming]:
        """On the placement; the reading of what is new to this rank begins."""
        assert self._opening is not None
        opening, self._opening = self._opening, None
        self._groups = opening.take()
        placement = self._placement
        if placement is not None and self.epoch > 0:
            newest = yield from self._newest(placement, self._groups.agreement)
            placement = repair(newest, self._alive, self.epoch)
        updates = self._updates(placement)
        return _Forming(placement, self._read(updates), len(updates), self._clock())

    def _fill(self, forming: _Forming) -> None:
        reading = forming.reading
        end = self._clock() + FILL_SECONDS
        while reading.left and (seconds := end - self._clock()) > 0:
            staged = reading.take(seconds)
            if staged is None:
                break
            layer, _, slot, expert = staged.update
            self._model.read_expert(staged.source, layer, slot, expert)
            self._filled[layer, slot] = expert
            forming.bytes_read += staged.bytes_read

    def _formed(self, forming: _Forming, groups: Groups) -> Joined:
        placement, self._forming = forming.placement, None
        self._placement = placement
        self._filled.clear()
        self._update_group(placement, groups.experts)
        checksum = 0 if placement is None else placement.checksum()
        self.agreement = Agreement(groups.agreement, self.epoch, checksum, self._fingerprint, self.live)
        self.working = True
        return Joined(
            rank=self.rank,
            epoch=self.epoch,
            agree_seconds=forming.agreed - self._began,
            repair_seconds=self._clock() - forming.agreed,
            experts_loaded=forming.num_updates,
            bytes_read=forming.bytes_read,
        )

    def _update_group(self, placement: Placement | None, experts: Group) -> None:
        def lanes(num_slots: int, hidden_size: int) -> Sequence[AllToAll]:
            return self._make_lanes(experts, num_slots, hidden_size)

        self._model.update_group(Parallel(self.rank, self._num_ranks, placement, lanes))

    def close(self) -> None:
        """Leave the others; whatever waits for them, here or there, fails with PeerLost."""
        self.working = False
        if self._opening is not None:
            self._opening.drop()
            self._opening = None
        if self._forming is not None:
            self._forming.reading.drop()
            self._forming = None
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    def names(self, loss: PeerLost) -> str:
        """The lost ranks' own numbers."""
        return ", ".join(str(self.live[index]) for index in loss.ranks if index < len(self.live)) or "unknown"

    def _newest(self, mine: Placement, group: Group) -> Steps[Placement]:
        """The placement of the highest epoch that any rank has; one that has just started has the first only, and may
        count more ranks than the others."""
        gathered = group.all_gather_ints([mine.epoch, mine.checksum()])
        yield
        known = gathered.wait()
        newest = max(range(group.size), key=lambda rank: known[rank][0])  # the first of equals
        if all(one == known[newest] for one in known):
            return mine
        brought = yield from gather_bytes(group, mine.to_bytes() if group.rank == newest else b"")
        return Placement.from_bytes(brought[newest])

    def _updates(self, placement: Placement | None) -> list[SlotUpdate]:
        """What this rank has to read for it. An epoch that was broken off has left other experts in some slots than the
        placement that was in force says."""
        if placement is None or self._placement is None:
            return []
        changed = diff(self._placement, placement)
        updates = {(update.layer, update.slot): update for update in changed if update.rank == self.rank}
        for (layer, slot), held in self._filled.items():
            updates.pop((layer, slot), None)
            wanted = int(placement.slot_to_expert[layer, self.rank, slot])
            if wanted not in (-1, held):
                updates[layer, slot] = SlotUpdate(layer, self.rank, slot, wanted)
        return sorted(updates.values())


class _Forming(Struct):
    """An epoch whose ranks have met, and bring what its placement wants. agreed: when they knew it, by the clock."""

    placement: Placement | None
    reading: Reading
    num_updates: int
    agreed: float
    bytes_read: int = 0
