"""Answers in gpt-oss' format that the library openai-harmony writes, read by it and by our parser (make clients). The
library has to be given its vocabulary, which an npm package has."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from front.chat.events import Message
from front.chat.families import HARMONY, HARMONY_REASONING
from front.chat.format import OutputFormat

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv" / "clients"
VOCABULARY = CLIENTS / "node" / "node_modules" / "gpt-tokenizer" / "data"
SCRIPT = Path(__file__).parent / "scripts" / "harmony_answers.py"
ANSWERS = 500

pytestmark = [pytest.mark.clients, pytest.mark.slow]


def test_answers_of_the_library() -> None:
    packages = CLIENTS / "openai-harmony"
    if not packages.exists() or not VOCABULARY.exists():
        pytest.skip("needs openai-harmony and its vocabulary, which are installed by: make clients")
    environment = {**os.environ, "PYTHONPATH": str(packages), "TIKTOKEN_ENCODINGS_BASE": str(VOCABULARY)}
    command = [str(CLIENTS / "bin" / "python"), str(SCRIPT), str(ANSWERS), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == ANSWERS
    draw = random.Random(2)
    for answer in answers:
        assert ours(answer["text"], draw) == theirs(answer["messages"]), answer


def ours(text: str, draw: random.Random) -> tuple[str, str, list[tuple[str, str]]]:
    """Read in pieces as a stream would bring them."""
    parser = OutputFormat(calls=HARMONY, reasoning=HARMONY_REASONING).parser("request", 0)
    message = Message()
    while text:
        size = draw.randint(1, 9)
        message.add(parser.feed(text[:size]))
        text = text[size:]
    message.add(parser.finish())
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


def theirs(messages: list[tuple[str, str | None, str]]) -> tuple[str, str, list[tuple[str, str]]]:
    """Of our names: the analysis channel is reasoning, a message to a function a call, all else content."""
    calls = [(to.removeprefix("functions."), text) for _, to, text in messages if to]
    reasoning = "".join(text for channel, to, text in messages if not to and channel == "analysis")
    return "".join(text for channel, to, text in messages if not to and channel != "analysis"), reasoning, calls
