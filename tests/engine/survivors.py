"""Ranks of one thread that are killed and come back, and their front, which replays what the dead were at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cache_files import CacheFiles
from hypothesis import strategies as st
from overlapped import OFTEN
from rank_parts import Job, drive, make_plan

from dbo.steps import Steps
from engine.build import build_rank
from engine.rank import Rank
from engine.team import Groups, Opening
from ep.transport.group import MailboxGroup, MailboxWorld
from front.messages import AddRequest, Joined, Membership, TokenOutput


class Door:
    """Groups of one epoch. They open at the start of a round, when everybody is there: nobody may wait in a mailbox."""

    def __init__(self, size: int) -> None:
        self.world = MailboxWorld(size)
        self.size = size
        self.arrived: set[int] = set()
        self.open = False


class _Arrival:
    def __init__(self, door: Door, rank: int) -> None:
        self._door, self._group = door, MailboxGroup(door.world, rank)
        door.arrived.add(rank)

    def done(self) -> bool:
        return self._door.open

    def take(self) -> Groups:
        return Groups(self._group, self._group)

    def drop(self) -> None:
        self._group.close()


class Bell:
    """Hears what the others ring, once: what was asked for is gone, as on a socket."""

    def __init__(self, rank: int, all_rings: dict[int, list[int]]) -> None:
        self._rank, self._all_rings = rank, all_rings
        all_rings[rank] = []

    def ring(self, generation: int) -> None:
        for rank, rings in self._all_rings.items():
            if rank != self._rank:
                rings.append(generation)

    def heard(self, generation: int) -> bool:
        rings = self._all_rings[self._rank]
        heard = generation in rings
        rings.clear()
        return heard


def undisturbed(path: Path, jobs: Sequence[Job]) -> dict[int, list[int]]:
    """Every job's tokens on one rank."""
    return {index: got.tokens for index, got in enumerate(drive([build_rank(make_plan(path))], jobs))}


