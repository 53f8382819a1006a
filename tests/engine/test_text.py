"""The tokenizer: equal to transformers' AutoTokenizer, clear about what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from front_parts import CORPUS, byte_fallback, byte_level, word_pieces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from front.text.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parents[2] / "models" / "tiny" / "checkpoint"
KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "word_pieces": word_pieces}


@pytest.fixture(scope="module", params=[*KINDS, "embedded"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(ours, transformers')."""
    if request.param == "embedded":
        directory = EMBEDDED
    else:
        directory = KINDS[request.param](tmp_path_factory.mktemp(request.param))
    theirs = transformers.AutoTokenizer.from_pretrained(directory, clean_up_tokenization_spaces=False)
    return Tokenizer(directory), theirs


@pytest.mark.parametrize("special", [True, False])
def test_encode_equals_transformers(both, special: bool) -> None:
    ours, theirs = both
    texts = [*CORPUS, "", " ", "<|bos|>hello<|im_end|> there<|endoftext|>"]
    expected = [theirs.encode(text, add_special_tokens=special) for text in texts]
    assert [ours.encode(text, special) for text in texts] == expected
    assert ours.encode_batch(texts, special) == expected


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_decode_equals_transformers(both, data: st.DataObject) -> None:
    ours, theirs = both
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=30))
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_special_tokens_equal_transformers(both) -> None:
    ours, theirs = both
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (theirs.bos_token, theirs.eos_token, theirs.pad_token)
    assert ours.bos_token_id == theirs.bos_token_id
    assert theirs.eos_token_id in ours.eos_token_ids
    assert ours.vocab_size == len(theirs)
    assert set(theirs.all_special_ids) <= ours.special_ids


def test_token_bytes_join_to_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    half = tokenizer.encode("🦊", add_special_tokens=False)
    assert len(half) > 1 and tokenizer.token_str(half[0]) == "\ufffd" and len(tokenizer.token_bytes(half[0])) < 4
    assert tokenizer.token_str(2) == "<|im_start|>"
    assert tokenizer.token_bytes(10**6) == b"" and tokenizer.token_bytes(-1) == b""


def test_token_bytes_of_byte_fallback(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_fallback(tmp_path))
    ids = tokenizer.encode("the thin cat 日", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == " the thin cat 日".encode()


def test_eos_ids_come_from_every_file(tmp_path: Path) -> None:
    byte_level(tmp_path)
    assert Tokenizer(tmp_path).eos_token_ids == (3, 0)
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer(tmp_path).eos_token_ids == (0, 3)
    (tmp_path / "config.json").unlink()
    assert Tokenizer(tmp_path).eos_token_ids == (3,)


def test_only_tokenizer_json_is_needed(tmp_path: Path) -> None:
    byte_level(tmp_path)
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        (tmp_path / name).unlink()
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == () and tokenizer.bos_token is None and tokenizer.chat_template is None
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_special_tokens_map_fills_gaps(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert Tokenizer(tmp_path).eos_token == "<|im_end|>"


def test_tokens_named_special_are_special(tmp_path: Path) -> None:
    """A tokenizer.json that lists its EOS as an ordinary token."""
    byte_level(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode([50, 3, 60]) == theirs.decode([50, 3, 60], skip_special_tokens=True)
    assert 3 in tokenizer.special_ids and 2 not in tokenizer.special_ids


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer\.json: no such file"),
        ("tokenizer.json", "{", r"tokenizer\.json: not a tokenizer file"),
        ("tokenizer.json", '{"model": 3}', r"tokenizer\.json: not a tokenizer file"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json: not a JSON object"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template does not parse"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "items need name and template"),
        ("generation_config.json", "nope", r"generation_config\.json: not a JSON object"),
    ],
)
def test_bad_files_are_one_line_errors(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    byte_level(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer(tmp_path).compile_templates()
    assert "\n" not in str(caught.value)


def test_lone_surrogate_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")


def test_a_caller_of_several_ranks_needs_no_torch() -> None:
    code = "import sys, moesaic.opened; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
