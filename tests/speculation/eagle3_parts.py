"""A small random EAGLE-3 drafter beside a model, as a checkpoint, and what it computes in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hf_tiny import HfModel
from safetensors.torch import save_file
from torch import Tensor, nn

HEADS, KV_HEADS, HEAD_DIM, WIDTH, EPS = 4, 2, 10, 24, 1e-5
THETA = 5000.0


class Drafter(nn.Module):
    """Parameters have the names of a checkpoint. Linear weights are [out, in]."""

    def __init__(
        self, hf: HfModel, layers: tuple[int, ...], few: int = 0, prefix: str = "midlayer", under: str = "", **more: Any
    ):
        """few: so many tokens has its head; 0: as many as the model, and its head is the model's. under: in
        front of all names but those of the head. more: of its config."""
        super().__init__()
        config = hf.model.config
        self.main, size, vocabulary = [hf.model], config.hidden_size, config.vocab_size
        self.layers, self.more, self.prefix, self.under = layers, more, prefix, under
        shapes = {
            "fc.weight": (size, len(layers) * size),
            "norm.weight": (size,),
            **{f"{prefix}.{name}norm.weight": (size,) for name in ("hidden_", "input_layer", "post_attention_layer")},
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * size),
            **{f"{prefix}.self_attn.{part}_proj.weight": (KV_HEADS * HEAD_DIM, 2 * size) for part in "kv"},
            f"{prefix}.self_attn.o_proj.weight": (size, HEADS * HEAD_DIM),
            **{f"{prefix}.mlp.{part}_proj.weight": (WIDTH, size) for part in ("gate", "up")},
            f"{prefix}.mlp.down_proj.weight": (size, WIDTH),
        }
        if few:
            shapes |= {"lm_head.weight": (few, size), "embed_tokens.weight": (vocabulary, size)}
        if more.get("fc_norm"):
            shapes |= {f"fc_norm.{number}.weight": (size,) for number in range(len(layers))}
        if more.get("norm_before_fc"):
            shapes["input_norm.weight"] = (len(layers) * size,)
        torch.manual_seed(11)
        self.own = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
        for name in shapes:
            if "norm" in name:
                self.own[name] = 1 + 0.2 * torch.randn(shapes[name])
        tokens = torch.randperm(vocabulary)[:few].sort().values if few else torch.arange(vocabulary)
        self.tokens = tokens
        if few:
            self.own["d2t"] = tokens - torch.arange(few)
            self.own["t2d"] = torch.isin(torch.arange(vocabulary), tokens)

    def write(self, path: Path, **change: Any) -> Path:
        """Its checkpoint: as speculators writes it, or the authors, by the names of its tensors. change: fields."""
        config = self.main[0].config
        inner = {
            "hidden_size": config.hidden_size, "intermediate_size": WIDTH, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS, "rope_theta": THETA,
            "vocab_size": config.vocab_size, "num_hidden_layers": 1, "hidden_act": "silu",
            "max_position_embeddings": 512,
        }  # fmt: skip
        outer = {"draft_vocab_size": len(self.tokens), **self.more, "eagle_aux_hidden_state_layer_ids": [*self.layers]}
        if self.prefix == "midlayer":
            raw = {**inner, **outer, "architectures": ["LlamaForCausalLMEagle3"]}
        else:
            inner = {**inner, "model_type": "llama"}
            raw = {**outer, "speculators_model_type": "eagle3", "transformer_layer_config": inner}
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({**raw, **change}))
        outside = ("lm_head.weight", "d2t", "t2d")
        named = {name if name in outside else self.under + name: tensor for name, tensor in self.own.items()}
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, path / "model.safetensors")
        return path

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Behind these tokens and the one that follows, by whole passes over the sequence."""
        main = self.main[0]
        with torch.inference_mode(), LastStates(main) as last:
            output = main.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
            states = [*output.hidden_states[:-1], last[0]]
            following = [*tokens[1:], int(main.lm_head(output.last_hidden_state[0, -1]).argmax())]
            chosen = [states[layer][0] for layer in self.layers]
            if self.more.get("fc_norm"):
                chosen = [self._norm(f"fc_norm.{number}", state) for number, state in enumerate(chosen)]
            seen = torch.cat(chosen, -1)
            if self.more.get("norm_before_fc"):
                seen = self._norm("input_norm", seen)
            hidden, found = seen @ self.own["fc.weight"].T, list[int]()
            for _ in range(count):
                given, normed = self._layer(torch.tensor(following), hidden)
                head = self.own.get("lm_head.weight", main.lm_head.weight)
                found.append(int(self.tokens[(normed[-1] @ head.T).argmax()]))
                hidden = torch.cat((hidden, (normed if self.more.get("norm_output") else given)[-1:]))
                following.append(found[-1])
        return found

    def _layer(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        own, prefix = self.own, self.prefix
        embedded = own.get("embed_tokens.weight", self.main[0].model.embed_tokens.weight)[ids]
        normed = self._norm(f"{prefix}.hidden_norm", hidden)
        by_default = prefix != "midlayer"
        residual = normed if self.more.get("norm_before_residual", by_default) else hidden
        both = torch.cat((self._norm(f"{prefix}.input_layernorm", embedded), normed), -1)
        heads = [
            (both @ own[f"{prefix}.self_attn.{part}_proj.weight"].T).view(len(ids), -1, HEAD_DIM).transpose(0, 1)
            for part in "qkv"
        ]
        q, k, v = rotated(heads[0]), rotated(heads[1]), heads[2]
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        residual = residual + mixed.transpose(0, 1).flatten(1) @ own[f"{prefix}.self_attn.o_proj.weight"].T
        x = self._norm(f"{prefix}.post_attention_layernorm", residual)
        gate, up, down = (own[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        given = residual + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        return given, self._norm("norm", given)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.own[f"{name}.weight"], EPS)


def rotated(x: Tensor) -> Tensor:
    """[heads, T, HEAD_DIM]"""
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


class LastStates:
    """Inside it, what the model's last norm is given: a list of it."""

    def __init__(self, main: Any) -> None:
        self._norm, self._last = main.model.norm, list[Tensor]()

    def __enter__(self) -> list[Tensor]:
        self._hook = self._norm.register_forward_pre_hook(lambda _, given: self._last.append(given[0]))
        return self._last

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
