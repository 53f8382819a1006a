"""llguidance by its C interface: matchers whose masks are worked out, and which take tokens in, by the threads that
compute the model (native/guides.py). They allow what llguidance.LLMatcher allows, which is what runs without the native
kernels or with another version of the library.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import llguidance

from front.structured.grammar import LIMITS
from front.structured.vocabulary import KEPT_LENGTH, KEPT_TEXTS, GrammarVocabulary
from native import guides

VERSION = "llguidance@1.9."  # the structs below are those of its header
_MARK = b"\xff"  # before a special token
_MOST_FORCED = 4096  # tokens that a grammar makes certain

_POINTER, _SIZE, _WORD = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32


class _TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2."""

    _fields_ = (
        ("struct_size", _SIZE), ("vocab_size", _WORD), ("tok_eos", _WORD), ("token_lens", _POINTER),
        ("token_bytes", ctypes.c_char_p), ("tokenizer_json", ctypes.c_char_p), ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _POINTER), ("use_approximate_greedy_tokenize_fn", ctypes.c_bool), ("tokenize_user_data", _POINTER),
        ("slices", _POINTER), ("tok_eos_extra", _POINTER), ("tok_eos_extra_count", _WORD),
    )  # fmt: skip


class _Limits(ctypes.Structure):
    """LlgParserLimits."""

    _fields_ = (
        ("max_items_in_row", _SIZE), ("initial_lexer_fuel", ctypes.c_uint64), ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", _SIZE), ("max_lexer_states", _SIZE), ("max_grammar_size", _SIZE),
        ("precompute_large_lexemes", ctypes.c_bool), ("verbose_errors", ctypes.c_bool),
    )  # fmt: skip


class _Init(ctypes.Structure):
    """LlgConstraintInit."""

    _fields_ = (
        ("tokenizer", _POINTER), ("log_buffer_level", _WORD), ("log_stderr_level", _WORD),
        ("ff_tokens_ok", ctypes.c_bool), ("backtrack_ok", ctypes.c_bool), ("limits", _Limits),
    )  # fmt: skip


class _Opened:
    """The functions of the library that are used here."""

    def __init__(self, opened: ctypes.CDLL) -> None:
        def found(name: str, result: Any, *arguments: Any) -> Any:
            function = opened[f"llg_{name}"]
            function.restype, function.argtypes = result, arguments
            return function

        words = ctypes.POINTER(_WORD)
        self.version = found("get_version", ctypes.c_char_p)
        self.new_tokenizer = found("new_tokenizer_v2", _POINTER, ctypes.POINTER(_TokenizerInit), ctypes.c_char_p, _SIZE)
        self.free_tokenizer = found("free_tokenizer", None, _POINTER)
        self.new_matcher = found("new_matcher", _POINTER, ctypes.POINTER(_Init), ctypes.c_char_p, ctypes.c_char_p)
        self.clone = found("clone_matcher", _POINTER, _POINTER)
        self.free_matcher = found("free_matcher", None, _POINTER)
        self.error = found("matcher_get_error", ctypes.c_char_p, _POINTER)
        self.is_error = found("matcher_is_error", ctypes.c_bool, _POINTER)
        self.is_stopped = found("matcher_is_stopped", ctypes.c_bool, _POINTER)
        self.reset = found("matcher_reset", ctypes.c_int32, _POINTER)
        self.validate = found("matcher_validate_tokens", ctypes.c_int32, _POINTER, words, _SIZE)
        self.forced = found("matcher_compute_ff_tokens", ctypes.c_int32, _POINTER, words, _SIZE)
        self.for_steps = guides.functions(opened)


@functools.cache
def _library() -> _Opened | None:
    if not guides.can_run():
        return None
    try:
        opened = _Opened(ctypes.CDLL(str(llguidance._lib.__file__)))  # loaded already
    except (AttributeError, OSError):
        return None
    return opened if opened.version().decode().startswith(VERSION) else None


def can_run() -> bool:
    """Whether the library that is installed can be used so."""
    return _library() is not None


