"""What the engine needs from a model: its facts (models/facts.py) and a few methods.

Legend: T tokens of the step, D hidden size, P rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from dbo.steps import Steps
from ep.parallel import Parallel
from layers.paged_kv import KVSpec, PagedKV
from layers.step import StepInput
from models.facts import ModelFacts


class CausalLM(Protocol):
    """A language model on one rank."""

    config: ModelFacts

    def kv_spec(self) -> KVSpec:
        """The paged cache that this model reads and writes, in its own dtype."""
        ...

    def steps(self, step: StepInput, kv: PagedKV, lane: int = 0) -> Steps[Tensor]:
        """Forward pass as a generator; its value is the hidden state after the last norm, [T, D]."""
        ...

    def logits(self, hidden_PD: Tensor) -> Tensor:
        """[P, D] -> [P, V], in the model's dtype."""
        ...

    def load(self, source: WeightSource) -> None:
        """Fill every parameter from the checkpoint; reads only the experts that this rank owns."""
        ...

    def rehost(self, parallel: Parallel) -> None:
        """Exchange in the ranks and by the placement of `parallel` from now on (models/hosting.py has both)."""
        ...

    def read_expert(self, source: WeightSource, layer: int, slot: int, expert: int) -> None:
        """Read `expert` of the layer-th MoE layer into `slot` of this rank."""
        ...


class WeightSource(Protocol):
    """A checkpoint, by key (layers/weights.py has the safetensors one)."""

    def read(self, name: str, out: Tensor, index: int | None = None) -> None:
        """Read tensor `name`, or its part `index` along the first dimension, into `out` (shape checked, dtype converted,
        block-FP8 dequantised); marks it used."""
        ...

    def skip(self, name: str) -> None:
        """Mark a key as deliberately not read by this rank (an expert that lives elsewhere, an MTP layer)."""
        ...

    def has(self, name: str) -> bool: ...

    def names(self) -> Iterable[str]:
        """Every key of the checkpoint."""
        ...

    def finish(self) -> None:
        """Raise if any key of the checkpoint was neither read nor skipped, naming the first few."""
        ...
