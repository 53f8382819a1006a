"""What structured output costs: time per output token with a grammar and without, and what a new schema adds to the first token.

    python benchmarks/bench_structured.py [--json] [--model DIR] [--train-tokenizer] [--plain] [--streams 1 16 64]
        [--tokens 64] [--repeats 5] [--backend guidance|xgrammar]

Two cases: "records", a schema that the model would not have followed by itself, and "text", an object with one long text, as a model
that was asked for JSON writes it: nearly all of it is the model's own words. All runs of a case write the same tokens, those that the
grammar's run draws: what a step draws is replaced by them, in each run alike. They come in
turns in one process; times are the least of the repeats, percents the middle of what each turn says. forced: where tokens that the
grammar makes certain are drafts; else nothing drafts. processors: without a grammar, where the engine has a logits processor that no
request asks for; --plain leaves both out, and their engines. ttft_added_ms: a prompt's first token with a schema that no request had
before, less one without. library: the parts, of rows whose tokens are drawn from their masks, us of a row (of as many sequences as the
most streams; the caches are swept before each, as a step does it): mask_us, take_us; both_us: a mask right behind its token, as a step has
it, and what that makes of the steps above, for each number of streams (percent); accept_us: the same with our own part; draw_us and
free_draw_us: a draw with a mask and without; check_us: what asking first whether a token may come would take in the place of the mask,
and forced_percent: rows where that is not the same. --train-tokenizer: for a model whose own cannot spell JSON (make_models.py), byte-level BPE of as many tokens
as the model has, of the text of Python's library. --backend: which library follows the grammars; xgrammar must be installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import llguidance
import numpy as np
import tokenizers
import torch
from msgspec.structs import replace
from torch import Tensor

import engine.runner
from engine.sampling.noise import seed_keys
from engine.sampling.processors import RequestLogitsProcessor
from engine.sampling.sampler import Sampled, sample
from engine.sampling.sampling_table import GRAMMAR, RANDOM, SamplingBatch
from engine.structured.guide import Guide, Masks, Matcher
from engine.structured.xgrammar_matcher import XgrammarMatcher
from front.messages import LogprobsMode
from front.outputs import RequestOutput
from front.params import Grammar
from front.structured.grammar import checked_grammar
from front.structured.vocabulary import grammar_limits, grammar_tokenizer
from front.structured.xgrammar_backend import Compiler
from moesaic import LLM, SamplingParams, StructuredOutputsParams

V = TypeVar("V")
PROMPT = "Once upon a time there was a small fox"


def schema(number: int, backend: str = "auto") -> StructuredOutputsParams:
    """A different one for each number."""
    person = {
        "type": "object",
        "properties": {
            f"name{number}": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": [f"name{number}", "age", "tags"],
    }
    return StructuredOutputsParams(json={"type": "array", "items": person, "minItems": 50}, backend=backend)


def text_schema(backend: str) -> StructuredOutputsParams:
    text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    closed = {**text, "additionalProperties": False}
    return StructuredOutputsParams(json=closed, disable_any_whitespace=True, backend=backend)


class Script:
    """What each place of a stream has; in the place of what is drawn."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], int] = {}

    def __call__(self, logits_PV: Tensor, batch: SamplingBatch, mode: LogprobsMode) -> Sampled:
        drawn = sample(logits_PV, batch, mode)
        if not self.tokens:
            return drawn
        places = zip(batch.seed_keys_P.tolist(), batch.positions_P.tolist(), strict=True)
        return Sampled(torch.tensor([self.tokens[place] for place in places]), None)


class Unused:
    """A logits processor that no request has."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        pass

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        return None


def run(llm: LLM, streams: int, count: int, asked: StructuredOutputsParams | None) -> list[RequestOutput]:
    """count: tokens of each stream."""
    params = [
        SamplingParams(max_tokens=count, ignore_eos=True, temperature=1.0, seed=seed, structured_outputs=asked)
        for seed in range(streams)
    ]
    results = llm.generate([f"{PROMPT} {number}" for number in range(streams)], params)
    assert all(len(result.outputs[0].token_ids) == count for result in results)
    return results


def written(results: list[RequestOutput]) -> dict[tuple[int, int], int]:
    """By the seed's key and the position."""
    return {
        (int(seed_keys([seed])[0]), len(result.prompt_token_ids) + place): token
        for seed, result in enumerate(results)
        for place, token in enumerate(result.outputs[0].token_ids)
    }


def seconds(llm: LLM, streams: int, tokens: int, asked: StructuredOutputsParams | None) -> float:
    """For one token behind the first."""

    def timed(count: int) -> float:
        began = time.perf_counter()
        run(llm, streams, count, asked)
        return time.perf_counter() - began

    whole = timed(tokens)
    return whole if tokens == 1 else (whole - timed(1)) / (tokens - 1)


