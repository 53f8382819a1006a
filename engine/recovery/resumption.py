"""A step that a loss has broken off goes on at the layer where it was (cache/residuals.py, docs/surviving.md).

The first step of an epoch computes what the last one of the epoch before was computing, wherever those sequences are
now, and nothing else: requests that were not in it wait for the next one. If all ranks have the residual stream of all
of its tokens at the start of one layer, they go on there; else at the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs
from torch import Tensor

from cache.residuals import Kept, Residuals
from cache.rows import CacheRows
from engine.agreement import StepPlan
from engine.hooks import StepCompanion
from engine.recovery.resumed_step import ResumedStep
from engine.schedule import Schedule
from engine.scheduler import Scheduler
from front.messages import RankStats

_NOWHERE, _ANYWHERE = (0, 0), (0, 1 << 30)  # a rank without tokens goes on wherever the others do


class Resumption(StepCompanion):
    """One rank's. Used by the rank's thread."""

    num_words = 2

    def __init__(
        self, scheduler: Scheduler, rows: CacheRows, residuals: Residuals, like: Tensor, later: Callable[[], bool]
    ) -> None:
        """rows, residuals: of this rank's cache. like: [D], as the residual stream of a token. later(): the epoch that
        has been formed is not the first."""
        self.num_tokens = 0  # that went on
        self._scheduler, self._rows, self._residuals, self._like, self._later = scheduler, rows, residuals, like, later
        self._first = False  # the next step is the first of an epoch
        self._kept: dict[tuple[int, int], Kept] = {}  # by this rank, of the step before: by stay and position
        self._proposed: Schedule | None = None  # while the first step is agreed on
        self._found: dict[tuple[int, int], Kept] = {}  # of its tokens, by row and position

    def formed(self) -> None:
        self._first = self._later()

    def dropped(self) -> None:
        self._end()

    def scheduling(self) -> None:
        """Requests are held only where there is something to go on with: ranks may have met for another reason."""
        if self._first:
            self._end()
            takeover, scheduler = self._scheduler.takeover, self._scheduler
            self._kept = self._residuals.kept()
            mine = any((request.stay, request.num_computed) in self._kept for request in scheduler.running)
            takeover.resumes = mine or takeover.any_kept(scheduler.waiting)

    def propose(self, schedule: Schedule) -> Sequence[int]:
        """The words: the first and the last layer at whose start this rank could go on."""
        if not self._first:
            return _NOWHERE
        kept = self._kept | self._scheduler.takeover.kept
        stays = self._rows.stays[schedule.rows].tolist()
        tokens = zip(schedule.rows, stays, schedule.starts, schedule.counts, strict=True)
        low, high = _ANYWHERE
        for row, stay, start, count in tokens:
            for position in range(start, start + count):
                found = kept.get((stay, position))
                if found is None:
                    return _NOWHERE
                layers = [layer for layer in found.layers if layer > 0]
                low, high = max(low, min(layers)), min(high, max(layers))
                self._found[row, position] = found
        self._proposed = schedule
        return low, high

    def agreed(self, plan: StepPlan) -> None:
        self._first = self._scheduler.takeover.resumes = False

    def join(self, plan: StepPlan, said: Sequence[Sequence[int]]) -> None:
        if self._proposed is None:
            return
        low, layer = max(words[0] for words in said), min(words[1] for words in said)
        if 0 < layer >= low and plan.runs and plan.parts == 1:
            rows = {key: kept.rows[kept.layers.index(layer)] for key, kept in self._found.items()}
            self._proposed.resumed = ResumedStep(layer, rows, self._like)
            self.num_tokens += len(rows)
        self._end()

    def add_to(self, stats: RankStats) -> RankStats:
        return structs.replace(stats, resumed=self.num_tokens)

    def _end(self) -> None:
        self._proposed = None
        self._found.clear()
        self._kept = {}
        self._scheduler.takeover.kept.clear()
