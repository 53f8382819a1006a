"""Tokens back into text, one step at a time, and the search for stop strings in it.

Two ways, chosen by the tokenizer's decoder:

- A *table* of bytes per token, for the decoders that only join bytes: byte-level BPE (DeepSeek, Qwen, Llama 3) and
  SentencePiece style with byte fallback (Llama 2), and words with no decoder at all. One lookup per token.
- A *window* for every other decoder: the tokens since the last clean cut are decoded together with those before them.

The pieces joined equal the decoding of all output tokens at once, with three exceptions, all on purpose. (1) A leading
space that the decoder drops only at the start of a text is kept when a visible prompt stands before the output. (2)
With byte fallback, a run of byte tokens that is not valid UTF-8 keeps its valid characters here; `tokenizers` turns the
whole run into U+FFFD. (3) Window decoders that look further back than one cut.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of the GPT-2 byte-level alphabet: printable Latin-1 stands for itself, the rest for U+0100
    and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


class TokenTable:
    """Bytes and text of every token, filled as tokens are first seen. `strips_start`: a text loses one leading
    space."""

    __slots__ = ("_bytes", "_hiding", "_of", "shown", "special", "strips_start", "visible")

    def __init__(
        self, size: int, bytes_of: Callable[[int], bytes], special: frozenset[int], strips_start: bool
    ) -> None:
        self._bytes: list[bytes | None] = [None] * size
        self._of = bytes_of
        self.special = special
        self.strips_start = strips_start
        # Text of a token that is whole UTF-8 by itself; None: not seen yet, or not whole. First list: special ones
        # hidden.
        self.visible: list[str | None] = [None] * size
        self.shown: list[str | None] = [None] * size
        for token_id in special:
            if token_id < size:
                self.visible[token_id] = ""
        self._hiding: dict[frozenset[int], TokenTable] = {special: self}

    def hiding(self, hidden: frozenset[int]) -> TokenTable:
        """The table in which only these of the special tokens are; kept, as few such sets are ever asked for."""
        if not hidden:  # nothing is skipped: `shown` is read
            return self
        if hidden not in self._hiding:
            self._hiding[hidden] = TokenTable(len(self._bytes), self._of, hidden, self.strips_start)
        return self._hiding[hidden]

    def bytes_of(self, token_id: int) -> bytes:
        """Raw bytes; b"" for an id outside the vocabulary."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._of(token_id)
            text, used = utf_8_decode(known, "ignore", False)
            if used == len(known) and text.encode() == known:
                self.shown[token_id] = text
                if token_id not in self.special:
                    self.visible[token_id] = text
        return known


class TableDetokenizer:
    """Incremental decoding by table. `push` returns the text that is certain; `finish` what is left."""

    __slots__ = ("_pending", "_skip_special", "_strip", "_table", "_texts")

    def __init__(self, table: TokenTable, skip_special_tokens: bool, at_start: bool) -> None:
        self._table = table
        self._texts = table.visible if skip_special_tokens else table.shown
        self._skip_special = skip_special_tokens
        self._pending = b""  # the start of a character whose end has not come
        self._strip = at_start and table.strips_start

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and not self._pending and not self._strip:
            token_id = token_ids[0]
            if 0 <= token_id < len(self._texts):
                text = self._texts[token_id]
                if text is not None:
                    return text
        return self._push_bytes(token_ids)

    def _push_bytes(self, token_ids: Sequence[int]) -> str:
        table = self._table
        hidden = table.special if self._skip_special else frozenset()
        data = self._pending + b"".join([table.bytes_of(token_id) for token_id in token_ids if token_id not in hidden])
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._stripped(text)

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            if text[0] == " ":
                return text[1:]
        return text

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return self._stripped(text)


class WindowDetokenizer:
    """Incremental decoding with any decoder: decode(before + new) minus decode(before)."""

    __slots__ = ("_before", "_before_text", "_decode", "_new", "_sent")

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._before = list(context)
        self._before_text = decode(self._before) if self._before else ""
        self._new: list[int] = []
        self._sent = len(self._before_text)  # characters of decode(before + new) that are out

    def push(self, token_ids: Sequence[int]) -> str:
        self._new.extend(token_ids)
        text = self._decode(self._before + self._new)
        if text.endswith(REPLACEMENT) and len(self._new) < 16:  # perhaps half a character; 16 tokens of it are not
            return ""
        piece = text[self._sent :]
        if piece:
            self._before = self._new
            self._new = []
            self._before_text = self._decode(self._before)
            self._sent = len(self._before_text)
        return piece

    def finish(self) -> str:
        piece = self._decode(self._before + self._new)[self._sent :]
        self._new = []
        self._sent = len(self._before_text)
        return piece


Detokenizer = TableDetokenizer | WindowDetokenizer


class StopStrings:
    """Finds the stop string that is complete first, whatever pieces the text comes in; of two that end together, the
    longer.

    Text that may yet become a stop string is held back.
    """

    __slots__ = ("_firsts", "_held", "_include", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, stops))
        self._firsts = tuple({stop[0] for stop in stops})
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, look: bool) -> str:
        """The text that may go out now. look False: a stop string completed by this text does not count (min_tokens).

        When one is found, `found` is set, the text up to it (with it, if included) is returned, and no more may be
        pushed.
        """
        held = len(self._held)
        text = self._held + text
        if look:
            end = len(text) + 1
            start = 0
            for stop in self._stops:
                # Not before this text: what the held part completes was already allowed to pass.
                at = text.find(stop, max(0, held - len(stop) + 1))
                if at >= 0 and (at + len(stop), at) < (end, start):
                    end, start = at + len(stop), at
                    self.found = stop
            if self.found is not None:
                self._held = ""
                return text[:end] if self._include else text[:start]
        keep = self._partial(text)
        self._held = text[keep:]
        return text[:keep]

    def _partial(self, text: str) -> int:
        """Where the longest suffix begins that is the beginning of a stop string, and not the whole of it."""
        first = max(0, len(text) - self._longest + 1)
        candidates = []
        for character in self._firsts:
            at = text.find(character, first)
            while at >= 0:
                candidates.append(at)
                at = text.find(character, at + 1)
        for at in sorted(candidates):
            suffix = text[at:]
            if any(len(suffix) < len(stop) and stop.startswith(suffix) for stop in self._stops):
                return at
        return len(text)

    def finish(self) -> str:
        held = self._held
        self._held = ""
        return held
