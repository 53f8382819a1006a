"""Grammars of a rank: each compiled once, beside the steps; requests that wait for one do so outside of the queue."""

from __future__ import annotations

import encodings.unicode_escape  # noqa: F401  (a vocabulary is read beside requests, and would import it then)
import logging
import threading
from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any

import llguidance

from engine.request import Request
from engine.structured.guide import Guide
from engine.structured.xgrammar_matcher import XgrammarMatcher
from front.messages import TokenOutput
from front.params import Grammar
from front.structured.vocabulary import grammar_limits, grammar_tokenizer
from front.structured.xgrammar_backend import Compiler
from front.text.tokenizer import Tokenizer

log = logging.getLogger("moesaic.rank")

MAX_KEPT = 64  # compiled grammars
LOOK_SECONDS = 0.0005  # a rank whose requests all wait for a grammar looks this often


def failure(request: Request) -> TokenOutput:
    """The last output of a request that cannot go on: its grammar cannot be used, its matcher has failed, or one of its
    logits processors has."""
    if request.error:
        log.error("request %d cannot go on: %s", request.request_id, request.error)
    return TokenOutput(request.request_id, [], "error")


_vocabulary_lock = threading.Lock()


def vocabulary_of(model_path: str, tokenizer_path: str, vocab_size: int) -> llguidance.LLTokenizer:
    """Read once by a process: while it waits to become a rank, or as one, which waits for the end of a reading that has
    begun (engine/process/rank_loop.py)."""
    with _vocabulary_lock:
        return _read_vocabulary(model_path, tokenizer_path, vocab_size)


@lru_cache(maxsize=1)
def _read_vocabulary(model_path: str, tokenizer_path: str, vocab_size: int) -> llguidance.LLTokenizer:
    return grammar_tokenizer(Tokenizer(model_path, tokenizer_path), vocab_size)


class Grammars:
    """Not thread-safe; what takes time is done on a thread of its own."""

    def __init__(self, model_path: str, tokenizer_path: str, vocab_size: int) -> None:
        self._paths, self._vocab_size = (model_path, tokenizer_path), vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")  # it has none before there is work
        self._compiler: Compiler | None = None  # the same, of xgrammar
        self._compiled: OrderedDict[tuple[bool, str], Any] = OrderedDict()  # used on the thread
        self.awaited: dict[int, tuple[Request, Future[Guide]]] = {}

    def warm(self) -> None:
        """Begin to read the vocabulary, so that no request waits for it."""
        self._thread.submit(self._vocabulary)

    def put(self, request: Request) -> bool:
        """Whether the request waits here until its grammar is compiled: it has one."""
        grammar = request.message.params.grammar
        if grammar is None:
            return False
        self.awaited[request.request_id] = request, self._thread.submit(self._guide, grammar)
        return True

    def remove(self, request: Request) -> bool:
        """Whether it waited here."""
        return self.awaited.pop(request.request_id, None) is not None

    def take_ready(self, patient: bool) -> list[Request]:
        """Requests whose grammars have been compiled; those without a guide cannot run. patient: there is nothing else
        to do; wait a moment for one."""
        if patient:
            wait([future for _, future in self.awaited.values()], LOOK_SECONDS, FIRST_COMPLETED)
        ready = []
        for request, future in list(self.awaited.values()):
            if future.done():
                ready.append(request)
                del self.awaited[request.request_id]
                try:
                    request.guide = future.result()
                except ValueError as error:
                    log.error("request %d: its grammar cannot be used: %s", request.request_id, error)
        return ready

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- on the thread ----

    def _vocabulary(self) -> llguidance.LLTokenizer:
        return vocabulary_of(*self._paths, self._vocab_size)

    def _guide(self, grammar: Grammar) -> Guide:
        key = grammar.xgrammar, grammar.text
        if key not in self._compiled:
            self._compiled[key] = self._compile_of_xgrammar(grammar) if grammar.xgrammar else self._compile(grammar)
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        compiled = self._compiled[key]
        if not grammar.xgrammar:
            return Guide(compiled.deep_copy(), self._vocabulary().eos_tokens, grammar.after_token_ids)
        assert self._compiler is not None
        matcher = XgrammarMatcher(self._compiler.matcher(compiled), self._vocab_size)
        return Guide(matcher, self._compiler.ends, grammar.after_token_ids)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        root = llguidance.LLMatcher(self._vocabulary(), grammar.text, log_level=0, limits=grammar_limits())
        root.compute_bitmask()  # the first one is slow
        if root.is_error():
            raise ValueError(root.get_error())
        return root

    def _compile_of_xgrammar(self, grammar: Grammar) -> Any:
        if self._compiler is None:
            self._compiler = Compiler(Tokenizer(*self._paths), self._vocab_size)
        return self._compiler.compile(grammar.text)
