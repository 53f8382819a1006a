"""The memory of a rank's cache, as the plan has it: its own, or memory that outlives the rank (cache/shared.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cache.manager import CacheManager
from cache.memory import CacheMemory
from cache.rows import CacheRows
from cache.shared import FormerCache, Layout, SharedCache
from cache.spec import CacheSpec, check_spec, state_groups
from cache.takeover import Takeover
from configs.cache import planned_sizes
from configs.engine import Plan
from engine.process.orphan import is_alive, life_of
from engine.recovery.resumption import Resumption
from engine.scheduler import Scheduler
from models.base import CausalLM

MOST_KEPT = 512  # tokens of a step that a loss breaks off, with which others go on where it was


class RankCache:
    """memory: of the model's layers. rows: where the tables of blocks lie, and what whoever schedules writes of them;
    None: in their own memory."""

    def __init__(
        self,
        plan: Plan,
        model: CausalLM,
        device: torch.device,
        rank: int,
        files: Callable[[int], Sequence[Path]] | None,
    ) -> None:
        """files: of the cache of each rank, [] where those are not on this machine; None: no cache outlives its
        rank."""
        spec = model.cache_spec()
        check_spec(spec, model.config.num_layers + 1)
        self._files = files
        self._row = torch.empty(model.config.hidden_size, dtype=getattr(torch, plan.dtype))  # of the residual stream
        self._layout = _layout(plan, spec, self._row.nbytes)
        self._shared: SharedCache | None = None
        self.rows: CacheRows | None = None
        own = files(rank) if files is not None and device.type == "cpu" else ()
        if own:
            self._shared = SharedCache(own, self._layout, life_of(os.getpid()))
            self.rows = self._shared.rows
        there = (None, None) if self._shared is None else (self._shared.fields, self._shared.residuals)
        self.memory = CacheMemory.allocate(spec, self._layout.sizes, device, *there)

    def takeover(self, manager: CacheManager, between: Callable[[Callable[[], bool]], bool]) -> Takeover:
        """between: as Takeover has it."""
        if self._shared is None or self._files is None:
            return Takeover(manager)
        return Takeover(manager, FormerCache(self._files, self._layout, is_alive), self.memory, self.rows, between)

    def resumption(self, scheduler: Scheduler, later: Callable[[], bool]) -> list[Resumption]:
        """What steps go on with that a loss has broken off; [] where nothing is kept of them. later: as Resumption has
        it."""
        if self.rows is None or not self._layout.kept_tokens:
            return []
        return [Resumption(scheduler, self.rows, self.memory.residuals, self._row, later)]

    def forget_former(self) -> None:
        """Nobody wants any more what the process before this one has left."""
        if self._shared is not None:
            self._shared.forget_former()


def _layout(plan: Plan, spec: CacheSpec, residual_bytes: int) -> Layout:
    """With padded graphs there is one block more of every group, and one record, to which padding is written."""
    sizes = planned_sizes(plan, spec)
    scratch = bool(plan.cudagraph_capture_sizes)
    more = {name: getattr(sizes, name) + scratch for name in ("num_blocks", "num_window_blocks", "num_records")}
    kept = min(plan.max_num_batched_tokens, MOST_KEPT) if plan.resume_steps and not state_groups(spec) else 0
    columns = -(-plan.max_model_len // plan.block_size)
    return Layout(spec, sizes._replace(**more), plan.max_num_seqs, columns, kept, residual_bytes if kept else 0)