def cost(
    engines: dict[str, LLM], case: str, asked: StructuredOutputsParams, streams: int, tokens: int, repeats: int
) -> dict[str, Any]:
    script = Script()
    vars(engine.runner)["sample"] = script
    runs: dict[str, tuple[LLM, StructuredOutputsParams | None]] = {
        "structured": (engines["plain"], asked),
        "tpot": (engines["plain"], None),
    }
    if len(engines) > 1 and case == "records":
        runs |= {"forced": (engines["forced"], asked), "processors": (engines["processors"], None)}
    script.tokens = written(run(engines["plain"], streams, tokens, asked))
    for name in runs:  # the first time is for what is made once
        seconds(runs[name][0], streams, tokens, runs[name][1])
    turns = [{name: seconds(llm, streams, tokens, own) for name, (llm, own) in runs.items()} for _ in range(repeats)]
    vars(engine.runner)["sample"] = sample
    row: dict[str, Any] = {"case": case, "streams": streams}
    for name in runs:
        row[f"{name}_ms"] = round(min(turn[name] for turn in turns) * 1e3, 4)
        if name != "tpot":
            row[f"{name}_percent"] = round(
                100 * (statistics.median(turn[name] / turn["tpot"] for turn in turns) - 1), 2
            )
    return row


def first_token(llm: LLM, repeats: int, backend: str) -> dict[str, object]:
    added = []
    for number in range(1, 2 * repeats + 1):
        free = min(seconds(llm, 1, 1, None) for _ in range(2))
        added.append((seconds(llm, 1, 1, schema(number, backend)) - free) * 1e3)
    return {"ttft_added_ms": round(statistics.median(added), 3), "worst_ms": round(max(added), 3)}


def matchers_of(grammar: Grammar, llm: LLM) -> Callable[[], Matcher]:
    """What makes one at the beginning."""
    if grammar.xgrammar:
        compiler = Compiler(llm.tokenizer, llm.vocab_size)
        compiled = compiler.compile(grammar.text)
        return lambda: XgrammarMatcher(compiler.matcher(compiled), llm.vocab_size)
    vocabulary = grammar_tokenizer(llm.tokenizer, llm.vocab_size)
    root = llguidance.LLMatcher(vocabulary, grammar.text, log_level=0, limits=grammar_limits())
    root.compute_bitmask()
    return root.deep_copy


class Rows:
    """As many sequences as the most streams, whose tokens are drawn from their masks."""

    def __init__(self, llm: LLM, matcher: Callable[[], Matcher], count: int) -> None:
        self._ends = [token for token in llm.tokenizer.eos_token_ids if token < llm.vocab_size]
        self._matcher, self._vocab_size, self.count = matcher, llm.vocab_size, count
        self.masks = Masks(count, llm.vocab_size, self._ends)
        self.matchers = [matcher() for _ in range(count)]
        for row in range(count):
            self._put(row)
        self.masks_RW = self.masks.fill(range(count))[1]
        self.size = 4 * self.masks_RW.shape[1]
        self.pointers = [self.masks_RW.ctypes.data + self.size * row for row in range(count)]
        self._draw, self._swept = np.random.default_rng(0), np.zeros(8 << 20, np.int64)
        self.spent: dict[str, list[float]] = {}

    def _put(self, row: int) -> None:
        self.masks.put(row, Guide(self.matchers[row], self._ends))

    def _allowed(self) -> np.ndarray:
        bits = np.unpackbits(self.masks_RW.view(np.uint8), axis=1, bitorder="little")[:, : self._vocab_size]
        bits[:, self._ends] = 0
        return bits

    def drawn(self) -> list[list[int]]:
        """A token of each mask, none that ends a text: sequences that may only end begin anew."""
        over = np.array([matcher.is_stopped() for matcher in self.matchers]) | ~self._allowed().any(axis=1)
        for row in np.flatnonzero(over).tolist():
            self.matchers[row] = self._matcher()
            self._put(row)
            self.matchers[row].unsafe_compute_mask_ptr(self.pointers[row], self.size)
        return [[int(self._draw.choice(np.flatnonzero(bits)))] for bits in self._allowed()]

    def timed(self, name: str, call: Callable[..., V], *given: object) -> V:
        self._swept[:] += 1
        began = time.perf_counter()
        answer = call(*given)
        self.spent.setdefault(name, []).append((time.perf_counter() - began) / self.count * 1e6)
        return answer

    def mask(self) -> None:
        for matcher, pointer in zip(self.matchers, self.pointers, strict=True):
            matcher.unsafe_compute_mask_ptr(pointer, self.size)

    def take(self, tokens: list[list[int]]) -> None:
        for matcher, own in zip(self.matchers, tokens, strict=True):
            matcher.consume_tokens(own)

    def both(self, tokens: list[list[int]]) -> None:
        for matcher, own, pointer in zip(self.matchers, tokens, self.pointers, strict=True):
            matcher.consume_tokens(own)
            matcher.unsafe_compute_mask_ptr(pointer, self.size)

    def ask(self, tokens: list[list[int]]) -> None:
        for matcher, own in zip(self.matchers, tokens, strict=True):
            matcher.validate_tokens(own)

    def forced(self) -> int:
        """How many have a next token that is certain."""
        return sum([bool(matcher.compute_ff_tokens()) for matcher in self.matchers])


