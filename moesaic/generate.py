"""`moesaic generate`: continue prompts on this machine, without a server."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import click

import moesaic
from front.outputs import Delta, Progress
from front.params import SamplingParams
from moesaic.command_line import VllmCommand
from moesaic.options import engine_config, engine_options

LINE_SECONDS = 5.0  # at most one plain line of progress in this time


@click.command("generate", cls=VllmCommand)
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
        writer = InOrder(texts, as_json, sys.stdout)
        several = len(texts) > 1
        bar = several and sys.stderr.isatty() and not sys.stdout.isatty()  # where the texts come it would be in between
        progress = _told_in_lines(len(texts)) if several and not bar else None
        with _traced(llm, trace):
            llm.generate(texts, params, use_tqdm=bar, progress=progress, on_delta=writer.add)


class InOrder:
    """Writes the prompts' texts in their order while they come: the first that has not ended as it grows, what is ready
    of those behind it when it is their turn."""

    def __init__(self, prompts: Sequence[str], as_json: bool, stream: TextIO) -> None:
        self._prompts = prompts
        self._as_json = as_json
        self._stream = stream
        self._texts = [""] * len(prompts)
        self._reasons: list[str | None] = [None] * len(prompts)
        self._turn = self._written = 0  # the prompt whose turn it is, and how much of it has been written

    def add(self, number: int, delta: Delta) -> None:
        self._texts[number] += delta.text
        self._reasons[number] = delta.finish_reason
        while self._turn < len(self._prompts) and (self._texts[self._turn] or self._reasons[self._turn]):
            self._write()
            if self._reasons[self._turn] is None:
                break
            self._turn, self._written = self._turn + 1, 0
        self._stream.flush()

    def _write(self) -> None:
        prompt, text, reason = self._prompts[self._turn], self._texts[self._turn], self._reasons[self._turn]
        if self._as_json:
            if reason is not None:
                print(json.dumps({"prompt": prompt, "text": text, "finish_reason": reason}), file=self._stream)
            return
        whole = prompt + text + ("\n" if reason is not None else "")
        self._stream.write(whole[self._written :])
        self._written = len(whole)


def _told_in_lines(count: int) -> Callable[[Progress], None]:
    """A line now and then."""
    began = last = time.monotonic()

    def tell(now: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            speed = now.num_output_tokens / (last - began)
            text = f"{now.num_finished} of {count} prompts, {now.num_output_tokens} tokens, {speed:.0f} tokens/s"
            print(f"moesaic: {text}", file=sys.stderr, flush=True)

    return tell


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
