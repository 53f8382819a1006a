"""What follows from fields that the families have in common: the cache with a drafter's rows, the longest context, and
which layers have experts. Free of torch."""

from __future__ import annotations

from collections.abc import Callable

from cache.spec import CacheSpec
from layers.rope_parameters import RopeParameters
from models.eagle3.config import Eagle3Config, with_rows
from models.shared_fields import context_limit


class SharedFacts:
    """Of models.facts.ModelFacts, what follows from fields that the families without states have in common."""

    __slots__ = ()
    max_position_embeddings: int
    rope: RopeParameters
    num_layers: int
    moe_layers: tuple[int, ...]
    drafts: bool
    whole_drafts: bool
    eagle3: Eagle3Config | None
    own_cache: Callable[[str, bool], CacheSpec]  # (dtype, fp8): what the family keeps, as a method of its own

    def cache_spec(self, dtype: str, fp8: bool = False) -> CacheSpec:
        """What the family keeps, and what a drafter does. Raises ValueError, as models.facts.ModelFacts."""
        return with_rows(self.own_cache(dtype, fp8), self.eagle3, self.num_layers, dtype)

    @property
    def context_limit(self) -> int:
        return context_limit(self.max_position_embeddings, self.rope)[0]

    @property
    def context_reason(self) -> str:
        return context_limit(self.max_position_embeddings, self.rope)[1]

    @property
    def num_moe_layers(self) -> int:
        spread = self.drafts and not self.whole_drafts
        return sum(self.has_experts(layer) for layer in range(self.num_layers + spread))

    def has_experts(self, layer: int) -> bool:
        return min(layer, self.num_layers - 1) in self.moe_layers
