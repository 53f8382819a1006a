"""`moesaic bench throughput | latency | dbo | serve`: JSON lines on stdout, a table on stderr."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from typing import Any

import click
from msgspec import Struct
from rich.console import Console
from rich.table import Table

import moesaic
from configs.env import read_env
from front.params import SamplingParams
from moesaic.bench_dbo import make_command
from moesaic.command_line import VllmCommand
from moesaic.http_client import Client, HttpError, unreached
from moesaic.options import Number, engine_config, engine_options


@click.group("bench")
def command() -> None:
    """Measure throughput or latency on this machine, or a running server."""


@command.command("throughput", cls=VllmCommand, short_help="Tokens per second of many prompts at once.")
@click.option("--num-prompts", type=click.IntRange(1), default=64, show_default=True, help="Prompts in all.")
@click.option(
    "--input-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each (random) prompt."
)
@click.option("--output-len", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each answer.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs; their median is given.")
@engine_options
def throughput(num_prompts: int, input_len: int, output_len: int, repeats: int, **options: Any) -> None:
    """All prompts at once, greedy, without stopping early: tokens per second."""
    with moesaic.LLM.from_config(engine_config(options)) as llm:
        run = _Offline(llm, num_prompts, input_len, output_len)
        run.seconds(0)
        each = [run.seconds(1 + repeat) for repeat in range(repeats)]
    seconds = statistics.median(each)
    tokens = num_prompts * output_len
    _report(
        {
            "num_prompts": num_prompts,
            "input_len": input_len,
            "output_len": output_len,
            "seconds": round(seconds, 4),
            "requests_per_s": round(num_prompts / seconds, 2),
            "output_tokens_per_s": round(tokens / seconds, 1),
            "total_tokens_per_s": round(num_prompts * (input_len + output_len) / seconds, 1),
        }
    )


@command.command("latency", cls=VllmCommand, short_help="Times to the first token and per token.")
@click.option("--batch-size", type=click.IntRange(1), default=1, show_default=True, help="Prompts at a time.")
@click.option("--input-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--output-len", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each answer.")
@click.option("--num-iters", type=click.IntRange(1), default=5, show_default=True, help="Batches that are timed.")
@engine_options
def latency(batch_size: int, input_len: int, output_len: int, num_iters: int, **options: Any) -> None:
    """One batch at a time: time to the first token and per token after it."""
    if output_len < 2:
        raise ValueError(f"--output-len must be at least 2, not {output_len}")
    with moesaic.LLM.from_config(engine_config(options)) as llm:
        full = _Offline(llm, batch_size, input_len, output_len)
        first = _Offline(llm, batch_size, input_len, 1)
        full.seconds(0)
        firsts = [first.seconds(1 + index) for index in range(num_iters)]
        totals = [full.seconds(1000 + index) for index in range(num_iters)]
    ttft, total = statistics.median(firsts), statistics.median(totals)
    _report(
        {
            "batch_size": batch_size,
            "input_len": input_len,
            "output_len": output_len,
            "ttft_ms": round(ttft * 1e3, 2),
            "tpot_ms": round((total - ttft) / (output_len - 1) * 1e3, 3),
            "latency_s": round(total, 4),
        }
    )


class _Offline:
    """Runs one case; prompts are random token ids, new for each repetition so that no prefix is found again."""

    def __init__(self, llm: moesaic.LLM, num_prompts: int, input_len: int, output_len: int) -> None:
        self.llm, self.num_prompts, self.input_len = llm, num_prompts, input_len
        self.params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        if input_len + output_len > llm.plan.max_model_len:
            raise ValueError(
                f"--input-len + --output-len is {input_len + output_len}; max_model_len is {llm.plan.max_model_len}"
            )

    def seconds(self, repeat: int) -> float:
        rng = random.Random(repeat)
        vocabulary = self.llm.vocab_size
        prompts = [[rng.randrange(vocabulary) for _ in range(self.input_len)] for _ in range(self.num_prompts)]
        began = time.perf_counter()
        self.llm.generate(prompts, self.params)
        return time.perf_counter() - began


@command.command("serve")
@click.option("--url", help="The server; default: MOESAIC_URL or http://127.0.0.1:8000.")
@click.option("--api-key", help="Default: the first of MOESAIC_API_KEY.")
@click.option("--num-prompts", type=click.IntRange(1), default=64, show_default=True, help="Prompts in all.")
@click.option("--input-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--output-len", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each answer.")
@click.option(
    "--request-rate",
    type=Number(0),
    default=0.0,
    show_default=True,
    help="Requests per second; 0: all at once.",
)
@click.option("--max-concurrency", type=click.IntRange(1), default=256, show_default=True, help="Requests in flight.")
@click.option("--bench-seed", type=int, default=0, show_default=True, help="Of what is drawn: prompts and times.")
def serve(url: str | None, api_key: str | None, **case: Any) -> None:
    """Stream completions from a running server and time every token."""
    env = read_env()
    client = Client(url or env.url, api_key or (env.api_keys[0] if env.api_keys else None))
    try:
        _report(asyncio.run(_load(client, **case)))
    except (OSError, HttpError) as error:
        raise unreached(url or env.url, error) from None


class _Timing(Struct):
    began: float
    chunks: list[float] = []
    tokens: int = 0
    error: str = ""


async def _load(
    client: Client,
    num_prompts: int,
    input_len: int,
    output_len: int,
    request_rate: float,
    max_concurrency: int,
    bench_seed: int,
) -> dict[str, Any]:
    model = (await client.get("/v1/models"))["data"][0]["id"]
    rng = random.Random(bench_seed)
    base = {"model": model, "max_tokens": output_len, "temperature": 0.0, "ignore_eos": True, "stream": True}
    base["stream_options"] = {"include_usage": True}
    gate = asyncio.Semaphore(max_concurrency)

    async def one(delay: float, prompt: list[int]) -> _Timing:
        await asyncio.sleep(delay)
        async with gate:
            timing = _Timing(time.perf_counter())
            try:
                async for event in client.events("/v1/completions", {**base, "prompt": prompt}):
                    if event["choices"]:
                        timing.chunks.append(time.perf_counter())
                    if event.get("usage"):
                        timing.tokens = event["usage"]["completion_tokens"]
            except (OSError, HttpError, TimeoutError) as error:
                timing.error = str(error)
            return timing

    delays, delay = [], 0.0
    for _ in range(num_prompts):
        delays.append(delay)
        delay += rng.expovariate(request_rate) if request_rate > 0 else 0.0
    prompts = [[rng.randrange(256, 1024) for _ in range(input_len)] for _ in range(num_prompts)]
    began = time.perf_counter()
    timings = await asyncio.gather(*[one(d, p) for d, p in zip(delays, prompts, strict=True)])
    return _summary(timings, time.perf_counter() - began)


def _summary(timings: list[_Timing], seconds: float) -> dict[str, Any]:
    good = [t for t in timings if not t.error and t.chunks]
    ttft = [t.chunks[0] - t.began for t in good]
    tpot = [(t.chunks[-1] - t.chunks[0]) / (t.tokens - 1) for t in good if t.tokens > 1]
    gaps = [b - a for t in good for a, b in zip(t.chunks, t.chunks[1:], strict=False)]
    tokens = sum(t.tokens for t in good)
    errors = sorted({t.error for t in timings if t.error})
    row: dict[str, Any] = {"completed": len(good), "failed": len(timings) - len(good), "seconds": round(seconds, 3)}
    row |= {"requests_per_s": round(len(good) / seconds, 2), "output_tokens_per_s": round(tokens / seconds, 1)}
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", gaps)):
        row |= {f"{name}_p50_ms": _quantile(values, 0.5), f"{name}_p99_ms": _quantile(values, 0.99)}
    return row | ({"errors": errors[:3]} if errors else {})


def _quantile(values: list[float], part: float) -> float | None:
    if not values:
        return None
    return round(sorted(values)[min(len(values) - 1, int(part * len(values)))] * 1e3, 2)


def _report(row: dict[str, Any]) -> None:
    table = Table("measure", "value")
    for name, value in row.items():
        table.add_row(name, str(value))
    Console(stderr=True).print(table)
    print(json.dumps(row), flush=True)
    if row.get("failed"):
        sys.exit(1)


command.add_command(make_command(_report))
