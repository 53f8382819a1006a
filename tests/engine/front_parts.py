"""Tokenizers, a fake set of ranks and other parts that the tests of the front share."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import time
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from front.messages import (
    Abort,
    AddRequest,
    FrontToRank,
    Joined,
    Logprobs,
    Membership,
    NoneLeft,
    Outputs,
    RankFailed,
    RankLost,
    RankReady,
    RankStats,
    RankToFront,
    TokenOutput,
)
from front.text.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|bos|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "Once upon a time there was a little fox who lived in a hollow tree.",
    'The fox said: "Good morning, tree!" and the tree said nothing, as trees do.',
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
    "Der süße Kuchen schmeckt über alle Maßen gut. Ça va? Où est la forêt?",
    "日本語の文章もあります。漢字とひらがな。 🎉🎉 👩‍👩‍👧",
    "Numbers: 0 1 2 3 10 100 1000 3.14159 1,000,000\t\ttabs   and   spaces  ",
] * 4


def byte_level(directory: Path) -> Path:
    """A byte-level BPE, as DeepSeek and Qwen have, small enough that most characters are several tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    return _save(directory, tokenizer)


def byte_fallback(directory: Path) -> Path:
    """As Llama 2 has it: a SentencePiece BPE with byte fallback, whose decoder drops the first space."""
    vocab = {token: place for place, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for token in ["▁", "▁▁", *"abcdefghijklmnopqrstuvwxyz.é", "th", "▁t", "▁th", "in", "▁a", "▁s", "er"]:
        vocab.setdefault(token, len(vocab))
    merges = [("t", "h"), ("▁", "t"), ("▁t", "h"), ("i", "n"), ("▁", "a"), ("▁", "s"), ("e", "r"), ("▁", "▁")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(directory, tokenizer)


def word_pieces(directory: Path) -> Path:
    """A decoder that no table can stand for."""
    vocab = {token: place for place, token in enumerate([*SPECIAL, "[UNK]", *"abcdef", *(f"##{c}" for c in "abcdef")])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _save(directory, tokenizer)


def _save(directory: Path, tokenizer: tokenizers.Tokenizer) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "pad_token": "<|endoftext|>",
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 0]}))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return directory


@functools.cache
def small_tokenizer() -> Tokenizer:
    """The byte-level one, made once."""
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(byte_level(Path(directory)))


class FakeRanks:
    """A fake of front.wire.Ranks: every sequence gets the tokens of `script`, one per receive, the last one with EOS.

    It has a descriptor that is readable while messages wait, as ZmqRanks has.
    """

    def __init__(self, size: int, script: list[int]) -> None:
        self.size = size
        self.script = script
        self.sent: list[tuple[int, FrontToRank]] = []
        self.closed = False
        self.paused = False
        self.queue: list[RankToFront] = [ready(rank) for rank in range(size)]
        self._running: dict[int, tuple[int, AddRequest, int]] = {}  # id -> rank, message, tokens sent
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.knock()

    def fileno(self) -> int:
        return self._reader

    def knock(self) -> None:
        os.write(self._writer, b"x")

    def send(self, rank: int, message: FrontToRank) -> None:
        self.sent.append((rank, message))
        if isinstance(message, AddRequest):
            self._running[message.request_id] = (rank, message, len(message.token_ids) - message.prompt_len)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._running.pop(request_id, None)
        elif isinstance(message, Membership):
            serves = Joined(
                rank=rank, epoch=message.epoch, agree_seconds=0.0, repair_seconds=0.0, experts_loaded=0, bytes_read=0
            )
            self.queue.append(serves)
        self.knock()

    def fail(self, rank: int, error: str) -> None:
        self.queue.append(RankFailed(rank, error))
        self.knock()

    def none_left(self, reason: str) -> None:
        self.queue.append(NoneLeft(reason))
        self.knock()

    def lose(self, rank: int, reason: str = "killed") -> None:
        """As the supervisor tells it."""
        for request_id in [number for number, (own, _, _) in self._running.items() if own == rank]:
            del self._running[request_id]
        self.queue.append(RankLost(rank, reason, time.monotonic(), 1))
        self.knock()

    def receive(self, timeout: float) -> list[RankToFront]:
        queue, self.queue = self.queue, []
        if not self.paused:
            for rank in range(self.size):
                outputs = self._step(rank)
                if outputs:
                    queue.append(Outputs(rank, outputs, RankStats(running=len(self._running)), time.monotonic()))
        if timeout == 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 65536)
            if self._running and not self.paused:
                self.knock()
        elif not queue:
            time.sleep(min(timeout, 0.01))
        return queue

    def _step(self, rank: int) -> list[TokenOutput]:
        outputs = []
        for request_id, (own, message, num_sent) in list(self._running.items()):
            if own != rank:
                continue
            limit = min(len(self.script), message.params.max_tokens or 0)
            end = min(num_sent + 1, limit)
            token_ids = self.script[num_sent:end]
            reason = None
            if end == limit:
                reason = "stop" if token_ids[-1] in message.eos_token_ids else "length"
                del self._running[request_id]
            else:
                self._running[request_id] = (own, message, end)
            wants = message.params.logprobs is not None
            logprobs = [Logprobs([token, token, 5], [-0.5, -0.5, -2.0], 1) for token in token_ids] if wants else None
            outputs.append(TokenOutput(request_id, token_ids, reason, None, logprobs))
        return outputs

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        os.close(self._reader)
        os.close(self._writer)


def ready(rank: int, process: int = 1) -> RankReady:
    return RankReady(
        rank=rank,
        num_blocks=64,
        block_size=16,
        max_model_len=256,
        vocab_size=small_tokenizer().vocab_size,
        load_seconds=0.1,
        bytes_read=1,
        process=process,
    )
