"""Trains the embedded model on a story corpus: ``python -m models.tiny.training.train --corpus stories.txt.xz --minutes
80``.

The learning rate follows the share of the time budget that is spent, so a run ends fully decayed and on time
however busy the machine is. A run writes ``log.jsonl``, ``state.pt`` (to resume) and ``checkpoint/`` (a Hugging
Face directory) into its run directory.

Shape letters: B windows per step, T tokens per window, N rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Struct, structs
from tokenizers import Tokenizer
from torch import Tensor

from models.tiny.training.data import (
    BOS_ID,
    END_ID,
    USER_ID,
    make_documents,
    pack_windows,
    read_stories,
    train_tokenizer,
)
from models.tiny.training.export import write_model
from models.tiny.training.muon import Muon
from models.tiny.training.network import Shape, TinyDeepSeek

IGNORED = -100
HELD_OUT_STORIES = 800


class Settings(Struct, frozen=True):
    """What a run is made of, apart from the model's shape."""

    corpus: Path
    run_dir: Path
    minutes: float
    batch: int
    window: int
    matrix_rate: float
    vector_rate: float
    warmup_steps: int
    mtp_weight: float
    bias_rate: float
    precision: str
    threads: int
    seed: int
    save_minutes: float
    resume: bool


class Progress(Struct):
    """Where a run stands; saved with the weights."""

    step: int = 0
    tokens: int = 0
    epoch: int = 0
    position: int = 0
    seconds: float = 0.0


def precision_context(precision: str) -> AbstractContextManager[object]:
    """bfloat16 autocast, or nothing for float32."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


def targets_of(windows: Tensor, ahead: int) -> Tensor:
    """The token ``ahead`` places on, ``[B, T-ahead]``; padding and starts of documents and turns are not learned.

    An end token after an end token is padding.
    """
    targets, before = windows[:, ahead:], windows[:, ahead - 1 : -1]
    unlearned = (targets == BOS_ID) | (targets == USER_ID) & (before == END_ID)
    unlearned |= (targets == END_ID) & (before == END_ID)
    return targets.masked_fill(unlearned, IGNORED)


def cross_entropy(model: TinyDeepSeek, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of states ``[B, T', D]`` against ``[B, T']``, in chunks of rows so that logits stay small."""
    rows, flat = hidden.flatten(0, 1), targets.flatten()
    keep = (flat != IGNORED).nonzero().squeeze(1)
    rows, flat = rows.index_select(0, keep), flat.index_select(0, keep)
    total = torch.zeros(())
    for part, wanted in zip(torch.split(rows, 2048), torch.split(flat, 2048), strict=True):
        total = total + F.cross_entropy(model.lm_head(part).float(), wanted, reduction="sum")
    return total / max(1, flat.numel())


