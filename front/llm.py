"""Offline generation: prompts in, whole results out, in order. No torch here; moesaic.LLM starts the ranks."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from front.chat.answer import read_messages
from front.chat.families import chosen_families
from front.chat.format import OutputFormat, output_format
from front.chat.thinking import within_budget
from front.collector import Collector
from front.driver import Driver
from front.front import EngineFailed, FrontOutput
from front.messages import BalanceStatus, RankStats
from front.outputs import Delta, Progress, Prompt, RequestOutput
from front.params import SamplingParams
from front.profiling import ANSWER_SECONDS, EVENTS_PER_RANK
from front.prompts import Conversation, Prompts, parameter_schemas, read_conversations, read_prompts
from front.sampling_params import resolve, validate
from front.search.beams import BeamSearchOutput, BeamSearchParams, Search, validate_beams
from front.text.tokenizer import Tokenizer
from front.trace_file import Summary, write_trace
from front.wire import Ranks

Params = SamplingParams | Sequence[SamplingParams] | None

_LOOK_SECONDS = 0.5  # how often a silent engine is asked whether it still lives


class LLM(Driver[Ranks]):
    """One caller at a time. A context manager: leaving it closes the ranks."""

    def __init__(
        self,
        ranks: Ranks,
        tokenizer: Tokenizer,
        *,
        block_size: int = 16,
        max_logprobs: int = 20,
        processors: bool = False,
        logprobs_mode: str = "raw_logprobs",
        defaults: SamplingParams | None = None,
        num_experts: int = 0,
        slots_per_rank: int = 0,
        ready_timeout: float = 600.0,
        silence_timeout: float = 600.0,
    ) -> None:
        """Waits until every rank is ready. num_experts, slots_per_rank: of one layer; they decide which losses are
        survived. processors: the ranks have logits processors. defaults: of calls without parameters; None:
        SamplingParams().

        Timeouts in seconds: for all ranks to be ready, and for the longest silence while requests run.
        TimeoutError, EngineFailed.
        """
        super().__init__(
            ranks, tokenizer, block_size=block_size, num_experts=num_experts, slots_per_rank=slots_per_rank
        )
        self._max_logprobs, self._processors, self._logprobs_mode = max_logprobs, processors, logprobs_mode
        self._defaults = SamplingParams() if defaults is None else defaults
        self._silence_timeout = silence_timeout
        self._request_ids = itertools.count()
        self._collectors: dict[str, Collector] = {}
        self._num_open = self._num_tokens = 0  # choices of the call under way that have not ended, and its tokens
        self._on_delta: Callable[[str, Delta], None] | None = None
        try:
            self._wait_ready(ready_timeout)
        except BaseException:
            self.close()
            raise
        ready = self.front.ready.values()
        self.vocab_size = min(rank.vocab_size for rank in ready)
        self.max_model_len = min(rank.max_model_len for rank in ready)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        progress: Callable[[Progress], None] | None = None,
        on_delta: Callable[[int, Delta], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (text, token ids, or vLLM's mappings of them); one result per prompt, in order.

        sampling_params: one for all, or one per prompt; None: get_default_sampling_params(). use_tqdm draws a bar on
        standard error. progress is called after every batch of outputs, on_delta with each of them as it comes: the
        number of the prompt, and what is new. ValueError names the prompt and what is wrong with it, before anything is
        sent. A lost rank shows as a pause; EngineFailed when all are lost.
        """
        texts, token_ids = self._tokenize(prompts)
        reasoning = chosen_families(self.tokenizer.format_marks, None, None)[1]
        asked = self._prompts(texts, token_ids, sampling_params, reasoning)
        with _shown(use_tqdm, len(asked), progress) as tell:
            return self._run(asked, tell, on_delta)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        use_tqdm: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: messages of role and content, put into the model's chat template.

        sampling_params None: as for `generate`, but answers may be as long as the context has room, which is the
        default of the chat API too.
        An output has its text as the model wrote it, and as `message` its content, reasoning and calls of `tools`
        apart, by the parsers of `moesaic serve`; None: those that the template names, "": none.
        """
        conversations = read_conversations(messages)
        texts = [
            self.tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        marks = self.tokenizer.format_marks if chat_template is None else chat_template
        families = chosen_families(marks, tool_call_parser, reasoning_parser)
        schemas = parameter_schemas(tools) if tools else None
        token_ids = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        formats = []
        for conversation, text in zip(conversations, texts, strict=True):
            goes_on = str(conversation[-1].get("content") or "") if continue_final_message else None
            formats.append(output_format(families, schemas, text, goes_on))
        if sampling_params is None:
            sampling_params = msgspec.structs.replace(self._defaults, max_tokens=None)
        prompts = self._prompts(texts, token_ids, sampling_params, families[1], formats)
        with _shown(use_tqdm, len(prompts), progress) as tell:
            results = self._run(prompts, tell)
        for prompt, format, result in zip(prompts, formats, results, strict=True):
            if format is not None:
                read_messages(self.tokenizer, format, prompt.params, result)
        return results

    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The beam_width best outputs of each prompt, the best first. ValueError, EngineFailed as `generate`."""
        validate_beams(params, self._logprobs_mode)
        texts, token_ids = self._tokenize(prompts)
        own = SamplingParams(
            max_tokens=params.max_tokens, n=params.beam_width, stop_token_ids=params.stop_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )  # fmt: skip
        asked = self._prompts(texts, token_ids, own, "")
        searches = [Search(prompt, params, self.tokenizer.eos_token_ids) for prompt in asked]
        while following := [prompt for search in searches for prompt in search.prompts()]:
            results = self._run(following, None)
            for search in searches:
                search.take_results(results)
        return [search.output(self.tokenizer) for search in searches]

    def get_tokenizer(self) -> Tokenizer:
        """encode, decode, and apply_chat_template, which gives a text."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Of calls that bring none: what the model's makers recommend, unless `generation_config` is "vllm"."""
        return self._defaults

    def start_profile(self, path: str | Path, capacity: int = EVENTS_PER_RANK) -> list[int]:
        """As Driver.start_profile; ValueError is all that it raises."""
        self._catch_up()
        return super().start_profile(Path(path), capacity)

    def stop_profile(self) -> Summary:
        """Write it, as JSON that ui.perfetto.dev and chrome://tracing open. A rank lost meanwhile is missing from it.

        ValueError: none is being taken; OSError.
        """
        self._catch_up()
        profiling = self.front.profiling
        messages = profiling.stop()
        try:
            for rank, message in messages:
                self._send(rank, message)
            deadline = time.monotonic() + ANSWER_SECONDS
            while not profiling.complete and self.front.failed is None and time.monotonic() < deadline:
                self._take(_LOOK_SECONDS)
        finally:  # also after an interrupt another one may begin
            profile = profiling.finish()
        return write_trace(profile)

    def close(self) -> None:
        """Close the ranks. May be called again."""
        if not self._closed:
            self._closed = True
            self._ranks.close()

    def stats(self) -> list[RankStats]:
        """The latest of every rank, in rank order."""
        return self.front.stats

    @property
    def balance(self) -> BalanceStatus | None:
        """What the leading rank last said about the experts' load; None: nothing yet, or experts are not balanced."""
        return self.front.balance

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- prompts ----

    def _tokenize(self, prompts: Prompts) -> tuple[Sequence[str | None], Sequence[Sequence[int]]]:
        """The text of each prompt that has one, and its token ids."""
        texts, given = read_prompts(prompts)
        unknown = [text for text, ids in zip(texts, given, strict=True) if ids is None and text is not None]
        made = iter(self.tokenizer.encode_batch(unknown))
        return texts, [next(made) if ids is None else ids for ids in given]

    def _prompts(
        self,
        texts: Sequence[str | None],
        token_ids: Sequence[Sequence[int]],
        params: Params,
        reasoning: str,
        formats: Sequence[OutputFormat | None] = (),
    ) -> list[Prompt]:
        """reasoning: its family. formats: how outputs are read; (): not at all."""
        if params is None or isinstance(params, SamplingParams):
            each = [params or self._defaults] * len(texts)
        else:
            each = list(params)
            if len(each) != len(texts):
                raise ValueError(
                    f"sampling_params must be one for all or one per prompt: {len(each)} for {len(texts)} prompts"
                )
            wrong = next((own for own in each if not isinstance(own, SamplingParams)), None)
            if wrong is not None:
                raise ValueError(f"sampling_params must be SamplingParams, not {type(wrong).__name__}")
        prompts = []
        for place, (text, ids, own) in enumerate(zip(texts, token_ids, each, strict=True)):
            try:
                if not place or own is not each[place - 1]:
                    validate(own, self.vocab_size, self._max_logprobs, self._processors)
                prompt = self._prompt(text, list(ids), own)
                format = formats[place] if formats else None
                prompt.params = within_budget(prompt.params, self.tokenizer, reasoning, format, prompt.token_ids)
                prompts.append(prompt)
            except ValueError as error:
                where = f"prompt {place}: " if len(texts) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        return prompts

    def _prompt(self, text: str | None, token_ids: list[int], params: SamplingParams) -> Prompt:
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token ids must be integers from 0 to {self.vocab_size - 1}, not {token_id!r}")
        resolved = resolve(params, self.tokenizer, len(token_ids), self.max_model_len)
        return Prompt(request_id=str(next(self._request_ids)), token_ids=token_ids, params=resolved, text=text)

    # ---- running ----

    def _run(
        self,
        prompts: list[Prompt],
        progress: Callable[[Progress], None] | None,
        on_delta: Callable[[int, Delta], None] | None = None,
    ) -> list[RequestOutput]:
        self._catch_up()
        if self.front.failed is not None:
            raise EngineFailed(self.front.failed)
        collectors = self._collectors = {prompt.request_id: Collector(prompt) for prompt in prompts}
        self._num_open, self._num_tokens = len(prompts), 0
        numbers = {prompt.request_id: number for number, prompt in enumerate(prompts)}
        self._on_delta = None if on_delta is None else lambda name, delta: on_delta(numbers[name], delta)
        try:
            for prompt in prompts:
                for rank, message in self.front.add(prompt):
                    self._send(rank, message)
            while self._num_open:
                self._receive()
                if self.front.failed is not None:
                    raise EngineFailed(self.front.failed)
                if progress is not None:
                    progress(Progress(len(prompts) - self._num_open, len(prompts), self._num_tokens))
        except BaseException:  # KeyboardInterrupt too: nothing of this call may go on running
            self._abort_all()
            raise
        self.front.take_finished()
        return [collectors[prompt.request_id].output() for prompt in prompts]

    def _catch_up(self) -> None:
        """Take what has happened since the last call."""
        if self._closed:
            raise EngineFailed("the engine is closed")
        self._take(0.0)
        self._look()

    def _wait_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self.front.members.started:
            self._take(_LOOK_SECONDS)
            if self.front.failed is not None:
                raise EngineFailed(self.front.failed)
            if not self.front.members.started and time.monotonic() > deadline:
                raise self._not_ready(timeout)

    def _receive(self) -> None:
        """Do what comes, at least one message; EngineFailed when all are silent for too long."""
        deadline = time.monotonic() + self._silence_timeout
        while not self._take(_LOOK_SECONDS):
            self._look()
            if time.monotonic() > deadline:
                raise EngineFailed(f"no rank has sent anything for {self._silence_timeout:g} s")

    def _do(self, work: FrontOutput) -> None:
        for request_id, delta in work.deltas:
            collector = self._collectors.get(request_id)
            if collector is not None:
                collector.add(delta)
                if self._on_delta is not None:
                    self._on_delta(request_id, delta)
                self._num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._num_open -= collector.finished
        for rank, message in work.messages:
            self._send(rank, message)

    def _cut_off(self, error: str) -> None:
        raise EngineFailed(error) from None

    def _abort_all(self) -> None:
        self._collectors = {}
        works = [self.front.abort(request_id) for request_id in self.front.request_ids]
        self.front.take_finished()
        try:
            for work in works:
                self._do(work)
        except EngineFailed:
            pass  # that error is on its way already, or the next call meets it


@contextlib.contextmanager
def _shown(
    use_tqdm: bool, num_prompts: int, progress: Callable[[Progress], None] | None
) -> Iterator[Callable[[Progress], None] | None]:
    """Whom progress is told to: the caller's function, or a bar, whose library is imported only when one is drawn."""
    if not isinstance(use_tqdm, bool):  # vLLM takes classes of bars, too
        raise ValueError(f"use_tqdm must be True or False, not {use_tqdm!r:.100}; progress= takes a function")
    if not use_tqdm:
        yield progress
        return
    if progress is not None:
        raise ValueError("use_tqdm and progress: give one of them")
    with importlib.import_module("front.bar").drawn(num_prompts) as draw:
        yield draw
