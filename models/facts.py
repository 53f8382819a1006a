"""What can be said of a model from its config.json alone. Free of torch: the front and the command line read it."""

from __future__ import annotations

from typing import Protocol


class ModelFacts(Protocol):
    """Every family's config dataclass has these."""

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
    def num_experts(self) -> int: ...  # routed experts per MoE layer; 0 for a dense model
    @property
    def num_moe_layers(self) -> int: ...
    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of cache that one token costs over all layers, with elements of `itemsize` bytes."""
        ...

    def kv_fp8_bytes_per_token(self) -> int:
        """The same of a cache kept in FP8; 0 where there is none."""
        ...