class Survivors:
    """`round` lets every rank take one step. Requests are spread over the live ranks. caches: None: what a rank has
    computed ends with it."""

    def __init__(self, path: Path, size: int, caches: CacheFiles | None = None, **overrides: Any) -> None:
        self.caches = caches
        self.formers: dict[int, tuple[tuple[int, int, int], ...]] = {}
        self.awaited: set[int] = set()  # that their ranks have not answered
        self.plan = make_plan(path, data_parallel_size=size, all2all_backend="mailbox", **overrides)
        self.rings: dict[int, list[int]] = {}
        self.doors: dict[int, Door] = {}
        self.epoch = 0
        self.ranks: dict[int, Rank] = {}
        for rank in range(size):
            self.start(rank, join=False)
        self.requests: dict[int, AddRequest] = {}
        self.named: list[int] = []  # request by what its rank calls it: another name for every rank it is sent to
        self.names: dict[int, int] = {}  # the last of each request
        self.released: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.owner: dict[int, int] = {}
        self.joined: list[Joined] = []

    def start(self, rank: int, join: bool = True) -> None:
        bell = Bell(rank, self.rings)
        self.ranks[rank] = build_rank(self.plan, rank, self.meet, bell, join=join, caches=self.caches)

    def meet(self, epoch: int, rank: int, size: int) -> Opening:
        return _Arrival(self.doors.setdefault(epoch, Door(size)), rank)

    def add(self, request_id: int, job: Job) -> None:
        self.requests[request_id] = job.message(request_id)
        self.released[request_id] = []
        self._send(request_id)

    def _send(self, request_id: int) -> None:
        add, tokens = self.requests[request_id], self.released[request_id]
        live = sorted(self.ranks)
        self.owner[request_id] = live[request_id % len(live)]
        self.awaited.add(request_id)
        self.names[request_id] = len(self.named)
        self.named.append(request_id)
        self.ranks[self.owner[request_id]].submit(
            AddRequest(
                request_id=self.names[request_id],
                token_ids=[*add.token_ids, *tokens],
                prompt_len=add.prompt_len,
                params=add.params,
                seed=add.seed,
                arrival=add.arrival,
                formers=self.formers.get(request_id, ()),
            )
        )

    def change(self) -> Callable[[int], None]:
        """A new epoch of those that live; call the result with each rank that hears of it."""
        self.epoch += 1
        message = Membership(self.epoch, [rank in self.ranks for rank in range(self.plan.data_parallel_size)])
        return lambda rank: self.ranks[rank].submit(message)

    def tell_all(self) -> None:
        tell = self.change()
        for rank in self.ranks:
            tell(rank)

    def news(self, data: st.DataObject) -> None:
        """Of who is left; some ranks hear of it a few rounds later."""
        tell = self.change()
        late = data.draw(st.sets(st.sampled_from(sorted(self.ranks))), "late")
        for rank in sorted(self.ranks.keys() - late):
            tell(rank)
        self.rounds(data.draw(st.integers(0, 2), "rounds until then"))
        for rank in late:
            tell(rank)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def replay(self) -> None:
        for request_id, rank in self.owner.items():
            if rank not in self.ranks and request_id not in self.finished:
                self._send(request_id)

    def replay_all(self) -> None:
        """What ranks had that were all lost at once."""
        for request_id in self.owner.keys() - self.finished:
            self._send(request_id)

    def kill(self, rank: int) -> None:
        self.ranks.pop(rank).close()
        if self.caches is not None:
            self.caches.end(rank)
            for request_id in [request_id for request_id, owner in self.owner.items() if owner == rank]:
                length = len(self.requests[request_id].token_ids) + len(self.released[request_id])
                awaited = request_id in self.awaited
                older = self.formers.get(request_id, ()) if awaited else ()
                self.formers[request_id] = (*older, (rank, self.names[request_id], 0 if awaited else length - 1))

    def round(self, victim: int | None = None, turns: int = 0) -> None:
        """victim: this rank dies after so many turns of its step (or after the step, if that is shorter)."""
        for door in self.doors.values():
            door.open = len(door.arrived) == door.size
        running: dict[int, Steps[list[TokenOutput]]] = {rank: self.ranks[rank].steps() for rank in self.ranks}
        turn = 0
        while running:
            for rank in list(running):
                if rank == victim and turn == turns:
                    running.pop(rank).close()
                    self.kill(rank)
                    continue
                try:
                    next(running[rank])
                except StopIteration as done:
                    del running[rank]
                    self._take(rank, done.value)
            turn += 1
        if victim in self.ranks:
            self.kill(victim)

    def _take(self, rank: int, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            request_id = self.named[output.request_id]
            assert self.names[request_id] == output.request_id and self.owner[request_id] == rank
            assert request_id not in self.finished
            self.released[request_id] += output.new_token_ids
            self.awaited.discard(request_id)
            if output.finish_reason is not None:
                self.finished.add(request_id)
        joined = self.ranks[rank].take_joined()
        if joined is not None:
            assert joined.rank == rank
            self.joined.append(joined)

    def finish(self, bound: int = 400) -> None:
        """Until every request has ended and all ranks sleep."""
        while len(self.finished) < len(self.requests) or not all(
            rank.idle and not rank.has_work for rank in self.ranks.values()
        ):
            self.round()
            bound -= 1
            assert bound, "no end in sight"

    def lose_one(self, jobs: Sequence[Job], turns: int) -> None:
        """All jobs, although rank 1 dies after so many turns of a step. It comes back, and the last job comes then."""
        for request_id, job in enumerate(jobs[:-1]):
            self.add(request_id, job)
        self.rounds(4)
        self.round(victim=1, turns=turns)
        self.round()
        self.tell_all()
        self.replay()
        self.rounds(3)
        self.start(1)
        self.round()
        self.tell_all()
        self.add(len(jobs) - 1, jobs[-1])
        self.finish()

    def endure(self, jobs: Sequence[Job], data: st.DataObject) -> None:
        """Serve these while ranks die at any turn of a step, and lost ones come back or not. Every token is there then,
        and no block of the cache is lost."""
        for index, job in enumerate(jobs):
            self.add(index, job)
        for _ in range(data.draw(st.integers(1, 6))):
            self.rounds(data.draw(st.integers(0, 5)))
            if len(self.ranks) > 1:
                self.round(data.draw(st.sampled_from(sorted(self.ranks))), data.draw(st.integers(0, 15)))
                self.tell_all()
                self.replay()
            missing = sorted(set(range(self.plan.data_parallel_size)) - set(self.ranks))
            if missing and data.draw(st.booleans()):
                self.start(missing[0])
                self.round()
                self.tell_all()
        self.finish()
        for rank in self.ranks.values():
            rank._scheduler.kv.check([])


def tight(data: st.DataObject, fewest_blocks: int) -> dict[str, Any]:
    """A plan whose prompts are cut, whose requests are preempted, and whose steps are split, or not; and caches that
    outlive their ranks, or not."""
    return {
        "caches": CacheFiles() if data.draw(st.booleans()) else None,
        "async_scheduling": data.draw(st.booleans()),
        "max_num_batched_tokens": data.draw(st.sampled_from([5, 64])),
        "num_kv_blocks": data.draw(st.sampled_from([fewest_blocks, 64])),
        "dbo": data.draw(st.sampled_from(OFTEN)),
    }
