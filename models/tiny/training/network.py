"""The training module: a DeepSeek-V3-shaped decoder (MLA, routed experts, one MTP layer) in plain PyTorch.

Written apart from the inference engine on purpose, so that the two can check each other.

Shape letters: B windows, T tokens per window, N = B*T rows, D hidden size, H heads, E experts, K experts per
token, G expert groups, F expert width, V vocabulary, R query rank, C key-value rank, Q no-position head width,
P rotary head width, W value head width.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor, nn


class Shape(Struct, frozen=True):
    """Every size of the model; the names are those of DeepSeek-V3's ``config.json``."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    moe_intermediate_size: int = 96
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    num_attention_heads: int = 6
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    n_shared_experts: int = 1
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1024


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width] -> [..., width]``, computed in float32."""
        x32 = x.float()
        return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * self.weight


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias."""
    return nn.Linear(inputs, outputs, bias=False)


def rotary_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and pair: two ``[T, P/2]``."""
    exponents = torch.arange(0, shape.qk_rope_head_dim, 2).float() / shape.qk_rope_head_dim
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs ``(x0, x1), (x2, x3), ...`` of ``[B, H, T, P]``.

    The result holds all first members, then all second members: queries and keys are permuted alike, so their
    products are those of the interleaved layout.
    """
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded (prefill) form."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.num_attention_heads
        self.q_a_proj = linear(shape.hidden_size, shape.q_lora_rank)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank, 1e-6)
        self.q_b_proj = linear(shape.q_lora_rank, heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim))
        self.kv_a_proj_with_mqa = linear(shape.hidden_size, shape.kv_lora_rank + shape.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, 1e-6)
        self.kv_b_proj = linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim))
        self.o_proj = linear(heads * shape.v_head_dim, shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``; cos and sin ``[T, P/2]``."""
        s = self.shape
        batch, length, _ = x.shape
        heads, nope, rope, width = s.num_attention_heads, s.qk_nope_head_dim, s.qk_rope_head_dim, s.v_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = q.view(batch, length, heads, nope + rope).transpose(1, 2).split([nope, rope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([s.kv_lora_rank, rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, heads, nope + width)
        k_nope, value = kv.transpose(1, 2).split([nope, width], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin).expand(batch, heads, length, rope)
        query = torch.cat([q_nope, rotate(q_rope, cos, sin).to(q_nope.dtype)], dim=-1)
        key = torch.cat([k_nope, k_rope.to(k_nope.dtype)], dim=-1)
        # The fused kernel wants equal widths: pad the values with zeros and cut the padding off again.
        padded = F.pad(value, (0, nope + rope - width))
        mixed = F.scaled_dot_product_attention(query, key, padded, is_causal=True)[..., :width]
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, heads * width))
        return output


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, width)
        self.up_proj = linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D] -> [..., D]``."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class MoE(nn.Module):
    """Routed experts chosen by grouped sigmoid top-k, plus a shared expert.

    ``bias`` steers which experts are chosen, never their weights; training moves it by the load (no auxiliary
    loss). ``load`` keeps the last forward's tokens per expert.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        experts, hidden, width = shape.n_routed_experts, shape.hidden_size, shape.moe_intermediate_size
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.shared_experts = MLP(hidden, width * shape.n_shared_experts)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[N, D]`` to expert ids and weights, both ``[N, K]``; always in float32."""
        s = self.shape
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(rows.float(), self.router).sigmoid()
        with torch.no_grad():
            choice = scores + self.bias
            grouped = choice.view(-1, s.n_group, s.n_routed_experts // s.n_group)
            group_score = grouped.topk(2, dim=-1).values.sum(-1)
            kept = group_score.topk(s.topk_group, dim=-1).indices
            mask = torch.ones_like(group_score, dtype=torch.bool).scatter_(1, kept, False)
            choice = grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(1)
            chosen = choice.topk(s.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * s.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``: rows sorted by expert, two GEMMs per expert, one scatter-add."""
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(rows)
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=self.shape.n_routed_experts)
        self.load.copy_(counts)
        source = order // self.shape.num_experts_per_tok
        # Under autocast, convert the rows once here instead of once per expert.
        narrow = rows.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else rows
        gathered = narrow.index_select(0, source)
        parts = []
        pieces = zip(torch.split(gathered, counts.tolist()), self.gate_up.unbind(0), self.down.unbind(0), strict=True)
        for piece, gate_up, down in pieces:
            gate, up = F.linear(piece, gate_up).chunk(2, dim=-1)
            parts.append(F.linear(F.silu(gate) * up, down))
        scaled = torch.cat(parts) * weights.flatten().index_select(0, order).unsqueeze(-1)
        routed = torch.zeros_like(rows, dtype=scaled.dtype).index_add(0, source, scaled)
        output: Tensor = routed + self.shared_experts(rows)
        return output.view_as(x)


