"""Draws under rounding noise: the race of engine/sampling/sampler.py beside a number that is looked up in the cumulative distribution.

    python benchmarks/bench_draws.py [--json] [--model DIR] [--draws 20000] [--vocab 151936] [--batch 32]

flips: of so many draws from the logits of a model (the embedded one) how many change when noise is added to the logits: 5e-6, as
float32 rounds, and 1e-2, as bfloat16 does. Both take the same logits, the same noise and the same seeds. cost: of one step
that draws a token for each of `--batch` rows out of `--vocab` (no limits, and top_p 0.9): the native kernel's time, and in torch
that of either draw alone, its share beside a softmax of the same rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
import torch
from torch import Tensor

from cache.memory import CacheMemory
from cache.spec import CacheSizes
from dbo.steps import drain
from engine.sampling.noise import UInt64s, seed_keys, words
from engine.sampling.sampler import _draw
from ep.backends.local import LocalAllToAll
from ep.parallel import Parallel
from eplb.placement import linear_placement
from layers.step import StepInput
from layers.weights import Checkpoint
from models.registry import build, read_config
from models.tiny import CHECKPOINT
from native import sampling

NOISES = (5e-6, 1e-2)
CPU = torch.device("cpu")
STORY = """Once upon a time there was a little fox who lived near a big river. Every day she went to the water to look for fish.
One day she saw a bird that could not fly. The bird was sad. "What is wrong?" asked the fox. "My wing hurts," said the bird.
The fox wanted to help. She ran home to her mom and told her about the bird. Her mom gave her a soft leaf. They put the leaf on the
wing and the bird was happy. After that, the fox and the bird played by the river every day, and they were best friends."""
_ROWS = 500  # at a time


def look_up(probs_RV: Tensor, words_R: UInt64s) -> Tensor:
    """What draws were before: one number in the cumulative distribution, in vocabulary order."""
    sums_RV = probs_RV.cumsum(-1, dtype=torch.float64)
    number_R = torch.from_numpy((words_R >> np.uint64(11)).astype(np.float64) * 2.0**-53)
    return torch.searchsorted(sums_RV, (number_R * sums_RV[:, -1])[:, None], right=True)[:, 0]


FORMS: dict[str, Callable[[Tensor, UInt64s], Tensor]] = {"look_up": look_up, "race": _draw}


def model_logits(path: Path) -> Tensor:
    """float32 [T, V], of a short story."""
    facts = read_config(path)
    placement = linear_placement(facts.num_moe_layers, facts.num_experts, 1) if facts.num_experts else None
    parallel = Parallel(0, 1, placement, lambda num_slots, _hidden_size: [LocalAllToAll(num_slots)])
    model = build(facts, parallel, torch.float32, CPU)
    model.load(Checkpoint(path))
    tokens = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).encode(STORY).ids
    num_tokens = len(tokens)
    kv = CacheMemory.allocate(model.cache_spec(), CacheSizes(16, num_tokens // 16 + 2), CPU)
    places_T = torch.arange(num_tokens)
    step = StepInput(
        token_ids_T=torch.tensor(tokens),
        positions_T=places_T,
        slots_T=places_T + 16,
        query_starts=(0, num_tokens),
        kv_lens=(num_tokens,),
        kv_lens_B=torch.tensor([num_tokens]),
        block_table_BN=torch.arange(1, num_tokens // 16 + 2)[None],
        num_decodes=0,
        block_size=16,
        logits_rows_P=places_T,
    )
    return model.logits(drain(model.steps(step, kv))).float()


def flips(logits_TV: Tensor, noise: float, draws: int) -> dict[str, float]:
    """Share of draws that change, by form."""
    changed = dict.fromkeys(FORMS, 0)
    generator = torch.Generator().manual_seed(1)
    for first in range(0, draws, _ROWS):
        rows = torch.arange(first, min(first + _ROWS, draws))
        some_RV = logits_TV[rows % logits_TV.shape[0]]
        noisy_RV = some_RV + noise * torch.randn(some_RV.shape, generator=generator)
        words_R = words(seed_keys(rows.tolist()), rows.numpy())
        for name, form in FORMS.items():
            one, other = (form(x.softmax(-1), words_R) for x in (some_RV, noisy_RV))
            changed[name] += int((one != other).sum())
    return {name: count / draws for name, count in changed.items()}


def cost(batch: int, vocab: int, repeats: int) -> dict[str, float]:
    """Microseconds of a step, the median; the forms take turns."""
    logits_PV = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(2)) * 2
    keys, places = seed_keys(range(batch)), np.arange(batch)
    ones, none = np.ones(batch, np.float32), np.zeros(batch, np.int64)
    acts: dict[str, Callable[[], object]] = {"softmax_us": lambda: logits_PV.softmax(-1)}
    probs_PV = logits_PV.softmax(-1)
    if sampling.can_run(logits_PV):
        for name, top_p in (("native_us", 1.0), ("native_top_p_us", 0.9)):
            limits = ones * np.float32(top_p), ones * np.float32(0)
            draw = sampling.Draws(none + 1, ones, *limits, none, keys, places)
            acts[name] = lambda draw=draw: sampling.draw_tokens(logits_PV, draw, sampling.Edits())  # type: ignore[misc]
    for name, form in FORMS.items():
        acts[f"torch_{name}_us"] = lambda form=form: form(probs_PV, words(keys, places))  # type: ignore[misc]
    took: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(repeats + 1):
        for name, act in acts.items():
            began = time.perf_counter()
            act()
            took[name].append((time.perf_counter() - began) * 1e6)
    return {name: round(statistics.median(values[1:]), 1) for name, values in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--vocab", type=int, default=151_936, help="of the cost")
    parser.add_argument("--batch", type=int, default=32, help="rows of the cost")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args()
    with torch.inference_mode():
        logits_TV = model_logits(options.model)
        share = {str(noise): flips(logits_TV, noise, options.draws) for noise in NOISES}
        found = {"draws": options.draws, "vocab": logits_TV.shape[1], "flips": share}
        found["cost"] = cost(options.batch, options.vocab, options.repeats)
    if not options.json:
        for noise, of_form in share.items():
            print(f"noise {noise}: " + ", ".join(f"{name} {value:.3%}" for name, value in of_form.items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