def library(llm: LLM, rows: list[dict[str, Any]], case: str, asked: StructuredOutputsParams) -> dict[str, object]:
    """rows: what `cost` said of this case."""
    parts = Rows(llm, matchers_of(checked_grammar(asked, llm.tokenizer), llm), max(row["streams"] for row in rows))
    num_forced = []
    for step in range(60):
        tokens = parts.drawn()
        if step % 3 == 0:
            parts.timed("accept", parts.masks.accept, range(parts.count), tokens)
        elif step % 3 == 1:
            parts.timed("both", parts.both, tokens)
        else:
            parts.timed("allowed", parts.ask, tokens)
            parts.timed("take", parts.take, tokens)
            if step % 2:  # the answer is kept, and the mask asks for it too
                num_forced.append(parts.timed("forced", parts.forced))
            parts.timed("mask behind forced" if step % 2 else "mask", parts.mask)
    drawing(parts, llm.vocab_size)
    us = {name: statistics.mean(times) for name, times in parts.spent.items()}
    return {
        "case": case,
        "library": parts.count,
        "mask_us": round(us["mask"], 2),
        "take_us": round(us["take"], 2),
        "both_us": round(us["both"], 2),
        "accept_us": round(us["accept"], 2),
        "check_us": round(us["forced"] + us["allowed"], 2),
        "forced_percent": round(100 * statistics.mean(num_forced) / parts.count, 1),
        "percent": {row["streams"]: round(row["streams"] * us["both"] / row["tpot_ms"] / 10, 1) for row in rows},
        "draw_us": round(us["draw"], 2),
        "free_draw_us": round(us["free draw"], 2),
    }


def drawing(rows: Rows, vocab_size: int) -> None:
    """A draw of each row, with its mask and without."""
    logits_PV = torch.randn(rows.count, vocab_size)
    zeros_P, ones_P = np.zeros(rows.count, np.int64), np.ones(rows.count, np.float32)
    free = SamplingBatch(
        rows.count, vocab_size, RANDOM, zeros_P + RANDOM, np.arange(rows.count), seed_keys(range(rows.count)),
        ones_P, zeros_P, ones_P, 0 * ones_P,
    )  # fmt: skip
    masks = np.arange(rows.count), rows.masks_RW
    masked = replace(free, needs=RANDOM | GRAMMAR, needs_P=zeros_P + (RANDOM | GRAMMAR), masks=masks)
    for _ in range(20):
        rows.timed("draw", sample, logits_PV, masked)
        rows.timed("free draw", sample, logits_PV, free)


def train_tokenizer(model: Path, directory: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config["vocab_size"], special_tokens=["<end>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer.train_from_iterator((file.read_text(errors="replace") for file in files), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default=None)
    parser.add_argument("--train-tokenizer", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", default="guidance", choices=["guidance", "xgrammar"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.train_tokenizer:
            train_tokenizer(Path(options.model), Path(directory))
        measure(options, {"tokenizer": directory} if options.train_tokenizer else {})


def measure(options: argparse.Namespace, more: dict[str, Any]) -> None:
    model, backend = [options.model] if options.model else [], options.backend
    more |= {"enable_prefix_caching": True, "max_num_seqs": max(options.streams), "max_model_len": 1024}
    drafts = {"plain": "none"} if options.plain else {"plain": "none", "forced": "prediction", "processors": "none"}
    engines = {
        name: LLM(
            *model, speculative_config={"method": method}, **more,
            logits_processors=["bench_structured:Unused"] if name == "processors" else [],
        )
        for name, method in drafts.items()
    }  # fmt: skip
    for case, asked in (("records", schema(0, backend)), ("text", text_schema(backend))):
        rows = []
        for streams in options.streams:
            rows.append(cost(engines, case, asked, streams, options.tokens, options.repeats))
            show(rows[-1], options.json)
        show(library(engines["plain"], rows, case, asked), options.json)
    show(first_token(engines["plain"], options.repeats, backend), options.json)
    for llm in engines.values():
        llm.close()


def show(row: dict[str, object], as_json: bool) -> None:
    print(json.dumps(row) if as_json else row, flush=True)


if __name__ == "__main__":
    main()
