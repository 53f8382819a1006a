"""tiktoken.model gives the tokens that the tiktoken library gives of the same ranks."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from front.text.tiktoken_file import _KIMI, NUM_RESERVED
from front.text.tokenizer import Tokenizer

STORIES = [
    "Once upon a time there was a little cat. It's a cat's life, they've said, and we'll see.",
    "The THREE dogs didn't run 12345 miles; HTTPServer and camelCase words, naïve café, Ünïcode",
    "人工智能 is artificial intelligence. 你好,世界! 東京 and 大阪, 小猫和小狗",
    "def f(x):\n    return x ** 2  # squares\n\n\tprint('done')\r\n   spaces   and tabs",
    "Привет, мир! Ω is a letter, and 🙂 a smile. e\u0301 is not \u00e9.",
] * 4  # fmt: skip
SPECIAL = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Of a small vocabulary that was learnt from a few sentences: the bytes, then what they merge to."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_KIMI), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False, min_frequency=2)
    tokenizer.train_from_iterator(STORIES, trainer)
    from_character = {character: byte for byte, character in _characters().items()}
    learnt = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(from_character[character] for character in token) for token, _ in learnt]
    single = [bytes([byte]) for byte in range(256)]
    return {token: rank for rank, token in enumerate([*single, *(token for token in tokens if len(token) > 1)])}


def _characters() -> dict[int, str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(0x100 + place) for place, byte in enumerate(others)}}


@pytest.fixture(scope="module")
def folder(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi")
    write(path, ranks)
    return path


def write(path: Path, ranks: dict[bytes, int]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(len(ranks) + place): {"content": token, "special": True} for token, place in SPECIAL.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "eos_token": "[EOS]"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def oracle(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    special = {token: len(ranks) + place for token, place in SPECIAL.items()}
    return tiktoken.Encoding("kimi", pat_str=_KIMI, mergeable_ranks=ranks, special_tokens=special)


def test_tokens_are_those_of_tiktoken(folder: Path, oracle: tiktoken.Encoding) -> None:
    ours = Tokenizer(folder)
    assert ours.vocab_size == oracle.n_vocab - len(SPECIAL) + NUM_RESERVED and ours.eos_token_ids
    for text in STORIES[:5]:
        tokens = ours.encode(text)
        assert tokens == oracle.encode(text) and len(tokens) < len(text.encode())
        assert ours.decode(tokens) == text
    with_special = "[BOS]Once upon<|im_end|>a time"
    assert ours.encode(with_special) == oracle.encode(with_special, allowed_special="all")
    assert ours.token_str(ours.vocab_size - 1) == f"<|reserved_token_{ours.vocab_size - 1}|>"


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from([*" ".join(STORIES[:5]).split(" "), " ", "\n", "'s", "中", "12"]), max_size=12))
def test_any_text(folder: Path, oracle: tiktoken.Encoding, words: list[str]) -> None:
    text = "".join(words)
    assert Tokenizer(folder).encode(text) == oracle.encode(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("IQ== 0\nnonsense\n", r"tiktoken.model: line 2: expected a token in base64 and its rank"),
        ("IQ== 0\nIg== 2\n", r"tiktoken.model: expected ranks 0, 1, 2"),
        ("IQ== 0\n", r"tiktoken.model: expected ranks .* every single byte"),
    ],
)
def test_a_broken_file_is_named(change: str, message: str, ranks: dict[bytes, int], tmp_path: Path) -> None:
    write(tmp_path, ranks)
    (tmp_path / "tiktoken.model").write_text(change)
    with pytest.raises(ValueError, match=message):
        Tokenizer(tmp_path)


def test_another_way_to_cut_is_not_guessed(ranks: dict[bytes, int], tmp_path: Path) -> None:
    write(tmp_path, ranks)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is known for tokenizer_class TikTokenTokenizer, not None"):
        Tokenizer(tmp_path)
