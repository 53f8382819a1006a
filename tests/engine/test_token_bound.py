"""front/text/token_bound.py: no text has fewer tokens than its bound says, and tokenizers without a bound have none."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from front.text.tokenizer import Tokenizer
from models.tiny import CHECKPOINT

TEXT = "Once upon a time a süße little fox 🎉 lived        in a hollow tree. ééé 한국어 " * 3


def byte_level(directory: Path, **parts: Any) -> Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    for name, part in parts.items():
        setattr(made, name, part)
    return saved(made, directory)


def byte_fallback(directory: Path) -> Tokenizer:
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "a", "b", "▁a", "ab", "abab"):
        vocab.setdefault(piece, len(vocab))
    merges = [("▁", "a"), ("a", "b"), ("ab", "ab")]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return saved(made, directory)


def saved(made: tokenizers.Tokenizer, directory: Path) -> Tokenizer:
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    base = tmp_path_factory.mktemp("tokenizers")
    composing = byte_level(base / "nfc", normalizer=normalizers.NFC())
    return [Tokenizer(CHECKPOINT), byte_level(base / "plain"), composing, byte_fallback(base / "fallback")]


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_no_text_has_fewer_tokens(bounded: list[Tokenizer], data: st.DataObject) -> None:
    pieces = st.sampled_from([*TEXT.split(" "), " ", "   " * 30, "abab" * 9, "ab", "<|end|>"]) | st.text(max_size=9)
    text = "".join(data.draw(st.lists(pieces, max_size=30)))
    for form in ("NFC", "NFD"):
        written = unicodedata.normalize(form, text)
        for tokenizer in bounded:
            assert tokenizer.fewest_tokens(written) <= len(tokenizer.encode(written, add_special_tokens=False))


def test_it_bounds_something(bounded: list[Tokenizer]) -> None:
    assert all(tokenizer.fewest_tokens("a" * 100_000) > 50 for tokenizer in bounded)


def test_others_have_no_bound(tmp_path: Path) -> None:
    kinds = {
        "strip": byte_level(tmp_path / "strip", normalizer=normalizers.Strip()),
        "whitespace": byte_level(tmp_path / "whitespace", pre_tokenizer=pre_tokenizers.Whitespace()),
        "words": saved(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), tmp_path / "words"),
    }
    file = tmp_path / "strip" / "tokenizer.json"
    raw = json.loads(file.read_text()) | {"normalizer": None}
    raw["added_tokens"] = [
        {"id": 0, "content": "<mask>", "single_word": False, "lstrip": True, "rstrip": False, "normalized": False, "special": True}
    ]  # fmt: skip
    file.write_text(json.dumps(raw))
    kinds["an added token that takes spaces along"] = Tokenizer(tmp_path / "strip")
    assert {name: tokenizer.fewest_tokens("a" * 100_000) for name, tokenizer in kinds.items()} == dict.fromkeys(
        kinds, 0
    )
