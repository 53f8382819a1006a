"""The leading rank's part of balancing: what it thinks, beside the steps, on the worker (engine/rebalance/follower.py).

Legend: L MoE layers, G live ranks, E logical experts, N steps.

The balancer (eplb/balancer.py) sees the counts of all ranks and decides. What it decides becomes proposals, one at a
time: new shares for every layer, or placements that follow each other, each of which brings a rank as many experts as
one step's budget holds. A plan that moves more is a target, approached by several proposals; all shares on the way are
made from the newest loads for exactly the slots of their placement, so that the experts are well balanced then too.
While a target is approached the balancer goes on averaging loads, and what it decides is not followed.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from configs.eplb import EplbConfig
from engine.rebalance.exchange import Counts, MoveBatch
from eplb.balance import balancedness, placement_balance
from eplb.balancer import Balancer, BalancerConfig, Decision
from eplb.bounds import balance_bound
from eplb.offline.batches import next_batch
from eplb.offline.placement_file import describe, encode_placement
from eplb.offline.trace import TraceMeta, header_line, record_line
from eplb.placement import Placement
from eplb.planner import plan
from eplb.repair import diff
from eplb.shares import reweight
from front.messages import BalanceCommand, BalanceReply, BalanceReport, BalanceStatus, RankToFront

log = logging.getLogger("moesaic.eplb")

MAX_BATCHES = 8  # placements of one proposal
LEAST_SHARE = 0.005  # shares that change by less are not worth a change-over

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class BalanceSpec(Struct, frozen=True, kw_only=True):
    """Of the rank and its model: what does not change while the rank lives."""

    rank: int
    model: str
    layer_ids: tuple[int, ...]
    expert_bytes: int
    chunk_bytes: int  # what a rank may receive per step


class _Window:
    """Tokens and balancedness over steps."""

    def __init__(self, num_layers: int, num_experts: int, num_ranks: int) -> None:
        self.steps = self.tokens = self.seen = 0
        self.load_LE: Ints = np.zeros((num_layers, num_experts), dtype=np.int64)
        self.rows_LG: Ints = np.zeros((num_layers, num_ranks), dtype=np.int64)
        self.step_balance_L: Floats = np.zeros(num_layers)  # summed over the steps seen

    def add(self, counts: Counts) -> None:
        self.steps += counts.counted.steps
        self.tokens += counts.counted.tokens
        self.load_LE += counts.load_LE
        rows_NLG = counts.rows_NLG
        steps, layers, ranks = rows_NLG.shape
        self.rows_LG += rows_NLG.sum(0)
        self.step_balance_L += balancedness(rows_NLG.reshape(-1, ranks)).reshape(steps, layers).sum(0)
        self.seen += steps


class Coordinator:
    """Used by one thread, the worker. `outbox`: what the front is to be told; `proposal`: placements to be published,
    taken by the rank's thread."""

    def __init__(self, spec: BalanceSpec, config: EplbConfig, placement: Placement, epoch: int) -> None:
        self.outbox: deque[RankToFront] = deque()
        self.proposal: list[Placement] = []
        self._spec = spec
        self._config = config
        self._balancer = Balancer(
            placement,
            BalancerConfig(
                memory_steps=config.memory_steps,
                reweight_interval=config.reweight_interval,
                move_interval=config.move_interval,
                move_budget_bytes=spec.chunk_bytes,
                min_gain=config.min_gain,
                bytes_per_expert=spec.expert_bytes,
            ),
        )
        self._recording: IO[bytes] | None = None
        self._recording_path = ""
        self._steps = self._reweights = self._moves = self._bytes_moved = self._failures = 0
        self._last_error = ""
        self.begin(placement, epoch)

    def begin(self, placement: Placement, epoch: int) -> None:
        """A new epoch: whatever was under way is given up."""
        self._epoch = epoch
        self._current = placement
        self._target: npt.NDArray[np.int32] | None = None
        self._outstanding: npt.NDArray[np.int32] | None = None  # the slots of what is proposed and not yet taken
        self.proposal = []
        self._changed_at = self._steps
        self._window = self._new_window()
        self._last: _Window | None = None
        self._balancer.resync(placement)

    def observe(self, counts: Counts) -> None:
        """What some steps have brought. Never raises: a balancer that fails says so, and serving goes on."""
        try:
            self._record(counts)
            self._window.add(counts)
            self._steps += counts.counted.steps
            self._follow(self._decide(counts))
            self._last_error = ""
        except Exception as error:
            self.fail(error)
        if self._window.steps >= self._config.window_size:
            self._last, self._window = self._window, self._new_window()
            self._report()

    def committed(self, batch: MoveBatch, last: bool) -> None:
        """All ranks go over to a placement; last: of what was proposed."""
        before, self._current = self._current, batch.placement
        self._reweights += 1
        if not np.array_equal(before.slot_to_expert, self._current.slot_to_expert):
            self._moves += len(batch.migration.moves)
            self._bytes_moved += batch.migration.bytes_received
            self._changed_at = self._steps
        self._balancer.resync(self._current)
        if last:
            self._outstanding = None
            self._approach()

    def dropped(self, why: str) -> None:
        """Some rank could not take what was proposed."""
        self._outstanding = None
        self._target = None
        self._balancer.resync(self._current)
        self.fail(RuntimeError(why))

    def fail(self, error: Exception) -> None:
        """Count it and tell the front; the log has it once for equal failures in a row."""
        text = (str(error).splitlines() or [""])[0]
        text = f"{type(error).__name__}: {text}"
        self._failures += 1
        if text != self._last_error:
            log.error("event=eplb_failed epoch=%d error=%r", self._epoch, text, exc_info=error)
            self._last_error = text
            self._report()

    def answer(self, command: BalanceCommand) -> None:
        """One BalanceReply, whatever happens."""
        try:
            body, error = self._answer(command), ""
        except (ValueError, OSError) as refused:
            body, error = b"{}", (str(refused).splitlines() or [""])[0]
        except Exception as failure:
            self.fail(failure)
            body, error = b"{}", self._last_error
        self.outbox.append(BalanceReply(command_id=command.command_id, body=body, error=error))

    def close(self) -> None:
        """End the recording. What was still to be written may find no room."""
        recording, self._recording, self._recording_path = self._recording, None, ""
        try:
            if recording is not None:
                recording.close()
        except OSError as error:
            self.fail(RuntimeError(f"the recording is cut short: {error}"))

    # ---- deciding ----

    def _decide(self, counts: Counts) -> Decision | None:
        """The balancer thinks in single steps: each is given the mean of these."""
        steps = counts.counted.steps
        mean_LE = counts.load_LE / max(steps, 1)
        last: Decision | None = None
        for _ in range(steps):
            last = self._balancer.observe(mean_LE) or last
        return last

    def _follow(self, decision: Decision | None) -> None:
        new, old = None if decision is None else decision.placement, self._current
        moves = new is not None and not np.array_equal(new.slot_to_expert, old.slot_to_expert)
        if self._outstanding is None and self._target is None and new is not None:
            if moves:
                self._target = new.slot_to_expert
                self._approach(new)
            elif np.abs(new.share - old.share).max() > LEAST_SHARE:
                self._propose([new])
            return
        # Something is under way. Moves can wait when that is new shares only; shares will be made anew.
        only_shares = self._outstanding is not None and np.array_equal(self._outstanding, old.slot_to_expert)
        if moves and new is not None and self._target is None and only_shares:
            self._target = new.slot_to_expert
        self._balancer.resync(old)
        if self._outstanding is None:
            self._approach()

    def _approach(self, whole: Placement | None = None) -> None:
        """Propose the next placements towards the target. whole: what to propose at the end of it."""
        if self._target is None:
            return
        per_rank = max(1, self._spec.chunk_bytes // self._spec.expert_bytes)
        old, batches = self._current, list[Placement]()
        while len(batches) < MAX_BATCHES and not np.array_equal(old.slot_to_expert, self._target):
            ids = next_batch(old, self._target, per_rank)
            if whole is not None and np.array_equal(ids, whole.slot_to_expert):
                old = whole
            else:
                share = reweight(ids, self._balancer.load_LE, old.alive)
                old = replace(old, slot_to_expert=ids, share=share)
            batches.append(old)
        if batches:
            self._propose(batches)
        else:
            self._target = None

    def _propose(self, batches: list[Placement]) -> None:
        self._outstanding = batches[-1].slot_to_expert
        self.proposal = batches

    # ---- what it says ----

    def _status(self) -> BalanceStatus:
        window = self._last or self._window
        moving = 0 if self._target is None else int((self._target != self._current.slot_to_expert).sum())
        balance = balancedness(window.rows_LG) if window.steps else np.zeros(0)
        steps = window.step_balance_L / window.seen if window.seen else np.zeros(0)
        bound = self._bound(window.load_LE) if window.steps else np.zeros(0)
        return BalanceStatus(
            rank=self._spec.rank,
            epoch=self._epoch,
            steps=self._steps,
            window_balance=balance.tolist(),
            step_balance=steps.tolist(),
            lower_bound=bound.tolist(),
            age_steps=self._steps - self._changed_at,
            reweights=self._reweights,
            moves=self._moves,
            bytes_moved=self._bytes_moved,
            failures=self._failures,
            last_error=self._last_error,
            moving=moving,
            recording=self._recording_path,
        )

    def _report(self) -> None:
        self.outbox.append(BalanceReport(self._status()))
        if self._recording is not None:
            self._recording.flush()

    def _bound(self, load_LE: Ints) -> Floats:
        live = sum(self._current.alive)
        return balance_bound(load_LE, self._current.slots_per_rank * live, live)

    def _new_window(self) -> _Window:
        current = self._current
        return _Window(current.num_layers, current.num_experts, sum(current.alive))

    # ---- what it is asked ----

    def _answer(self, command: BalanceCommand) -> bytes:
        if command.kind == "status":
            return msgspec.json.encode(self._status())
        if command.kind == "placement":
            return encode_placement(describe(self._current, self._spec.model, self._spec.layer_ids))
        if command.kind == "load":
            window = self._last or self._window
            load = {"steps": window.steps, "tokens": window.tokens, "load": window.load_LE.tolist()}
            return msgspec.json.encode(load)
        if command.kind == "record":
            return self._start_recording(command.path)
        return self._plan(take=command.kind == "rebalance")

    def _plan(self, take: bool) -> bytes:
        """A full plan for the loads of the last window and of the one that runs."""
        load_LE = self._window.load_LE + (self._last.load_LE if self._last is not None else 0)
        if not load_LE.any():
            raise ValueError("no tokens have been counted yet: there is nothing to plan from")
        current = self._current
        whole = self._best(current, load_LE)
        moved = diff(current, whole)
        if take:
            self._target = whole.slot_to_expert
            if self._outstanding is None:
                self._approach()
        return msgspec.json.encode(
            {
                "moves": len(moved),
                "bytes": len(moved) * self._spec.expert_bytes,
                "steps": self._window.steps + (self._last.steps if self._last is not None else 0),
                "balance_now": placement_balance(current, load_LE).tolist(),
                "balance_planned": placement_balance(whole, load_LE).tolist(),
                "lower_bound": self._bound(load_LE).tolist(),
                "taken": take,
                **({} if take else {"moved": [load._asdict() for load in moved]}),
            }
        )

    def _best(self, current: Placement, load_LE: Ints) -> Placement:
        if current.everywhere:
            return replace(current, share=reweight(current.slot_to_expert, load_LE, current.alive))
        planned = plan(
            load_LE,
            current.num_ranks,
            current.slots_per_rank,
            alive=current.alive,
            failure_domains=current.failure_domains,
            epoch=current.epoch,
            current=current,
        ).placement
        return replace(planned, stores=current.stores)

    def _start_recording(self, path: str | None) -> bytes:
        was = self._recording_path
        self.close()
        if path is not None:
            self._recording = Path(path).open("xb")  # noqa: SIM115 (closed by close)
            self._recording_path = path
            spec, current, window = self._spec, self._current, self._last or self._window
            choices = window.tokens * current.num_layers
            top_k = round(window.load_LE.sum() / choices) if choices else 0  # 0: not known yet
            meta = TraceMeta(spec.model, sum(current.alive), top_k, "moesaic", spec.layer_ids)
            self._recording.write(header_line(meta, current.num_layers, current.num_experts))
            self._recording.flush()
        said: dict[str, Any] = {"recording": self._recording_path, "ended": was}
        return msgspec.json.encode(said)

    def _record(self, counts: Counts) -> None:
        if self._recording is None:
            return
        try:
            self._recording.write(record_line(self._steps, counts.counted.steps, counts.counted.tokens, counts.load_LE))
        except OSError as error:
            self.close()
            self.fail(RuntimeError(f"the recording has ended: {error}"))
