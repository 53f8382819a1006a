"""Trains a small EAGLE-3 drafter for the embedded model, on what that says itself: there is no trained one in any package registry.

    python benchmarks/train_eagle3.py --out DIR [--minutes 8] [--stories 3000]
    moesaic serve --speculative-config '{"method": "eagle3", "model": "DIR"}'

The drafter sees the residual stream at the start of layers 1 and 2 and behind the last one, and has no embedding and head of its own.
As its authors do, training makes several passes: each goes on from the states of the one before, as drafting does. Prints a JSON
line now and then, and at the end how many drafts of each pass were right on stories that it was not trained on, where those before
them were.

Shape letters: B stories, T tokens of each, D hidden size, H heads, W width of a head, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_speculation import PROMPTS
from safetensors.torch import save_file
from torch import Tensor, nn

from models.tiny import CHECKPOINT
from models.tiny.training.distill import ELSEWHERE, PASSES, SHARPNESS, Heads, attend
from models.tiny.training.export import read_model
from models.tiny.training.muon import Muon
from models.tiny.training.network import TinyDeepSeek
from models.tiny.training.train import schedule
from moesaic import LLM, SamplingParams

LAYERS = (1, 2, 4)
HEADS, THETA, EPS, WIDTH = 6, 10000.0, 1e-6, 512
TOKENS, BATCH, HELD_OUT, MATRIX_RATE, VECTOR_RATE, WARM_UP = 160, 8, 64, 0.01, 0.001, 20


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, EPS)


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(2 * size, size, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(size, size, bias=False)

    def heads(self, x: Tensor, first: int) -> Heads:
        """Of [B, T, 2D], whose rows are the positions from `first` on: [B, H, T, W] each."""
        query, key, value = (
            part(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        half = query.shape[-1] // 2
        angles = torch.arange(first, first + x.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)

        def turned(part: Tensor) -> Tensor:
            one, other = part[..., :half], part[..., half:]
            return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1)

        return turned(query), turned(key), value


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (Norm(size) for _ in range(3))
        self.self_attn = Attention(size)
        self.mlp = nn.ModuleDict({name: nn.Linear(size, WIDTH, bias=False) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = nn.Linear(WIDTH, size, bias=False)


class Drafter(nn.Module):
    """Its parameters have the names of the authors' checkpoints."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(len(LAYERS) * size, size, bias=False)
        self.midlayer, self.norm = Layer(size), Norm(size)

    def forward(self, seen: Tensor, embedded: Tensor) -> list[Tensor]:
        """Of each pass the normed states [B, T - 1 - pass, D], whose row i predicts the token i + 2 + pass. seen: [B, T, layers * D]."""
        layer, mlp, passes, found = self.midlayer, self.midlayer.mlp, list[Heads](), list[Tensor]()
        hidden = self.fc(seen)
        for number in range(PASSES):
            hidden = hidden[:, :-1]
            both = torch.cat((layer.input_layernorm(embedded[:, 1 + number :]), layer.hidden_norm(hidden)), -1)
            passes.append(layer.self_attn.heads(both, number))
            x = hidden + attend(layer.self_attn, passes)  # type: ignore[arg-type]  # it has an o_proj
            y = layer.post_attention_layernorm(x)
            hidden = x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
            found.append(self.norm(hidden))
        return found


def stories(count: int) -> Tensor:
    """int64 [count, T]: sampled from the model."""
    with LLM(speculative_config={"method": "none"}, max_num_seqs=64) as llm:
        asked = [PROMPTS[number % len(PROMPTS)] for number in range(count)]
        params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=number) for number in range(count)]
        return torch.tensor([output.outputs[0].token_ids for output in llm.generate(asked, params)])


@torch.no_grad()
def teach(model: TinyDeepSeek, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the drafter sees [B, T, layers * D], the embeddings [B, T, D] and the logits [B, T, V]."""
    seen: dict[int, Tensor] = {}
    places = [*enumerate(model.layers), (len(model.layers), model.norm)]
    hooks = [
        module.register_forward_pre_hook(lambda _, given, at=at: seen.__setitem__(at, given[0]))
        for at, module in places
        if at in LAYERS
    ]
    state, embedded = model.hidden(tokens)
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[at] for at in LAYERS], -1), embedded, model.lm_head(state)


def losses(drafter: Drafter, model: TinyDeepSeek, tokens: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """The loss, and of each pass its right drafts and all of them, where those before were right."""
    seen, embedded, teacher = teach(model, tokens)
    total, counts, length = torch.zeros(()), [], tokens.shape[1] - 1 - PASSES
    reached = torch.ones(len(tokens), length, dtype=torch.bool)
    for number, state in enumerate(drafter(seen, embedded)):
        said, wanted = model.lm_head(state[:, :length]), teacher[:, 1 + number : 1 + number + length]
        each = F.cross_entropy(said.flatten(0, 1), (SHARPNESS * wanted).softmax(-1).flatten(0, 1), reduction="none")
        weights = torch.where(reached, 1.0, ELSEWHERE)
        total = total + (each * weights.flatten()).sum() / weights.sum()
        right = said.argmax(-1) == wanted.argmax(-1)
        counts.append((int((right & reached).sum()), int(reached.sum())))
        reached = reached & right
    return total / PASSES, counts


def write(drafter: Drafter, model: TinyDeepSeek, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": shape.hidden_size,
        "intermediate_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, out / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--stories", type=int, default=3000)
    options = parser.parse_args()
    tokens = stories(HELD_OUT + options.stories)
    held, tokens = tokens[:HELD_OUT], tokens[HELD_OUT:]
    torch.manual_seed(1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the engine has made it fewer
    model = read_model(CHECKPOINT).requires_grad_(False)
    drafter, began = Drafter(model.shape.hidden_size), time.monotonic()
    matrices, vectors = ([one for one in drafter.parameters() if (one.dim() > 1) == wide] for wide in (True, False))
    optimizers = [Muon(matrices, rate=MATRIX_RATE), torch.optim.AdamW(vectors, VECTOR_RATE, weight_decay=0.0)]
    step, share = 0, 0.0
    while share < 1:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * schedule(share, step, WARM_UP)
        loss, counts = losses(drafter, model, tokens[torch.randint(len(tokens), (BATCH,))])
        drafter.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 100 == 0:
            right = [round(one / max(tried, 1), 3) for one, tried in counts]
            print(json.dumps({"step": step, "loss": round(float(loss.detach()), 3), "right": right}), flush=True)
        step, share = step + 1, (time.monotonic() - began) / (60 * options.minutes)
    write(drafter, model, options.out)
    with torch.no_grad():
        right = [round(one / max(tried, 1), 3) for one, tried in losses(drafter, model, held)[1]]
    print(json.dumps({"steps": step, "right": right}))


if __name__ == "__main__":
    main()
