"""Incremental decoding equals decoding at once; stop strings are found wherever token boundaries fall."""

from __future__ import annotations

import itertools
import time

import pytest
import tokenizers as tokenizers_library
from amounts import examples
from front_parts import CORPUS, byte_fallback, byte_level, word_pieces
from hypothesis import example, given, settings
from hypothesis import strategies as st

from front.text.detokenizer import REPLACEMENT, StopStrings, byte_level_alphabet
from front.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        make.__name__: Tokenizer(make(tmp_path_factory.mktemp(make.__name__)))
        for make in (byte_level, byte_fallback, word_pieces)
    }


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("words")
    vocabulary = {"<s>": 0, "": 1, "a": 2, " b": 3, "é🎉": 4}
    made = tokenizers_library.Tokenizer(tokenizers_library.models.WordLevel(vocabulary, unk_token="a"))
    made.add_special_tokens(["<s>"])
    made.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def chunked(data: st.DataObject, items: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=6)))
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


def pieces(tokenizer: Tokenizer, chunks: list[list[int]], skip: bool, prompt: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt, skip)
    return [*[detokenizer.push(chunk) for chunk in chunks], detokenizer.finish()]


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_bytes_join_to_the_whole_decode(tokenizers: dict[str, Tokenizer], data: st.DataObject, skip: bool) -> None:
    """Also where the tokens are no UTF-8 at all, and beyond the vocabulary."""
    tokenizer = tokenizers["byte_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    parts = pieces(tokenizer, chunked(data, ids), skip, prompt=[5])
    assert "".join(parts) == tokenizer.decode(ids, skip)
    one_by_one = pieces(tokenizer, [[token_id] for token_id in ids], skip, prompt=[])
    assert "".join(one_by_one) == tokenizer.decode(ids, skip)


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data(), text=st.text(alphabet="the thin cat é日本🎉👩‍👧 ", max_size=30))
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_real_text_never_shows_half_a_character(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, text: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(tokenizer, chunked(data, ids), skip=True, prompt=[])
    assert "".join(parts) == tokenizer.decode(ids)
    assert not any(REPLACEMENT in part for part in parts)


def test_half_a_character_waits_for_its_end(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("a🦊b", add_special_tokens=False)
    parts = pieces(tokenizer, [[token_id] for token_id in ids], skip=True, prompt=[])
    assert [part for part in parts if part] == ["a", "🦊", "b"]
    assert "".join(pieces(tokenizer, [ids[:-2]], skip=True, prompt=[])) == "a" + REPLACEMENT  # it ends there


def test_special_tokens_are_hidden_or_shown(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = [2, *tokenizer.encode("hi", add_special_tokens=False), 3]
    assert "".join(pieces(tokenizer, [[i] for i in ids], True, [])) == "hi"
    assert "".join(pieces(tokenizer, [[i] for i in ids], False, [])) == "<|im_start|>hi<|im_end|>"


def test_first_space_depends_on_what_stands_before(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    the, cat = tokenizer.encode("the", add_special_tokens=False), tokenizer.encode("cat", add_special_tokens=False)
    assert "".join(pieces(tokenizer, [cat], True, prompt=the)) == " cat"
    assert "".join(pieces(tokenizer, [cat], True, prompt=[1])) == "cat"  # BOS is not shown
    assert "".join(pieces(tokenizer, [cat], True, prompt=[])) == "cat"


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), text=st.text(alphabet="abcdef ", max_size=20))
def test_window_decoder(tokenizers: dict[str, Tokenizer], data: st.DataObject, text: str) -> None:
    tokenizer = tokenizers["word_pieces"]
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, chunked(data, ids), True, prompt=[])) == tokenizer.decode(ids)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_words_without_a_decoder(words: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """Also special ones, empty ones, and those beyond the vocabulary."""
    ids = data.draw(st.lists(st.integers(0, words.vocab_size + 2), max_size=12))
    assert "".join(pieces(words, chunked(data, ids), skip, prompt=[])) == words.decode(ids, skip)
    whole = words.decode([2, *ids], skip)
    assert "a" + "".join(pieces(words, [[token_id] for token_id in ids], skip, prompt=[2])) == whole


def test_corpus_round_trip(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(pieces(tokenizer, [[token_id] for token_id in ids], True, [])) == text


def test_alphabet_is_a_bijection() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))


# ---- stop strings ----


def first_stop(text: str, stops: list[str], skipped: int) -> tuple[int, str] | None:
    """(where it begins, which): the one that is complete first, after `skipped` characters; then the longer. By force."""
    for end in range(skipped + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


TEXT = st.text(alphabet="ab\n", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), text=TEXT, stops=STOPS, include=st.booleans(), skipped=st.integers(0, 6))
@example(data=None, text="xabab", stops=["abab", "ba"], include=False, skipped=0)
def test_stop_strings(data: st.DataObject | None, text: str, stops: list[str], include: bool, skipped: int) -> None:
    """Whatever pieces the text comes in; the first `skipped` characters come while stops are not looked for."""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8)) if data is not None else range(len(text))
    skipped = min(skipped, len(text))
    cuts = sorted({0, skipped, len(text), *cuts})
    finder = StopStrings(stops, include)
    out = ""
    for start, end in itertools.pairwise(cuts):
        out += finder.push(text[start:end], look=start >= skipped)
        assert text.startswith(out)
        if finder.found is not None:
            break
    else:
        out += finder.finish()

    expected = first_stop(text, stops, skipped)
    if expected is None:
        assert finder.found is None and out == text
    else:
        at, stop = expected
        assert finder.found == stop
        assert out == text[: at + len(stop) if include else at]


@settings(max_examples=examples(200), deadline=None)
@given(text=TEXT, stops=STOPS)
def test_nothing_is_held_without_need(text: str, stops: list[str]) -> None:
    """What is held back is the longest end of the text that can still become a stop string."""
    finder = StopStrings(stops, False)
    out = ""
    for character in text:
        out += finder.push(character, look=True)
        if finder.found is not None:
            return
    held = text[len(out) :]
    could = [size for size in range(len(text) + 1) if any(stop.startswith(text[len(text) - size :]) for stop in stops)]
    assert len(held) == max(could)


def test_long_stop_strings_stay_cheap() -> None:
    finder = StopStrings(["a" * 1024] * 4, False)
    start = time.process_time()
    for _ in range(300):
        finder.push("aaa", look=True)
    assert time.process_time() - start < 2.0
