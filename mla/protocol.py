"""Multi-head latent attention as the models see it.

The cache keeps, per token, one latent shared by all heads and one rotated key: [latent | k_pe], C + P numbers. Keys and
values of head h are k = [W_UK[h] latent | k_pe] and v = W_UV[h] latent. Two ways to the same result:

- naive: build k and v of every cached token, then ordinary attention. Few operations per (query, key) pair.
- absorbed: q_nope goes through W_UK first, then all heads attend to the latents themselves (as one key-value head), and
  W_UV is applied to what comes out. Nothing is built per cached token: right for decode.

Legend: T tokens of the step, H heads, N width of a head's key without position, P width of the rotated key, C width of
the latent, X = C + P width of a cache row, V width of a head's value, R rows of the cache.
"""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct
from torch import Tensor

from layers.step import StepInput

PrefillMode = Literal["naive", "absorbed", "auto"]


class MlaShape(Struct, frozen=True):
    num_heads: int  # H
    qk_nope_head_dim: int  # N
    qk_rope_head_dim: int  # P
    latent_dim: int  # C
    v_head_dim: int  # V

    @property
    def cache_dim(self) -> int:
        """X: numbers per cached token."""
        return self.latent_dim + self.qk_rope_head_dim

    @property
    def key_dim(self) -> int:
        """Width of a built key: N + P."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class PreparedStep(Protocol):
    """Attention of one step, prepared once and used by every layer.

    q_nope_THN and q_pe_THP: queries, q_pe rotated; cache_RX: the layer's cache, this step's rows already written;
    w_uk_HNC, w_uv_HVC: the two halves of kv_b_proj. Returns [T, H, V] in the dtype of the queries.
    """

    def __call__(
        self, q_nope_THN: Tensor, q_pe_THP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor: ...


class MlaBackend(Protocol):
    def prepare(self, step: StepInput) -> PreparedStep: ...
