"""`moesaic bench dbo`: what splitting a step hides, for a model and ranks on this machine, read from traces."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from msgspec import structs

import moesaic
from configs.engine import EngineConfig
from front.params import SamplingParams
from front.trace_figures import StepFigures, figures
from moesaic.command_line import VllmCommand
from moesaic.options import engine_config, engine_options

MODES = ("off", "on", "auto")


def make_command(report: Callable[[dict[str, Any]], None]) -> click.Command:
    """report: prints a row."""

    @click.command("dbo", cls=VllmCommand, short_help="What splitting a step hides.")
    @click.option("--tokens", type=int, default=512, show_default=True, help="Of each rank's step: prompts, as chunks.")
    @click.option(
        "--steps", type=int, default=6, show_default=True, help="Full steps of each rank, per mode and round."
    )
    @click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="In each, every mode once.")
    @click.option(
        "--trace-dir", type=click.Path(exists=True, file_okay=False), help="Keep off.json, on.json, auto.json."
    )
    @engine_options
    def dbo(tokens: int, steps: int, rounds: int, trace_dir: str | None, **options: Any) -> None:
        """Steps of prompts with --enable-dbo off, on and auto: compute, exchange, their sum, and how much on hides."""
        if tokens < 2 or steps < 3:
            raise ValueError(f"--tokens must be at least 2 and --steps at least 3, not {tokens} and {steps}")
        config = engine_config({**options, "max_num_batched_tokens": tokens, "enable_prefix_caching": False}, 2)
        if config.data_parallel_size < 2:
            raise ValueError("one rank exchanges nothing: give --data-parallel-size 2 or more")
        with tempfile.TemporaryDirectory(prefix="moesaic-bench-") as folder:
            keep = Path(folder if trace_dir is None else trace_dir)
            measured: dict[str, list[StepFigures]] = {mode: [] for mode in MODES}
            for _ in range(rounds):  # whatever else the machine does hits all of them
                for mode in MODES:
                    measured[mode] += _measure(config, mode, tokens, steps, keep / f"{mode}.json")
        report(_row(config, tokens, measured))

    return dbo


def _measure(config: EngineConfig, mode: str, tokens: int, steps: int, path: Path) -> list[StepFigures]:
    """The full steps. ValueError when there are none."""
    more: dict[str, Any] = {"enable_dbo": mode}
    if mode == "on":
        more |= {"dbo_prefill_token_threshold": 1, "dbo_decode_token_threshold": 1}
    ranks = config.data_parallel_size
    with moesaic.LLM.from_config(structs.replace(config, **more)) as llm:
        length = min(tokens, llm.plan.max_model_len - 1)
        count = ranks * (-(-tokens * (steps + 4) // length))  # ranks need not begin in the same step
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        draw = random.Random(0)
        prompts = [[draw.randrange(llm.vocab_size) for _ in range(length)] for _ in range(count)]
        llm.generate(prompts[: 2 * ranks], params)
        llm.start_profile(path)
        llm.generate(prompts, params)
        llm.stop_profile()
    full = [step for step in figures(json.loads(path.read_bytes())) if min(step.tokens) == tokens]
    if not full:
        raise ValueError(
            f"no step of {ranks} ranks had {tokens} tokens on each: --tokens is too small for {length} at once"
        )
    return full


def _row(config: EngineConfig, tokens: int, measured: dict[str, list[StepFigures]]) -> dict[str, Any]:
    def middle(mode: str, name: str) -> float:
        value: float = statistics.median(getattr(step, name) for step in measured[mode])
        return value

    compute, exchange = middle("off", "computed"), middle("off", "travelled")
    ideal = max(compute, exchange)
    step = {mode: middle(mode, "forward") for mode in MODES}
    flight = sum(one.flight for one in measured["on"])
    waited = sum(one.waited for one in measured["on"])
    row: dict[str, Any] = {"model": config.model or "embedded", "ranks": config.data_parallel_size, "tokens": tokens}
    row |= {"steps": min(map(len, measured.values())), "lanes": measured["on"][0].lanes}
    milliseconds = {"compute": compute, "exchange": exchange, "sum": compute + exchange, "ideal": ideal, **step}
    row |= {f"{name}_ms": round(value, 3) for name, value in milliseconds.items()}
    row |= {f"{mode}_over_ideal": round(step[mode] / ideal, 3) for mode in MODES}
    row["auto_lanes"] = measured["auto"][0].lanes
    row["hidden"] = round(1 - waited / flight, 3) if flight else None
    return row
