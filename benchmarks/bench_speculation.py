"""What drafts bring over HTTP: two servers of one model, with drafts and without, measured in turns by the same requests.

    python benchmarks/bench_speculation.py [--model DIR] [--cases mtp,eagle3,prediction,ngram,editing,edited,beside] [--streams 1,8,64]
                                           [--drafter DIR] [--chats N] [--tokens 160] [--repeats 3] [--drafts N] [--options WORDS] [--picture FILE] [--json]

mtp: stories of the model's own making, where its MTP layer drafts. eagle3: the same with an EAGLE-3 drafter (--drafter; of the
embedded model there is one in tests/speculation/drafter). prediction: a text is to come again with a tenth of its words
changed, and the request says what it expects (the changed text is what a model would edit; the tokens are the model's).
ngram: the same stories, whose texts hardly repeat themselves, with method ngram. editing: the model is asked to write a text again with another name in it, and drafts come from the
text that it was given (method ngram); edited: the same with that text as the request's prediction; beside: the same beside as many
questions, each on another rank, where tokens per second are the sum of what each stream gets. These want a model that follows
(SmolLM2: benchmarks/real_weights.py). none: neither server drafts, which tells how exact ratios are. Every request is greedy, and its tokens are the same with and without drafts, which is checked.

A row per case and number of streams: k_mean, drafts of a sequence and step; acceptance, of those, the part that was right; bound, what
the ratio would be if a step took no longer with drafts and prompts took nothing; ratio, the middle one of tokens per second with drafts
over those without, which of the two servers is asked first alternates; error, the standard error of that middle one. --chats: so many questions of other kinds are answered with drafts before, one by one. --drafts: always so many, not as many as pay. --options: of both servers, as `moesaic serve` takes them. --picture:
an SVG of tokens per second by streams, of the first case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quiet import await_rest
from server_process import Server

PROMPTS = [
    "Once upon a time, there was a little dog", "Lily and her mom went to", "One day, a boy named Tim found",
    "The big red bird wanted to", "In a small house there lived", "Sara had a toy car that", "It was a sunny day and",
    "Ben saw a frog near the",
]  # fmt: skip
QUESTIONS = [
    "Explain how a bicycle stays upright.", "Write a short poem about the sea.", "What is the difference between TCP and UDP?",
    "How do bees make honey?", "Tell me about the history of Rome.", "Why is the sky blue?", "What should I cook with lentils?",
    "Describe a quiet winter morning.", "How does a compiler work?", "What is inflation?", "Give advice for a job interview.",
    "How do airplanes fly?",
]  # fmt: skip
STORY = (
    "Tom lived in a small house by the river. Every morning Tom walked to the bakery and bought a loaf of bread. One day Tom found a "
    "silver key on the road. He showed it to his friend Anna, who said that it looked very old. Tom and Anna tried the key in every "
    "door of the village, but none of them opened. At last Tom saw a little box under the old bridge. The key fitted, and in the box "
    "Tom found a letter from his grandfather."
)
REST_CORES, REST_SECONDS = 0.3, 20.0
NAMES = ("Max", "Sam", "Ben", "Leo", "Jack", "Peter", "Paul", "Mark")
DRAFTER = Path(__file__).parents[1] / "tests" / "speculation" / "drafter"
METHODS = {"editing": "ngram", "edited": "prediction", "beside": "ngram"}  # of cases that are not called as they are
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


async def answer(url: str, body: dict[str, Any]) -> tuple[str, float]:
    """The text of a streamed chat answer, and its seconds."""
    parts, began = urlsplit(url), time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = json.dumps({"stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    if "messages" in body:
        head = head.replace("/v1/completions", "/v1/chat/completions")
    writer.write(head.encode() + data)
    text = []
    async for line in reader:
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            text.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    writer.close()
    return "".join(text), time.perf_counter() - began


async def run(url: str, bodies: list[dict[str, Any]]) -> tuple[list[str], list[float]]:
    answers = await asyncio.gather(*(answer(url, body) for body in bodies))
    return [text for text, _ in answers], [seconds for _, seconds in answers]


def rate_of(case: str, seconds: list[float], tokens: int) -> float:
    """Tokens per second of answers of so many tokens that took so long."""
    return sum(tokens / each for each in seconds) if case == "beside" else len(seconds) * tokens / max(seconds)


def counters(server: Server) -> list[float]:
    lines = server.metrics().splitlines()
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:spec_decode_{name}_total{{"))
        for name in COUNTERS
    ]


def changed(text: str, seed: int) -> str:
    words, rng = text.split(" "), random.Random(seed)
    return " ".join("tree" if rng.random() < 0.1 else word for word in words)


def edit(common: dict[str, Any], number: int, predicts: bool) -> dict[str, Any]:
    name = NAMES[number % len(NAMES)]
    words = f"Copy the following text word for word, but write {name} in the place of Tom.\n\n{STORY}"
    body: dict[str, Any] = {**common, "messages": [{"role": "user", "content": words}]}
    return {**body, "prediction": {"type": "content", "content": STORY}} if predicts else body


def bodies_of(case: str, streams: int, tokens: int, plain: Server) -> list[dict[str, Any]]:
    common = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    prompts = [f"{PROMPTS[i % len(PROMPTS)]}{' again' * (i // len(PROMPTS))}" for i in range(streams)]
    if case == "beside":
        asked = [{**common, "messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
        return [edit(common, i // 2, False) if i % 2 else asked[i // 2 % len(asked)] for i in range(streams)]
    if case in METHODS:
        return [edit(common, i, case == "edited") for i in range(streams)]
    if case != "prediction":
        return [{**common, "prompt": prompt} for prompt in prompts]
    chats = [{**common, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    texts, _ = asyncio.run(run(plain.url, chats))
    return [
        {**chat, "prediction": {"type": "content", "content": changed(text, seed)}}
        for seed, (chat, text) in enumerate(zip(chats, texts, strict=True))
    ]


def measure(case: str, streams: int, options: argparse.Namespace, plain: Server, drafting: Server) -> dict[str, Any]:
    bodies = bodies_of(case, streams, options.tokens, plain)
    for number in range(options.chats):
        asked = {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}
        asyncio.run(run(drafting.url, [{"max_tokens": options.tokens, "temperature": 0.0, "messages": [asked]}]))
    asyncio.run(run(plain.url, bodies)), asyncio.run(run(drafting.url, bodies))
    before, ratios, rates = counters(drafting), [], []
    for number in range(options.repeats):
        texts, rate = [], []
        for server in (plain, drafting) if number % 2 else (drafting, plain):
            got, seconds = asyncio.run(run(server.url, bodies))
            texts.append(got)
            rate.append(rate_of(case, seconds, options.tokens))
        assert texts[0] == texts[1], "the texts differ"
        rates.append((rate[0], rate[1]) if number % 2 else (rate[1], rate[0]))
        ratios.append(rates[-1][1] / rates[-1][0])
    drafts, tokens, accepted = (now - then for now, then in zip(counters(drafting), before, strict=True))
    made = options.repeats * streams * options.tokens
    return {
        "model": options.model or "moesaic-tiny",
        "method": case,
        "streams": streams,
        "k_mean": round(tokens / drafts, 2) if drafts else 0.0,
        "acceptance": round(accepted / tokens, 3) if tokens else 0.0,
        "bound": round(made / (made - accepted), 3),
        "ratio": round(statistics.median(ratios), 3),
        "error": round(1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios)), 3) if len(ratios) > 1 else None,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "plain_tokens_per_s": round(statistics.median(rate for rate, _ in rates)),
        "tokens_per_s": round(statistics.median(rate for _, rate in rates)),
    }


def picture(rows: list[dict[str, Any]]) -> str:
    """Tokens per second without drafts and with as many as the gate has chosen, over the number of streams; both axes are
    logarithmic. Beside each point is how many drafts a request had."""
    wide, tall, left, low = 640, 360, 70, 40
    streams = [row["streams"] for row in rows]
    rates = [row[name] for row in rows for name in ("plain_tokens_per_s", "tokens_per_s")]
    first, last = math.log(min(streams)), math.log(max(streams))
    least, most = math.log(min(rates)), math.log(max(rates))

    def place(count: float, rate: float) -> tuple[float, float]:
        right = (math.log(count) - first) / (last - first or 1) * (wide - left - 60)
        up = (math.log(rate) - least) / (most - least or 1) * (tall - low - 50)
        return left + 20 + right, tall - low - 20 - up

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" font-family="sans-serif" font-size="12">',
        f'<rect width="{wide}" height="{tall}" fill="white"/>',
        f'<text x="6" y="16">tokens per second</text><text x="{wide - 60}" y="{tall - 6}">streams</text>',
    ]
    for index, count in enumerate(streams):
        x, _ = place(count, rates[0])
        parts.append(f'<text x="{x:.1f}" y="{tall - 24}" text-anchor="middle">{count}</text>')
        _, y = place(count, rates[2 * index])
        parts.append(f'<text x="6" y="{y + 4:.1f}">{rates[2 * index]}</text>')
    lines = (("plain_tokens_per_s", "without drafts", "#bbbbbb"), ("tokens_per_s", "with as many as pay", "#4477aa"))
    for number, (name, label, colour) in enumerate(lines):
        points = [place(row["streams"], row[name]) for row in rows]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 100 + 150 * number}" y="16" fill="{colour}">{label}</text>')
        for (x, y), row in zip(points, rows, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            if number:
                parts.append(f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{row["k_mean"]:g} drafts</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--cases", default="mtp,prediction,ngram")
    parser.add_argument("--streams", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drafts", type=int)
    parser.add_argument("--chats", type=int, default=0)
    parser.add_argument("--drafter", type=Path, default=DRAFTER)
    parser.add_argument("--options", default="", help='such as "--dtype float32 --data-parallel-size 1"')
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    model = [*([options.model] if options.model else []), *options.options.split()]
    plain = Server([*model, "--speculative-config", '{"method": "none"}'])
    plain.wait_ready()
    for case in options.cases.split(","):
        config: dict[str, Any] = {
            "method": METHODS.get(case, case),
            **({"model": str(options.drafter)} if case == "eagle3" else {}),
            **({"prompt_lookup_max": 3, "prompt_lookup_min": 2} if METHODS.get(case, case) == "ngram" else {}),
        }
        if options.drafts:
            config |= {"num_speculative_tokens": options.drafts, "adaptive": False}
        drafting = Server([*model, "--speculative-config", json.dumps(config)])
        drafting.wait_ready()
        for server in (plain, drafting):
            server.wait_standby(len(server.ranks()))  # getting ready takes a core
        await_rest(REST_CORES, REST_SECONDS)
        for streams in map(int, options.streams.split(",")):
            row = measure(case, streams, options, plain, drafting)
            rows.append(row)
            print(json.dumps(row) if options.json else row, flush=True)
        drafting.end()
    plain.end()
    if options.picture is not None:
        options.picture.write_text(picture([row for row in rows if row["method"] == rows[0]["method"]]))


if __name__ == "__main__":
    main()
