"""Trains the MTP layer alone to say what the main model says, also from its own states: ``python -m
models.tiny.training.distill --corpus FILE --run-dir RUN --minutes 12``.

The main model is the teacher and stays as it is, so text does not change, only how many drafts are right. Drafts
behind the first one are made of the layer's own state, with the cache of the main model's states before them; training
does as many passes alike. Each pass learns from places where all drafts before it would have been right.

Shape letters: B windows per step, T tokens per window, D hidden size, H heads, W widths of a head, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from models.tiny import CHECKPOINT
from models.tiny.training.data import make_documents, pack_windows, read_stories
from models.tiny.training.export import read_model, write_model
from models.tiny.training.network import Attention, TinyDeepSeek, rotary_tables, rotate
from models.tiny.training.train import IGNORED, Progress, Settings, batches, make_optimizers, schedule, targets_of

PASSES = 3
SHARPNESS = 2.0  # the teacher's logits are multiplied by it: a draft is the one most likely token
ELSEWHERE = 0.1  # weight of places where a draft before it would have been wrong
HELD_OUT = 150  # stories

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, [B, H, T, W]


def heads_of(attention: Attention, x: Tensor, first: int) -> Heads:
    """Of ``[B, T, D]``, whose rows are the positions from ``first`` on."""
    s = attention.shape
    batch, length, _ = x.shape
    heads, nope, rope = s.num_attention_heads, s.qk_nope_head_dim, s.qk_rope_head_dim
    cos, sin = (table[first:] for table in rotary_tables(s, first + length))
    q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
    q_nope, q_rope = q.view(batch, length, heads, nope + rope).transpose(1, 2).split([nope, rope], dim=-1)
    latent, k_rope = attention.kv_a_proj_with_mqa(x).split([s.kv_lora_rank, rope], dim=-1)
    kv = attention.kv_b_proj(attention.kv_a_layernorm(latent)).view(batch, length, heads, nope + s.v_head_dim)
    k_nope, value = kv.transpose(1, 2).split([nope, s.v_head_dim], dim=-1)
    k_rope = rotate(k_rope.unsqueeze(1), cos, sin).expand(batch, heads, length, rope)
    return torch.cat([q_nope, rotate(q_rope, cos, sin)], -1), torch.cat([k_nope, k_rope], -1), value


def attend(attention: Attention, passes: list[Heads]) -> Tensor:
    """``[B, T, D]`` of the last pass: row i sees rows 0..i of the first one, and row i of the others."""
    query, first_keys, first_values = passes[-1][0], passes[0][1], passes[0][2]
    length, scale = query.shape[2], query.shape[-1] ** -0.5
    first_keys, first_values = first_keys[:, :, :length], first_values[:, :, :length]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    scores = (query @ first_keys.transpose(-1, -2)).masked_fill(~seen, float("-inf"))
    own = [(query * keys[:, :, :length]).sum(-1, keepdim=True) for _, keys, _ in passes[1:]]
    weights = (torch.cat([scores, *own], -1) * scale).softmax(-1)
    mixed = weights[..., :length] @ first_values
    for number, (_, _, values) in enumerate(passes[1:]):
        mixed = mixed + weights[..., length + number, None] * values[:, :, :length]
    out: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return out


def draft_states(model: TinyDeepSeek, windows: Tensor) -> tuple[list[Tensor], Tensor]:
    """Of each pass the states ``[B, T - 1 - pass, D]`` whose row i predicts the token i + 2 + pass, and the main
    model's logits ``[B, T, V]``."""
    with torch.no_grad():
        state, embedded = model.hidden(windows)
        logits = model.lm_head(state)
    mtp, layer, passes, found = model.mtp, model.mtp.layer, list[Heads](), list[Tensor]()
    for number in range(PASSES):
        state = state[:, :-1]
        x = mtp.eh_proj(torch.cat([mtp.enorm(embedded[:, 1 + number :]), mtp.hnorm(state)], -1))
        passes.append(heads_of(layer.self_attn, layer.input_layernorm(x), number))
        x = x + attend(layer.self_attn, passes)
        state = mtp.shared_head_norm(x + layer.mlp(layer.post_attention_layernorm(x)))
        found.append(state)
    return found, logits


