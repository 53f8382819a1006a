"""What the engine needs from a model: its facts (models/facts.py) and a few methods.

Legend: T tokens of the step, D hidden size, P rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cache.memory import CacheMemory
from cache.spec import CacheSpec
from dbo.steps import Steps
from ep.experts import WeightFormat
from ep.moe import MoE
from ep.parallel import Parallel
from ep.place import SlotTable
from layers.step import StepInput
from layers.stored import StoredForm, StoredWeight
from layers.weights import Key
from models.facts import ModelFacts
from models.graph_breaks import EAGER, GraphBreaks
from store.memory import Store

Observer = Callable[[Tensor], None]


class CausalLM(Protocol):
    """A language model on one rank."""

    config: ModelFacts
    parallel: Parallel

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """The numbers of the layers with routed experts, among all layers."""
        ...

    def cache_spec(self) -> CacheSpec:
        """The cache that this model reads and writes."""
        ...

    def steps(self, step: StepInput, cache: CacheMemory, lane: int = 0, breaks: GraphBreaks = EAGER) -> Steps[Tensor]:
        """Forward pass as a generator; its value is the hidden state after the last norm, [T, D]."""
        ...

    def shorten(self, on: bool) -> None:
        """From now on `steps` goes through the first layers only, as many as have one of each kind among them; or
        through all again. What comes out is of no use, but whatever is slow at its first time is over then."""
        ...

    def keep_states(self, num_parts: int, num_tokens: int) -> None:
        """From now on steps of at most so many tokens keep what the layer that drafts is to see."""
        ...

    def draft_input(self, hidden_TD: Tensor, lane: int = 0) -> Tensor:
        """The hidden_TD of `draft_steps` behind a pass of `steps`, which gave this one; before the next such pass."""
        ...

    def draft_tokens(self, hidden_SD: Tensor, num_valid_tokens: int, out_S: Tensor) -> Tensor:
        """int64 [S], in out_S: the best tokens after what `draft_steps` gave: of the first num_valid_tokens, where the
        model's head tells, or those that the drafter knows."""
        ...

    @property
    def drafts_exchange(self) -> bool:
        """Whether the layer that drafts has experts on other ranks."""
        ...

    def draft_steps(
        self,
        step: StepInput,
        hidden_TD: Tensor,
        cache: CacheMemory,
        lane: int = 0,
        breaks: GraphBreaks = EAGER,
        rows_S: Tensor | None = None,
    ) -> Steps[Tensor]:
        """A pass of the layer that drafts, where the facts have one (`drafts`). step: as of `steps`, but with each
        token replaced by the one that follows it; hidden_TD: of `draft_input`, or an earlier pass of this kind, and
        used up by it; rows_S: the tokens of which something is wanted, int64, None: all. Its value, [S, D], is what
        `draft_tokens` makes drafts of, and the hidden_TD of one token further."""
        ...

    def logits(self, hidden_PD: Tensor) -> Tensor:
        """[P, D] -> [P, V], in the model's dtype."""
        ...

    def logits_part(self, hidden_PD: Tensor, first: int, last: int) -> Tensor:
        """[P, D] -> [P, last - first]: of `logits` those from `first`, a multiple of 64, up to `last`."""
        ...

    def greedy_tokens(self, hidden_PD: Tensor, num_valid_tokens: int, out_P: Tensor | None = None) -> Tensor:
        """int64 [P]: of the first num_valid_tokens logits the largest, the first of equals; in out_P if there is
        one."""
        ...

    def keep_experts(self, form: WeightFormat, backend: str = "auto") -> None:
        """How experts are kept in memory, and what multiplies by them; before `load`."""
        ...

    def keep_linears(self, form: WeightFormat) -> None:
        """How the matrices outside the experts are kept in memory; before `load`."""
        ...

    def load(self, source: WeightSource, store: Store | None = None) -> None:
        """Fill every parameter from the checkpoint; reads only the experts that this rank owns. Or have them in a
        store, which the ranks of a machine fill together (models/parts.py)."""
        ...

    def update_group(self, parallel: Parallel) -> None:
        """Exchange in the ranks and by the placement of `parallel` from now on (models/expert_parallel.py has both)."""
        ...

    def count(self, load: Callable[[int], Observer], arrivals: Callable[[int], Observer]) -> None:
        """For each MoE layer, what is shown its routing and the rows that arrive (ep/moe.py), from now on."""
        ...

    def update_expert_map(self, parallel: Parallel, tables: Sequence[SlotTable]) -> None:
        """Route by the placement of `parallel` from now on, between the same ranks; tables: one per MoE layer."""
        ...

    @property
    def moe_layers(self) -> Sequence[tuple[int, MoE]]:
        """The layers with routed experts, each with its number among all layers."""
        ...

    def expert_storage(self, layer: int, slot: int) -> tuple[Tensor, ...]:
        """Everything that makes up the expert in `slot` of this rank, in the layer-th MoE layer: contiguous views."""
        ...

    def read_expert(self, source: ExpertSource, layer: int, slot: int, expert: int) -> None:
        """Read `expert` of the layer-th MoE layer into `slot` of this rank."""
        ...

    def expert_keys(self, source: ExpertSource, layer: int, expert: int) -> Sequence[Key]:
        """What `read_expert` borrows for it."""
        ...


class ExpertSource(Protocol):
    """Where experts are read from when the ranks are at work: a checkpoint, or what was read of it ahead."""

    def has(self, name: str) -> bool:
        """Whether there is a weight of this name, in whatever form."""
        ...

    def form_of(self, name: str) -> StoredForm:
        """In which form a weight that is there is stored."""
        ...

    def borrow(self, name: str, shape: tuple[int, ...], index: int | None = None) -> StoredWeight:
        """Tensor `name`, or its part `index`, as it lies in the checkpoint, with its scales if it has any; until
        `give_back`. Marks it used."""
        ...

    def give_back(self, name: str) -> None: ...


class WeightSource(ExpertSource, Protocol):
    """A checkpoint, by key (layers/weights.py has the safetensors one)."""

    def read(self, name: str, out: Tensor, index: int | None = None) -> None:
        """Read tensor `name`, or its part `index` along the first dimension, into `out` (shape checked, dtype
        converted, weights of fewer bits widened); marks it used."""
        ...

    def skip(self, name: str) -> None:
        """Mark a key as deliberately not read by this rank (an expert that lives elsewhere, an MTP layer)."""
        ...

    def dtype_of(self, name: str) -> torch.dtype:
        """In which a tensor that is there, of plain numbers, is stored."""
        ...

    def names(self) -> Iterable[str]:
        """Every key of the checkpoint."""
        ...

    def finish(self) -> None:
        """Raise if any key of the checkpoint was neither read nor skipped, naming the first few."""
        ...
