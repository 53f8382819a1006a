"""The layer of a checkpoint that predicts the token after next (MTP: multi-token prediction), which drafts.

At position p it sees the embedding of token p + 1 and the state of the main model at p, after its last norm, and its
own earlier positions: it is one more decoder layer, with a cache of its own. What comes of it behind its norm goes
through the main model's head, and can stand for the main model's state when it drafts one token more. Source:
DeepSeek-V3's technical report (arXiv 2412.19437), 2.2; transformers has it as `MtpLayer`.

Legend: T tokens, S of them of which something is wanted, D hidden size.
"""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor, nn

from cache.memory import CacheMemory
from dbo.alive import mark
from dbo.steps import Steps
from layers.embed import take_rows
from layers.linear import Linear
from layers.norm import RMSNorm
from models.base import WeightSource
from models.decoder_layer import A, DecoderLayer, LayerContext

# Copies of the main model's: what the layer has of its own, and where the main model's is; the second where the head
# is the embedding.
_SHARED = {
    "embed_tokens.weight": ("model.embed_tokens.weight", "model.embed_tokens.weight"),
    "shared_head.head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
}


class MtpLayer(nn.Module, Generic[A]):
    """eh_proj, a product with [embedding; state], is kept as its two halves, so that nothing is brought together
    first."""

    def __init__(
        self, layer: DecoderLayer[A], index: int, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        """index: the number of the layer, which comes behind the main model's."""
        super().__init__()
        self.index = index
        self.embedding_norm = RMSNorm(hidden_size, eps, dtype, device)
        self.hidden_norm = RMSNorm(hidden_size, eps, dtype, device)
        self.from_embedding = Linear(hidden_size, hidden_size, False, dtype, device)
        self.from_hidden = Linear(hidden_size, hidden_size, False, dtype, device)
        self.layer = layer
        self.norm = RMSNorm(hidden_size, eps, dtype, device)

    def steps(
        self, embedded_TD: Tensor, hidden_TD: Tensor, rows_S: Tensor | None, context: LayerContext, cache: CacheMemory
    ) -> Steps[Tensor]:
        """[S, D]: what the head makes drafts of. embedded_TD: of the tokens that follow the step's; hidden_TD: of the
        step's, from the main model or from here. rows_S: the tokens of which something is wanted; None: all. Of the
        others only what the cache keeps is made: the layer is the last one."""
        mark()
        layer = self.layer
        residual_TD: Tensor = self.from_embedding(self.embedding_norm(embedded_TD))
        x_TD = layer.input_norm.add(self.from_hidden(self.hidden_norm(hidden_TD)), residual_TD)
        mixed_TD = yield from layer.mixer.steps(x_TD, context, cache.layers[self.index])
        if rows_S is not None:
            mixed_TD, residual_TD = take_rows(mixed_TD, rows_S), take_rows(residual_TD, rows_S)
            if not len(rows_S) and not layer.mlp.exchanges:
                return residual_TD
        x_TD = layer.post_norm.add(mixed_TD, residual_TD)
        mlp_TD = yield from layer.mlp_steps(x_TD, context)
        return self.norm.add(mlp_TD, residual_TD)

    def read(self, source: WeightSource, tied: bool, vocab_size: int) -> None:
        """Fill what is not the decoder layer's. tied: the main model's head is its embedding. ValueError: it has an
        embedding or a head that is not the main model's."""
        prefix = f"model.layers.{self.index}."
        size = self.embedding_norm.weight.shape[0]
        both = torch.empty(size, 2 * size, dtype=self.from_hidden.weight.dtype, device=self.from_hidden.weight.device)
        source.read(f"{prefix}eh_proj.weight", both)
        self.from_embedding.weight.copy_(both[:, :size])
        self.from_hidden.weight.copy_(both[:, size:])
        source.read(f"{prefix}enorm.weight", self.embedding_norm.weight)
        source.read(f"{prefix}hnorm.weight", self.hidden_norm.weight)
        source.read(f"{prefix}shared_head.norm.weight", self.norm.weight)
        for name, mains in _SHARED.items():
            if source.has(prefix + name):
                _check_equal(source, prefix + name, mains[tied], (vocab_size, size))


def _check_equal(source: WeightSource, name: str, main: str, shape: tuple[int, ...]) -> None:
    equal = torch.equal(source.borrow(name, shape).weight, source.borrow(main, shape).weight)
    source.give_back(name)
    source.give_back(main)
    if not equal:
        raise ValueError(f"{name} is not {main}: an MTP layer with weights of its own there is not supported")