class Layer(nn.Module):
    """One decoder layer; its feed-forward is dense or routed."""

    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp: nn.Module = MLP(shape.hidden_size, shape.intermediate_size) if dense else MoE(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B, T, D] -> [B, T, D]``."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class MTPLayer(nn.Module):
    """Multi-token prediction: from the state at i and the token at i+1, the state that predicts the token at i+2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.enorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = linear(2 * shape.hidden_size, shape.hidden_size)
        self.layer = Layer(shape, dense=False)
        self.shared_head_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Embedding of the next token and normed main state, both ``[B, T, D]``, to ``[B, T, D]``."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], dim=-1))
        output: Tensor = self.shared_head_norm(self.layer(joined, cos, sin))
        return output


class TinyDeepSeek(nn.Module):
    """The whole model: main layers, head, and the MTP layer that shares embedding and head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        dense = [index < shape.first_k_dense_replace for index in range(shape.num_hidden_layers)]
        self.layers = nn.ModuleList(Layer(shape, is_dense) for is_dense in dense)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)
        self.mtp = MTPLayer(shape)

    def initialise(self) -> None:
        """Normal weights scaled by fan-in; the last projection of each branch is smaller, for a calm start."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = 0.02 if "embed" in name or "router" in name else parameter.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "mlp.down")):
                std *= (2 * self.shape.num_hidden_layers) ** -0.5
            nn.init.normal_(parameter, std=std * (0.5 if "lm_head" in name else 1.0))

    def moe_layers(self) -> list[MoE]:
        """All routed layers, the MTP layer's last."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T]`` to the normed main states and the embeddings, both ``[B, T, D]``."""
        cos, sin = rotary_tables(self.shape, tokens.shape[1])
        embedded = self.embed_tokens(tokens)
        x = embedded
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x), embedded

    def mtp_hidden(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Main states ``[B, T, D]`` to MTP states ``[B, T-1, D]``; row i predicts token i+2."""
        cos, sin = rotary_tables(self.shape, state.shape[1] - 1)
        hidden: Tensor = self.mtp(embedded[:, 1:], state[:, :-1], cos, sin)
        return hidden

    def forward(self, tokens: Tensor) -> Tensor:
        """Main logits: ``[B, T] -> [B, T, V]``."""
        logits: Tensor = self.lm_head(self.hidden(tokens)[0])
        return logits


def export_name(name: str, shape: Shape) -> str:
    """The checkpoint name of a parameter that is stored as it is (not a stack of experts)."""
    name = re.sub(r"^mtp\.layer\.", f"layers.{shape.num_hidden_layers}.", name)
    name = re.sub(r"^mtp\.shared_head_norm\.", f"layers.{shape.num_hidden_layers}.shared_head.norm.", name)
    name = re.sub(r"^mtp\.", f"layers.{shape.num_hidden_layers}.", name)
    name = name.replace("mlp.router", "mlp.gate.weight").replace("mlp.bias", "mlp.gate.e_score_correction_bias")
    return name if name.startswith("lm_head") else f"model.{name}"


def to_checkpoint(model: TinyDeepSeek) -> dict[str, Tensor]:
    """All tensors by their DeepSeek-V3 names, bfloat16 except the router's bias (float32)."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        stored = value.detach().to(torch.float32 if name.endswith("mlp.bias") else torch.bfloat16)
        if not name.endswith((".gate_up", "mlp.down")):
            tensors[export_name(name, model.shape)] = stored.clone()
            continue
        prefix = export_name(name.rsplit(".", 1)[0], model.shape)
        for expert, matrix in enumerate(stored.unbind(0)):
            if name.endswith(".gate_up"):
                gate, up = matrix.chunk(2)
                tensors[f"{prefix}.experts.{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"{prefix}.experts.{expert}.up_proj.weight"] = up.clone()
            else:
                tensors[f"{prefix}.experts.{expert}.down_proj.weight"] = matrix.clone()
    return tensors


def from_checkpoint(tensors: dict[str, Tensor], shape: Shape) -> TinyDeepSeek:
    """Build the module in float32 from the tensors of a checkpoint."""
    model = TinyDeepSeek(shape)
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        if not name.endswith((".gate_up", "mlp.down")):
            state[name] = tensors[export_name(name, shape)].float()
            continue
        prefix = export_name(name.rsplit(".", 1)[0], shape)
        experts = [f"{prefix}.experts.{expert}" for expert in range(shape.n_routed_experts)]
        if name.endswith(".gate_up"):
            pairs = [[tensors[f"{e}.gate_proj.weight"], tensors[f"{e}.up_proj.weight"]] for e in experts]
            state[name] = torch.stack([torch.cat(pair) for pair in pairs]).float()
        else:
            state[name] = torch.stack([tensors[f"{e}.down_proj.weight"] for e in experts]).float()
    model.load_state_dict(state)
    return model.eval()
