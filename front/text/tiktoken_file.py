"""tiktoken.model, as Kimi and Moonlight have it in place of a tokenizer.json, turned into what a tokenizer.json says.

The file has a line for each token: its bytes in base64, and its rank, which is its id. Two neighbours are merged when
what they make together is a token; the pair of the lowest rank comes first. Which words a text is cut into before that,
and which ids beyond the ranks are special tokens, is said by the model's own Python code, which is not run: what is
known of it is in `_PATTERNS`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from front.text.detokenizer import byte_level_alphabet

NAME = "tiktoken.model"
NUM_RESERVED = 256  # ids after the ranks; those that tokenizer_config.json does not name are <|reserved_token_ID|>

_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_KIMI = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_PATTERNS = {"TikTokenTokenizer": _KIMI}  # tokenizer_class in tokenizer_config.json -> what cuts a text into words


def as_tokenizer_json(path: Path, config: Mapping[str, Any]) -> bytes:
    """path: of tiktoken.model; config: tokenizer_config.json. ValueError names the file and what is wrong."""
    pattern = _PATTERNS.get(str(config.get("tokenizer_class")))
    if pattern is None:
        known = " or ".join(_PATTERNS)
        found = config.get("tokenizer_class")
        raise ValueError(f"{path}: how it cuts a text into words is known for tokenizer_class {known}, not {found!r}")
    ranks = _read(path)
    alphabet = byte_level_alphabet()
    characters = {byte: character for character, byte in alphabet.items()}

    def text(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytes_of_words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return msgspec.json.encode(
        {
            "version": "1.0",
            "added_tokens": list(_special(config, len(ranks))),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_of_words]},
            "decoder": bytes_of_words,
            "model": {
                "type": "BPE",
                "ignore_merges": True,
                "vocab": {text(token): rank for token, rank in ranks.items()},
                "merges": [[text(left), text(right)] for left, right in _merges(ranks)],
            },
        }
    )


def _read(path: Path) -> dict[bytes, int]:
    """Token -> rank; ranks are 0, 1, 2, ... and every single byte has one."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path}: line {number}: expected a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError(f"{path}: expected ranks 0, 1, 2, ... with every single byte among the tokens")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, the lowest rank first."""
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in ranks and right in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _special(config: Mapping[str, Any], first: int) -> Iterator[dict[str, Any]]:
    named = config.get("added_tokens_decoder")
    contents = {int(number): token for number, token in named.items()} if isinstance(named, Mapping) else {}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for number in range(first, first + NUM_RESERVED):
        token = contents.get(number, {})
        yield {**flags, "id": number, "content": f"<|reserved_token_{number}|>", **token}