class NativeTokenizer:
    """A vocabulary as the library wants it; lives as long as a matcher of it."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        library = _library()
        assert library is not None
        special = frozenset(vocabulary.special_token_ids)
        texts = [
            _MARK + text if token in special and not text.startswith(_MARK) else text
            for token, text in enumerate(vocabulary.tokens)
        ]
        lens = (_WORD * len(texts))(*map(len, texts))
        more = (_WORD * (len(vocabulary.eos_tokens) - 1))(*vocabulary.eos_tokens[1:])
        self._texts = guides.Texts(vocabulary.encode, KEPT_TEXTS, KEPT_LENGTH)
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit), vocab_size=len(texts), tok_eos=vocabulary.eos_tokens[0],
            token_lens=ctypes.addressof(lens), token_bytes=b"".join(texts), tokenize_assumes_string=True,
            tokenize_fn=self._texts.tokenize, tokenize_user_data=self._texts.pointer,
            tok_eos_extra=ctypes.addressof(more) if more else None, tok_eos_extra_count=len(more),
        )  # fmt: skip
        said = ctypes.create_string_buffer(512)
        self.library, self.eos_tokens = library, list(vocabulary.eos_tokens)
        self.pointer = library.new_tokenizer(ctypes.byref(init), said, len(said))
        if not self.pointer:
            raise ValueError(said.value.decode(errors="replace"))

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.library.free_tokenizer(self.pointer)
            self._texts.close()


class NativeMatcher:
    """As llguidance.LLMatcher, as far as a rank uses one."""

    __slots__ = ("_tokenizer", "pointer")

    def __init__(self, tokenizer: NativeTokenizer, pointer: int) -> None:
        self._tokenizer, self.pointer = tokenizer, pointer

    @staticmethod
    def of(tokenizer: NativeTokenizer, text: str) -> NativeMatcher:
        """text: a grammar."""
        names = [name for name, _ in _Limits._fields_]
        init = _Init(tokenizer=tokenizer.pointer, limits=_Limits(**{name: getattr(LIMITS, name) for name in names}))
        pointer = tokenizer.library.new_matcher(ctypes.byref(init), b"llguidance", text.encode())
        return NativeMatcher(tokenizer, pointer)

    def __del__(self) -> None:
        self._tokenizer.library.free_matcher(self.pointer)

    def deep_copy(self) -> NativeMatcher:
        return NativeMatcher(self._tokenizer, self._tokenizer.library.clone(self.pointer))

    @property
    def for_steps(self) -> guides.Library:
        """Whose functions fill masks and take tokens in."""
        return self._tokenizer.library.for_steps

    def is_stopped(self) -> bool:
        return bool(self._tokenizer.library.is_stopped(self.pointer))

    def is_error(self) -> bool:
        return bool(self._tokenizer.library.is_error(self.pointer))

    def get_error(self) -> str:
        said = self._tokenizer.library.error(self.pointer)
        return said.decode(errors="replace") if said else ""

    def reset(self) -> None:
        self._tokenizer.library.reset(self.pointer)

    def consume_tokens(self, tokens: Sequence[int]) -> None:
        guides.Together(self.for_steps).accept([self.pointer], [tokens])

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """How many of them may come, one after another. Nothing changes."""
        return max(0, int(self._tokenizer.library.validate(self.pointer, (_WORD * len(tokens))(*tokens), len(tokens))))

    def compute_ff_tokens(self) -> list[int]:
        """Those that come next for certain."""
        room = (_WORD * _MOST_FORCED)()
        return room[: max(0, self._tokenizer.library.forced(self.pointer, room, _MOST_FORCED))]

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        """The tokens that may come next, written where `size` bytes are."""
        guides.fill_run(self.for_steps, self.pointer, (), pointer, size)

    def compute_masks_of_run(self, pointer: int, size: int, drafts: Sequence[int]) -> None:
        """The masks before, between and behind the drafts, `size` bytes each, one after another. Those behind the end,
        or behind a draft that may not come, stay as they are."""
        guides.fill_run(self.for_steps, self.pointer, drafts, pointer, size)
