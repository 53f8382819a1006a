"""How long a text one token can stand for: what refuses a text that cannot fit before it is tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from front.text.detokenizer import byte_level_alphabet

# Characters that a normaliser can make one of. The canonical decomposition of a character has at most four (Unicode's
# stability policy), so composing shortens a text to no less than a quarter. Others (NFKC, Strip, Replace by a pattern,
# ...) have no such bound that holds for all texts, or are too rare to be worth one.
_SHRINKING = {"NFC": 4, "NFD": 1, "Prepend": 1}
# These keep every character of the text; others (Whitespace, Split that removes, ...) may leave some out.
_KEEPING = {"ByteLevel", "Digits", "Metaspace"}


class AddedToken(msgspec.Struct):
    content: str = ""
    lstrip: bool = False
    rstrip: bool = False


class Model(msgspec.Struct):
    type: str | None = None
    vocab: Any = None
    byte_fallback: bool = False


class TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that are read here."""

    model: Model = msgspec.field(default_factory=Model)
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: list[AddedToken] = []


def longest_token(file: TokenizerFile) -> int | None:
    """The most characters of a text that one token can stand for.

    None: there is no bound. That is so where unknown or unwanted characters vanish or fuse into one token, and where an
    added token takes the spaces around it along; only BPE that knows every byte is taken.
    """
    vocab = file.model.vocab
    if file.model.type != "BPE" or not isinstance(vocab, Mapping):
        return None
    splits = list(_parts(file.pre_tokenizer, "pretokenizers"))
    byte_level = any(part.get("type") == "ByteLevel" for part in splits)
    knows_bytes = byte_level and all(character in vocab for character in byte_level_alphabet())
    falls_back = file.model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if not (knows_bytes or falls_back):
        return None
    if any(token.lstrip or token.rstrip for token in file.added_tokens):
        return None
    if not all(_keeps(part) for part in splits):
        return None
    shrinking = 1
    for part in _parts(file.normalizer, "normalizers"):
        factor = _SHRINKING.get(str(part.get("type")), 1 if _replaces_space(part) else 0)
        if not factor:
            return None
        shrinking *= factor
    lengths = [len(token) for token in vocab] + [len(token.content) for token in file.added_tokens]
    return shrinking * max(lengths, default=1)


def _parts(value: Mapping[str, Any] | None, key: str) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, or those of a sequence."""
    if value is None:
        return
    if value.get("type") != "Sequence":
        yield value
        return
    for part in value.get(key) or ():
        yield from _parts(part, key)


def _keeps(part: Mapping[str, Any]) -> bool:
    return part.get("type") in _KEEPING or (part.get("type") == "Split" and part.get("behavior") != "Removed")


def _replaces_space(part: Mapping[str, Any]) -> bool:
    """As SentencePiece does: one character for one."""
    return part.get("type") == "Replace" and part.get("pattern") == {"String": " "} and part.get("content") == "▁"
