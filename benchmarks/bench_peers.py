"""Whole engine beside vLLM (CPU) and llama.cpp: same models, same prompts, one run, repetitions taken in turn.

    python benchmarks/bench_peers.py --models DIR [--vllm-python PATH] [--llama-python PATH] [--only MODEL ...] [--json]
    python benchmarks/bench_peers.py --models DIR --llama-python PATH --gguf q4_k_m      both on the same file
    python benchmarks/bench_peers.py --models DIR --own-ranks 2      two ranks of one thread beside one rank of two threads
    python benchmarks/bench_peers.py --models DIR --quantization int4 --own-quantization int8      4 bits beside 8
    python benchmarks/bench_peers.py --models DIR --before CHECKOUT      this tree beside an earlier one
    python benchmarks/bench_peers.py --models DIR --llama-python PATH --cases first --repeats 1 --starts 11      start-up

DIR: made by benchmarks/make_models.py; for llama.cpp it also holds MODEL.gguf (bfloat16) and MODEL-KIND.gguf, made by
benchmarks/make_gguf.py. PATH: the Python of a virtual environment that has the peer (docs/benchmarks.md says how to make one).
One line per case: `ours`, `peer`, `ratio` (above 1 we are better) and the memory bandwidth seen around the repetitions.

Each begins when the threads of the one before have stopped spinning. A repetition during which others kept more than --max-foreign cores busy is taken again; when the machine does not get
quiet the run ends with exit code 1 and no figures for that case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engines import Engine
from quiet import Bandwidth, Watch, await_quiet, await_rest
from vllm_server import vllm_environment

REST_SECONDS = 10.0  # at most, between two engines in turn
HERE = Path(__file__).resolve().parent
Case = dict[str, int]

CASES: dict[str, Case] = {
    "first": {"prompts": 1, "input": 128, "output": 1},
    "stream": {"prompts": 1, "input": 128, "output": 128},
    "a1": {"prompts": 32, "input": 128, "output": 64},
    "a2": {"prompts": 128, "input": 32, "output": 32},
    "prefill": {"prompts": 1, "input": 1024, "output": 1},
    "overhead": {"prompts": 256, "input": 16, "output": 32},
}
WHOLE = ("first", "stream", "a1", "a2", "prefill")
USUAL = ("qwen3moe-small", "deepseek-small", "qwen3-0.6b-like")
MODELS = dict.fromkeys((*USUAL, "qwen2-1.5b-like"), WHOLE) | {
    "tiny-qwen3moe": ("overhead",),
    "qwen3next-small": ("first", "stream", "a1", "prefill"),
}
FEW = (
    "qwen3next-small",
)  # models whose sequences have states: there is no memory for as many as engines.py begins with
LLAMA_KINDS = {"fp8": "q8_0", "int8": "q8_0", "int4": "q4_0", "mxfp4": "q4_0"}


@dataclass
class Runs:
    """Of one engine: start-up, memory, seconds of every clean repetition by case, and the bandwidth around each."""

    startup_s: float = 0.0  # from nothing to the first token
    peak_mb: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    gigabytes: dict[str, list[float]] = field(default_factory=dict)


class TooNoisy(Exception):
    """Others use the machine."""


def engines_of(arguments: argparse.Namespace, model: str) -> dict[str, Callable[[], Engine]]:
    """What starts each."""
    folder = Path(arguments.models) / model
    kind = arguments.gguf or LLAMA_KINDS.get(arguments.quantization, "bf16")
    gguf = folder.with_name(f"{model}.gguf" if kind == "bf16" else f"{model}-{kind}.gguf")
    folder = gguf if arguments.gguf else folder
    plain = ["--dtype", "bfloat16"]
    if model in FEW:
        plain += ["--max-num-seqs", str(max(CASES[case]["prompts"] for case in MODELS[model]))]
    ours = [*plain, "--quantization", arguments.quantization] if arguments.quantization else plain
    single = [*ours, "--threads", str(arguments.threads)]
    if arguments.own_ranks:
        several = [
            *ours,
            "--ranks",
            str(arguments.own_ranks),
            "--threads",
            str(arguments.threads // arguments.own_ranks),
        ]
        return {
            "ours": partial(Engine, "ours", str(folder), several),
            "one rank": partial(Engine, "ours", str(folder), single),
        }
    engines: dict[str, Callable[[], Engine]] = {"ours": partial(Engine, "ours", str(folder), single)}
    if arguments.before:
        python, script = (
            str(Path(arguments.before).resolve() / part) for part in (".venv/bin/python", "benchmarks/engines.py")
        )
        return engines | {"before": partial(Engine, "ours", str(folder), single, python, script)}
    if arguments.own_quantization:
        other = [*plain, "--quantization", arguments.own_quantization, "--threads", str(arguments.threads)]
        return engines | {arguments.own_quantization: partial(Engine, "ours", str(folder), other)}
    script, threads = str(HERE / "peer_engines.py"), ["--threads", str(arguments.threads)]
    if arguments.vllm_python and kind == "bf16":
        environment = vllm_environment(arguments.vllm_python, arguments.threads)
        engines["vllm"] = partial(Engine, "vllm", str(folder), threads, arguments.vllm_python, script, environment)
    if arguments.llama_python and gguf.exists():
        words = [*threads, "--no-tiles"] if arguments.no_tiles else threads
        engines["llama"] = partial(Engine, "llama", str(gguf), words, arguments.llama_python, script)
    return engines


def first_token(engine: Engine) -> float:
    """Seconds from nothing."""
    return engine.startup_s + float(engine.run({**CASES["first"], "seed": -1})["seconds"])


def start_and_end(makes: dict[str, Callable[[], Engine]]) -> dict[str, float]:
    """Seconds to the first token of each, which is alone."""
    seconds = {}
    for name, make in makes.items():
        engine = make()
        try:
            seconds[name] = first_token(engine)
        finally:
            engine.close()
    return seconds


def measure(
    engines: dict[str, Engine],
    starts: list[dict[str, float]],
    cases: tuple[str, ...],
    arguments: argparse.Namespace,
) -> dict[str, Runs]:
    """A warm-up first, then the engines take turns. starts: how long each took of those alone; []: the one of these."""
    bandwidth = Bandwidth()
    starts = [{name: first_token(engine) for name, engine in engines.items()}, *starts]
    runs = {name: Runs(statistics.median(start[name] for start in starts[1:] or starts)) for name in engines}
    for case in cases:
        for repeat in range(-1, arguments.repeats):
            for name, engine in engines.items():
                before = bandwidth.now()
                seconds, peak_mb = one(engine, case, repeat, arguments)
                runs[name].peak_mb = max(runs[name].peak_mb, peak_mb)
                if repeat >= 0:
                    runs[name].seconds.setdefault(case, []).append(seconds)
                    runs[name].gigabytes.setdefault(case, []).append((before + bandwidth.now()) / 2)
    return runs


def one(engine: Engine, case: str, repeat: int, arguments: argparse.Namespace) -> tuple[float, int]:
    for attempt in range(arguments.attempts):
        await_rest(arguments.max_foreign, REST_SECONDS)
        with Watch() as watch:
            took = engine.run({**CASES[case], "seed": repeat * 1000 + attempt})
        if repeat < 0 or watch.foreign <= arguments.max_foreign:
            return float(took["seconds"]), int(took["peak_rss_mb"])
        await_quiet(arguments.max_foreign, 20.0)
    raise TooNoisy(
        f"{case}: others kept {watch.foreign:.2f} cores busy, more than --max-foreign {arguments.max_foreign}"
    )


def figures(runs: Runs, cases: tuple[str, ...]) -> Iterator[tuple[str, str, float, bool]]:
    """(row, case, value, whether more is better)."""
    yield "start-up to first token, s", "", runs.startup_s, False
    yield "peak memory, MB", "", float(runs.peak_mb), False
    middle = {case: statistics.median(runs.seconds[case]) for case in cases}
    if "first" in middle:
        yield "TTFT 128, ms", "first", middle["first"] * 1e3, False
    if "stream" in middle:
        yield "TPOT, ms", "stream", (middle["stream"] - middle["first"]) / (CASES["stream"]["output"] - 1) * 1e3, False
    for case in ("a1", "a2"):
        if case in middle:
            yield f"{case}, out tok/s", case, CASES[case]["prompts"] * CASES[case]["output"] / middle[case], True
    if "prefill" in middle:
        yield "prefill 1024, tok/s", "prefill", CASES["prefill"]["input"] / middle["prefill"], True
    if "overhead" in middle:
        shape = CASES["overhead"]
        yield "us per output token", "overhead", middle["overhead"] / (shape["prompts"] * shape["output"]) * 1e6, False


def rows(model: str, runs: dict[str, Runs], cases: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    ours = {row: (value, more, case) for row, case, value, more in figures(runs["ours"], cases)}
    for peer in runs:
        if peer == "ours":
            continue
        for row, case, value, more in figures(runs[peer], cases):
            mine = ours[row][0]
            yield {
                "model": model,
                "case": row,
                "peer_name": peer,
                "ours": round(mine, 3),
                "peer": round(value, 3),
                "ratio": round(mine / value if more else value / mine, 3),
            } | (
                {f"{side}_gb_s": level(runs[name], case) for side, name in (("ours", "ours"), ("peer", peer))}
                if case
                else {}
            )
    if len(runs) == 1:
        for row, (value, _, _) in ours.items():
            yield {"model": model, "case": row, "ours": round(value, 3)}


def level(runs: Runs, case: str) -> float:
    """GB/s that the memory gave around the repetitions."""
    return round(statistics.median(runs.gigabytes[case]), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, metavar="DIR")
    parser.add_argument("--vllm-python", metavar="PATH")
    parser.add_argument("--llama-python", metavar="PATH")
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=[*USUAL, "tiny-qwen3moe"])
    parser.add_argument("--cases", nargs="*", choices=list(CASES))
    parser.add_argument("--quantization", choices=list(LLAMA_KINDS), help="beside llama.cpp's Q8_0 or Q4_0")
    parser.add_argument("--gguf", choices=["bf16", "q8_0", "q4_0", "q4_k_m"], help="ours and llama.cpp on this file")
    parser.add_argument(
        "--no-tiles",
        action="store_true",
        help="llama.cpp takes its layouts for vectors in the place of those for AMX, where these crash",
    )
    parser.add_argument("--own-quantization", choices=list(LLAMA_KINDS), help="ours in this form beside; no peers")
    parser.add_argument(
        "--own-ranks", type=int, metavar="N", help="N ranks that share the threads beside a single one; no peers"
    )
    parser.add_argument("--before", metavar="DIR", help="another checkout of this, with its .venv, beside; no peers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--starts",
        type=int,
        default=0,
        help="of each engine alone, in turns: the middle one is given; 0: of both at once, the only one",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-foreign", type=float, default=0.15, help="cores that others may keep busy")
    parser.add_argument("--attempts", type=int, default=5, help="to get a clean repetition")
    parser.add_argument("--json", action="store_true", help="the lines are JSON in any case; for scripts that say it")
    arguments = parser.parse_args()
    if sum(map(bool, (arguments.own_ranks, arguments.own_quantization, arguments.before))) > 1:
        parser.error("--own-ranks, --own-quantization and --before are comparisons of their own: take one")
    if arguments.gguf and arguments.quantization:
        parser.error("--gguf says what the file has; --quantization is for checkpoints in bfloat16")
    noisy = False
    for model in arguments.only:
        wanted = set(arguments.cases or MODELS[model])
        if "stream" in wanted:
            wanted.add("first")  # what a stream took, less that
        cases = tuple(case for case in MODELS[model] if case in wanted)
        if not cases:
            continue
        makes = engines_of(arguments, model)
        # One more, as the first of each reads from disk and writes what it keeps there.
        starts = [start_and_end(makes) for _ in range(arguments.starts + 1 if arguments.starts else 0)][1:]
        engines = {name: make() for name, make in makes.items()}
        try:
            for row in rows(model, measure(engines, starts, cases, arguments), cases):
                print(json.dumps(row), flush=True)
        except TooNoisy as error:
            print(f"{model}: {error}", file=sys.stderr)
            noisy = True
        finally:
            for engine in engines.values():
                engine.close()
    sys.exit(1 if noisy else 0)


if __name__ == "__main__":
    main()
