"""`moesaic generate`: continue prompts on this machine, without a server."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import click

import moesaic
from front.messages import SamplingParams
from moesaic.options import engine_config, engine_options


@click.command("generate")
@click.option("--prompt", "-p", "prompts", multiple=True, help="Text to continue; repeatable; default: standard input.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True)
@click.option("--sampling-seed", type=int, help="Seed of the draws; default: random.")
@click.option("--stop", multiple=True, help="Stop string; repeatable.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write a timeline to this file, for ui.perfetto.dev.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per prompt.")
@engine_options
def command(prompts: tuple[str, ...], trace: str | None, as_json: bool, **options: Any) -> None:
    """Continue each --prompt with MODEL (default: the embedded one) and print the text."""
    params = SamplingParams(
        max_tokens=options.pop("max_tokens"),
        temperature=options.pop("temperature"),
        top_p=options.pop("top_p"),
        top_k=options.pop("top_k"),
        seed=options.pop("sampling_seed"),
        stop=options.pop("stop"),
    )
    texts = list(prompts) or [sys.stdin.read().rstrip("\n")]
    with moesaic.LLM.from_config(engine_config(options)) as llm:
        with _traced(llm, trace):
            outputs = llm.generate(texts, params)
        for output in outputs:
            best = output.outputs[0]
            if as_json:
                print(json.dumps({"prompt": output.prompt, "text": best.text, "finish_reason": best.finish_reason}))
            else:
                print(f"{output.prompt}{best.text}")


@contextlib.contextmanager
def _traced(llm: moesaic.LLM, path: str | None) -> Iterator[None]:
    """Also what has been done by the time it fails is written."""
    if path is None:
        yield
        return
    llm.start_profile(path)
    try:
        yield
    finally:
        summary = llm.stop_profile()
        dropped = f", {summary.dropped} dropped" if summary.dropped else ""
        lost = f", without rank {', '.join(map(str, summary.lost))}" if summary.lost else ""
        print(
            f"moesaic: {summary.events} events of {len(summary.ranks)} rank(s) in {summary.file}{dropped}{lost}; "
            "open it in ui.perfetto.dev",
            file=sys.stderr,
        )
