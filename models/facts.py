"""What can be said of a model from its config.json alone. Free of torch: the front and the command line read it."""

from __future__ import annotations

from typing import Protocol

from msgspec import structs

from cache.spec import CacheSpec, state_groups
from models.key_names import KeyNames


class ModelFacts(Protocol):
    """Every family's config, a Struct, has these."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def context_limit(self) -> int: ...  # the most tokens of a sequence; more than max_position_embeddings with yarn
    @property
    def context_reason(self) -> str: ...  # what sets context_limit
    @property
    def num_experts(self) -> int: ...  # routed experts per MoE layer; 0 for a dense model
    @property
    def moe_intermediate_size(self) -> int: ...  # the width of a routed expert; 0 for a dense model
    @property
    def mla_dims(self) -> tuple[int, int, int, int, int] | None: ...  # as mla.protocol.MlaShape; None: it has no MLA
    @property
    def num_moe_layers(self) -> int: ...
    @property
    def key_names(self) -> KeyNames: ...  # how its checkpoints call what models read
    def cache_spec(self, dtype: str, fp8: bool = False) -> CacheSpec:
        """What the model keeps of every sequence when it computes in `dtype`. fp8: kept in 8 bits; raises ValueError,
        naming what cannot be, where the family or its widths have no such cache."""
        ...


def mtp_layers(facts: ModelFacts) -> int:
    """How many layers the checkpoint has that can draft. A family without any need not say so."""
    return int(getattr(facts, "num_mtp_layers", 0))


def takes_drafts(facts: ModelFacts) -> bool:
    """Whether a token and drafts behind it can be computed in one step: layers with states have to keep what they
    project of the drafts (layers/gated_delta.py)."""
    return getattr(facts, "kept_drafts", None) is not None or not state_groups(facts.cache_spec("float32"))


def with_kept_drafts(facts: ModelFacts, most: int) -> ModelFacts:
    """The same model with room in its states for so many drafts of a sequence in a step."""
    assert takes_drafts(facts)
    if getattr(facts, "kept_drafts", None) is None:
        return facts
    with_room: ModelFacts = structs.replace(facts, kept_drafts=most)  # type: ignore[type-var]  # all are Structs
    return with_room


def with_drafts(facts: ModelFacts, whole: bool = False) -> ModelFacts:
    """The same model with its first MTP layer: one layer more with experts, and one more in the cache. whole: all ranks
    have all of its experts, which are placed nowhere."""
    assert mtp_layers(facts)
    more = {"drafts": True, "whole_drafts": whole and facts.num_moe_layers > 0}
    with_layer: ModelFacts = structs.replace(facts, **more)  # type: ignore[type-var]  # all are Structs
    return with_layer