def losses(model: TinyDeepSeek, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Main and MTP loss of ``[B, T]``."""
    state, embedded = model.hidden(windows)
    main = cross_entropy(model, state[:, :-1], targets_of(windows, 1))
    ahead = model.mtp_hidden(state, embedded)
    return main, cross_entropy(model, ahead[:, :-1], targets_of(windows, 2))


def update_biases(model: TinyDeepSeek, rate: float) -> float:
    """Move each expert's bias against its load (auxiliary-loss-free balancing); returns the mean of max/mean load."""
    ratios = []
    for layer in model.moe_layers():
        mean = layer.load.mean()
        layer.bias += rate * torch.sign(mean - layer.load)
        ratios.append(float(layer.load.max() / mean))
    return sum(ratios) / len(ratios)


def schedule(share: float, step: int, warmup_steps: int) -> float:
    """Factor on the learning rates: warmup by steps, flat for 30 % of the time, then linear to zero."""
    return min(1.0, (step + 1) / warmup_steps) * min(1.0, max(0.0, (1.0 - share) / 0.7))


@torch.no_grad()
def evaluate(model: TinyDeepSeek, windows: Tensor, settings: Settings) -> tuple[float, float]:
    """Main and MTP loss on held-out windows ``[N, T]``."""
    model.eval()
    totals = np.zeros(2)
    parts = torch.split(windows, settings.batch)
    for part in parts:
        with precision_context(settings.precision):
            main, mtp = losses(model, part)
        totals += np.array([float(main), float(mtp)]) * len(part)
    model.train()
    main_mean, mtp_mean = totals / len(windows)
    return float(main_mean), float(mtp_mean)


def batches(tokenizer: Tokenizer, stories: list[str], settings: Settings, progress: Progress) -> Iterator[Tensor]:
    """Endless windows ``[B, T]``, epoch after epoch, from where ``progress`` stands (and moving it on)."""
    while True:
        documents = make_documents(stories, progress.epoch, settings.seed)
        packed = pack_windows(tokenizer, documents, settings.window, settings.seed + progress.epoch)
        while progress.position + settings.batch <= len(packed):
            chunk = packed[progress.position : progress.position + settings.batch]
            progress.position += settings.batch
            yield torch.from_numpy(chunk.astype(np.int64))
        progress.epoch, progress.position = progress.epoch + 1, 0


def make_optimizers(model: torch.nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, head, router and norms."""
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_vector = parameter.dim() < 2 or "embed" in name or "lm_head" in name or name.endswith("router")
        (vectors if is_vector else matrices).append(parameter)
    adam = torch.optim.AdamW(vectors, lr=settings.vector_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [Muon(matrices, rate=settings.matrix_rate), adam]


def save_state(path: Path, model: TinyDeepSeek, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
    """Save all that a resumed run needs, atomically."""
    partial = path.with_name(path.name + ".partial")
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": structs.asdict(progress),
    }
    torch.save(state, partial)
    os.replace(partial, path)


def train_step(
    model: TinyDeepSeek, optimizers: list[torch.optim.Optimizer], windows: Tensor, factor: float, settings: Settings
) -> dict[str, float]:
    """One update on ``[B, T]``; ``factor`` scales all rates."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("peak", group["lr"])
            group["lr"] = group["peak"] * factor
    with precision_context(settings.precision):
        main, mtp = losses(model, windows)
    (main + settings.mtp_weight * mtp).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    load = update_biases(model, settings.bias_rate * factor)
    return {"loss": float(main.detach()), "mtp_loss": float(mtp.detach()), "load_max_over_mean": load}


def run(settings: Settings, shape: Shape) -> None:
    """Train until the time is spent."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    started = time.monotonic()
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    stories = read_stories(settings.corpus)
    held_out, stories = stories[:HELD_OUT_STORIES], stories[HELD_OUT_STORIES:]
    tokenizer = train_tokenizer(stories, shape.vocab_size)
    held_documents = make_documents(held_out, 0, settings.seed)
    held_windows = torch.from_numpy(pack_windows(tokenizer, held_documents, settings.window, 0).astype(np.int64))
    model, progress = TinyDeepSeek(shape), Progress()
    model.initialise()
    optimizers = make_optimizers(model, settings)
    state_path = settings.run_dir / "state.pt"
    if settings.resume and state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progress = Progress(**state["progress"])
    started -= progress.seconds

    def save() -> None:
        save_state(state_path, model, optimizers, progress)
        write_model(settings.run_dir / "checkpoint", model, tokenizer)

    source = batches(tokenizer, stories, settings, progress)
    train(model, optimizers, progress, source, held_windows, settings, started, save)
    progress.seconds = time.monotonic() - started
    main, mtp = evaluate(model, held_windows, settings)
    write_log(settings, {"final": True, **structs.asdict(progress), "val_loss": main, "val_mtp_loss": mtp})
    save()


def write_log(settings: Settings, record: dict[str, object]) -> None:
    """Append one line to the log and show it."""
    line = json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()})
    print(line, flush=True)
    with (settings.run_dir / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(line + "\n")


def train(
    model: TinyDeepSeek,
    optimizers: list[torch.optim.Optimizer],
    progress: Progress,
    source: Iterator[Tensor],
    held_windows: Tensor,
    settings: Settings,
    started: float,
    save: Callable[[], None],
) -> None:
    """The loop: steps, a log line every 20, an evaluation and a saved state every few minutes."""
    last_saved = last_logged = time.monotonic()
    tokens_logged = progress.tokens
    while (share := (time.monotonic() - started) / (60 * settings.minutes)) < 1.0:
        windows = next(source)
        factor = schedule(share, progress.step, settings.warmup_steps)
        record: dict[str, object] = dict(train_step(model, optimizers, windows, factor, settings))
        progress.step += 1
        progress.tokens += int((targets_of(windows, 1) != IGNORED).sum())
        progress.seconds = time.monotonic() - started
        if progress.step % 20 == 0:
            now = time.monotonic()
            rate = (progress.tokens - tokens_logged) / (now - last_logged)
            last_logged, tokens_logged = now, progress.tokens
            if now - last_saved > 60 * settings.save_minutes:
                last_saved = now
                record["val_loss"], record["val_mtp_loss"] = evaluate(model, held_windows[:32], settings)
                save()
            write_log(settings, {**structs.asdict(progress), **record, "lr_factor": factor, "tokens_per_second": rate})


def parse_arguments() -> Settings:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description="Train the embedded story model.")
    parser.add_argument("--corpus", type=Path, required=True, help="stories separated by <|endoftext|>, .txt or .xz")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the log, state and checkpoint go")
    parser.add_argument("--minutes", type=float, default=80.0, help="wall-clock budget; the schedule follows it")
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--window", type=int, default=512, help="tokens per window")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="peak learning rate of Muon")
    parser.add_argument("--vector-rate", type=float, default=0.003, help="peak learning rate of AdamW")
    parser.add_argument("--warmup-steps", type=int, default=40)
    parser.add_argument("--mtp-weight", type=float, default=0.3, help="weight of the MTP loss")
    parser.add_argument("--bias-rate", type=float, default=0.002, help="step of the routing bias")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--save-minutes", type=float, default=4.0, help="minutes between evaluations and saved states")
    parser.add_argument("--resume", action="store_true", help="go on from the run directory's state.pt")
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    run(parse_arguments(), Shape())
