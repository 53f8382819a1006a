"""Writes stories of the embedded model's own, which its MTP layer is trained on (models/tiny/training/distill.py):
``python benchmarks/own_text.py --out own.txt --stories 14000``.

Half of them go on from the beginning of a story, half answer a request; two fifths are greedy, the others sampled at
three temperatures. Those that do not end within the length, and those that came before, are left out.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from models.tiny.training.data import END, NAME_NOUN_TEMPLATES, NAME_TEMPLATES, NOUN_TEMPLATES, OPEN_TEMPLATES
from moesaic import LLM, RequestOutput, SamplingParams

NAMES_TEXT = """
    Lily Tom Tim Mia Ben Sara Max Anna Sam Lucy Jack Sue Bob Amy Spot Timmy Jane Leo Emma Billy Mary Joe Ella John
    Daisy Fluffy Jill Mark Kitty Lila Sally Molly Benny Peter Lisa Zoe Nick Katie Dan Rose
"""
NAMES = NAMES_TEXT.split()
NOUNS_TEXT = """
    dog cat bird ball car tree flower fish bear bunny boat box toy hat cake kite frog mouse fox train lion duck cow horse
    doll park beach forest garden house apple cookie star moon rock truck book balloon bike puppy
"""
NOUNS = NOUNS_TEXT.split()
BEGINNINGS = [
    "Once upon a time, there was a",
    "Once upon a time,",
    "One day,",
    "Once upon a time, there was a little girl named {name}.",
    "Once upon a time, there was a little boy named {name}.",
    "Once upon a time, there was a {noun} named {name}.",
    "{name} and {friend} were",
    "{name} and {friend} went to the {noun}.",
    "{name} had a {noun}.",
    "{name} had a {noun} and a {other}.",
    "There was a {noun} who",
    "There was a {noun} who loved the {other}.",
    "Once there was a big {noun}.",
    "One day, {name} found a {noun}.",
    "One day, {name} and {friend} found a {noun}.",
    "{name} liked to play with the {noun}.",
    "In a small house lived a {noun} and a {other}.",
    "{name} was sad.",
    "The {noun} and the {other}",
    "{name} saw a {noun} in the {other}.",
]
REQUESTS = [NAME_TEMPLATES, NAME_NOUN_TEMPLATES, NAME_NOUN_TEMPLATES, NOUN_TEMPLATES, NOUN_TEMPLATES, OPEN_TEMPLATES]
TEMPERATURES = [0.0, 0.0, 0.4, 0.7, 1.0]
MAX_TOKENS, AT_ONCE = 400, 1000


def filled(template: str, rng: random.Random) -> str:
    name, friend, noun, other = (rng.choice(words) for words in (NAMES, NAMES, NOUNS, NOUNS))
    return template.format(name=name, friend=friend, noun=noun, other=other)


def ended(results: list[RequestOutput]) -> list[str]:
    """What was written, or nothing where it did not end."""
    answers = [result.outputs[0] for result in results]
    return [answer.text if answer.finish_reason == "stop" else "" for answer in answers]


def write(llm: LLM, count: int, seed: int) -> list[str]:
    """``count`` stories, less those that are left out."""
    rng, stories = random.Random(seed), list[str]()
    for first in range(0, count // 2, AT_ONCE):
        now = min(AT_ONCE, count // 2 - first)
        params = [
            SamplingParams(max_tokens=MAX_TOKENS, temperature=TEMPERATURES[i % 5], seed=100_000 * seed + first + i)
            for i in range(now)
        ]
        begun = [filled(rng.choice(BEGINNINGS), rng) for _ in range(now)]
        asked = [filled(rng.choice(rng.choice(REQUESTS)), rng) for _ in range(now)]
        rest = ended(llm.generate(begun, params))
        stories += [start + text for start, text in zip(begun, rest, strict=True) if text]
        stories += ended(llm.chat([[{"role": "user", "content": text}] for text in asked], params))
    return list(dict.fromkeys(story.strip() for story in stories if story.strip()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write stories of the embedded model's own.")
    parser.add_argument("--out", type=Path, required=True, help="the file, <|endoftext|> between stories")
    parser.add_argument("--stories", type=int, default=14_000)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with LLM(max_num_seqs=128, max_model_len=512) as llm:
        stories = write(llm, options.stories, options.seed)
    random.Random(options.seed).shuffle(stories)
    options.out.write_text(END.join(stories), encoding="utf-8")
    print(f"{len(stories)} stories")


if __name__ == "__main__":
    main()