def losses(model: TinyDeepSeek, windows: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """The loss, and of each pass its right drafts and all drafts, where those before them were right."""
    states, teacher = draft_states(model, windows)
    total, counts, length = torch.zeros(()), [], windows.shape[1] - 1 - PASSES
    reached = torch.ones(windows.shape[0], length, dtype=torch.bool)
    for number, state in enumerate(states):
        learned = targets_of(windows, 2 + number)[:, :length] != IGNORED
        wanted = teacher[:, 1 + number : 1 + number + length]
        said = model.lm_head(state[:, :length])
        each = F.cross_entropy(said.flatten(0, 1), (SHARPNESS * wanted).softmax(-1).flatten(0, 1), reduction="none")
        weights = torch.where(reached, 1.0, ELSEWHERE) * learned
        total = total + (each * weights.flatten()).sum() / weights.sum()
        right = said.argmax(-1) == wanted.argmax(-1)
        counts.append((int((right & reached & learned).sum()), int((reached & learned).sum())))
        reached = reached & right
    return total / PASSES, counts


@torch.no_grad()
def evaluate(model: TinyDeepSeek, windows: Tensor) -> list[float]:
    """Share of right drafts of each pass, of those whose predecessors were right."""
    totals = np.zeros((PASSES, 2))
    for part in torch.split(windows, 8):
        totals += np.array(losses(model, part)[1])
    return [round(right / tried, 4) for right, tried in totals]


def run(settings: Settings) -> None:
    """Train until the time is spent; the checkpoint is then in ``settings.run_dir / "checkpoint"``."""
    torch.set_num_threads(settings.threads)
    started, model = time.monotonic(), read_model(CHECKPOINT).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    stories = read_stories(settings.corpus)
    held, stories = stories[:HELD_OUT], stories[HELD_OUT:]
    packed = pack_windows(tokenizer, make_documents(held, 0, settings.seed), settings.window, 0)
    held_windows = torch.from_numpy(packed.astype(np.int64))
    print(json.dumps({"right": evaluate(model, held_windows)}), flush=True)
    for parameter in model.mtp.parameters():
        parameter.requires_grad_(True)
    optimizers = make_optimizers(model.mtp, settings)
    for number, windows in enumerate(batches(tokenizer, stories, settings, Progress())):
        share = (time.monotonic() - started) / (60 * settings.minutes)
        if share >= 1.0:
            break
        factor = schedule(share, number, settings.warmup_steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * factor
        loss, counts = losses(model, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.mtp.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if number % 20 == 0:
            right = [round(one / tried, 4) for one, tried in counts]
            print(json.dumps({"step": number, "loss": round(float(loss.detach()), 4), "right": right}), flush=True)
    write_model(settings.run_dir / "checkpoint", model.requires_grad_(False), tokenizer)
    print(json.dumps({"right": evaluate(read_model(settings.run_dir / "checkpoint"), held_windows)}), flush=True)


def parse_arguments() -> Settings:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description="Train the embedded model's MTP layer on its own text.")
    parser.add_argument("--corpus", type=Path, required=True, help="stories of the model, <|endoftext|> between them")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the checkpoint goes")
    parser.add_argument("--minutes", type=float, default=12.0, help="wall-clock budget; the schedule follows it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=20261124)
    given = vars(parser.parse_args())
    return Settings(
        **given, batch=8, window=256, matrix_rate=0.004, vector_rate=0.0006, warmup_steps=20, mtp_weight=1.0,
        bias_rate=0.0, precision="fp32", save_minutes=0.0, resume=False,
    )  # fmt: skip


if __name__ == "__main__":
    run(parse_arguments())
