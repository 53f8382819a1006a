"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from front.chat.events import CallArguments, CallBegin, Content, Event, Reasoning, joined
from front.outputs import Delta, PositionLogprobs
from server.api.endpoint import ChunkWriter, Taken, counts, encode, make_job, shown, take
from server.api.generate import Answer, Choice, Job, PromptFacts
from server.api.logprobs import chat_logprobs, prompt_logprobs
from server.api.openai import (
    AnsweredCall,
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Usage,
)
from server.api.params import either, sampling_params
from server.logs import Record
from server.service import Service
from server.taken import GeneratingKind

CONTENT = b'{"content":'
NAMES = {"logprobs": "top_logprobs", "prompt": "messages"}  # the engine's names of what a chat request calls otherwise


class ChatCompletions:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: Request) -> Response:
        return await self._answer(request, "chat")

    async def batch(self, request: Request) -> Response:
        """vLLM's /v1/chat/completions/batch: a choice for each conversation."""
        return await self._answer(request, "batch")

    async def _answer(self, request: Request, kind: GeneratingKind) -> Response:
        taken = await take(self._service, request, kind, ChatRequest)
        names = NAMES
        if taken.body.max_completion_tokens is not None:
            names = {**NAMES, "max_tokens": "max_completion_tokens"}
        job = chat_job(self._service, taken, f"chatcmpl-{taken.request_id}", names)
        return Answer(self._service, job, ChatWriter(job))


def chat_job(service: Service, taken: Taken[ChatRequest], answer_id: str, names: Mapping[str, str]) -> Job:
    """Of every endpoint whose requests become chat requests. names: of fields (from_value_error). ApiError 400."""
    body = taken.body
    wanted = either(body.max_completion_tokens, body.max_tokens)
    logprobs = either(body.top_logprobs, 0) if body.logprobs else None
    params = sampling_params(
        body, service.defaults, max_tokens=wanted, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs
    )
    if taken.prediction:
        params = msgspec.structs.replace(params, prediction_token_ids=tuple(taken.prediction))
    return make_job(
        service,
        taken,
        params,
        names,
        answer_id=answer_id,
        logprobs=bool(body.logprobs),
        echo=taken.texts,
        reasoning=either(body.include_reasoning, True),
    )


# ---- answers ------------------------------------------------------------------------------------------------------


class ChatWriter(ChunkWriter):
    """Everything of a chunk but its text is rendered once for each choice."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, "chat.completion.chunk")
        choices = range(job.num_choices)
        self._heads = [b'data: %b,"choices":[{"index":%d,"delta":%b' % (self._head, i, CONTENT) for i in choices]
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + self._end
        self._begun = [False] * job.num_choices
        self._called = [False] * job.num_choices  # there were calls of tools
        self._prompt_shown = not job.return_token_ids

    def _logprobs(self, positions: list[PositionLogprobs]) -> ChatLogprobs:
        """Where the request has named the alternatives, the token that was drawn is there too, as vLLM has it."""
        job = self._job
        return chat_logprobs(positions, job.tokens_as_ids, bool(job.prompts[0].params.logprob_token_ids))

    # ---- streamed ----------------------------------------------------------------------------------------------

    def frames(self, deltas: list[Delta], record: Record) -> bytes:
        heads, tail, begun, plain = self._heads, self._tail, self._begun, self._plain
        parts: list[bytes] = []
        for delta in deltas:
            index = delta.index
            if not begun[index]:
                begun[index] = True
                parts.append(self._opening(index, record))
            if delta.events is not None:
                parts.append(self._parsed(delta, record))
            elif plain and delta.finish_reason is None:
                if delta.text:  # half a character, or the beginning of a stop string, is held back
                    parts += (heads[index], encode(delta.text), tail)
            else:
                parts.append(self._frame(delta, record))
        return b"".join(parts)

    def _opening(self, index: int, record: Record) -> bytes:
        """The first chunk of a choice says who speaks; with echo, a second one repeats the message that goes on."""
        job = self._job
        opening = {"role": "assistant", "content": ""}
        extra: dict[str, Any] = {} if self._prompt_shown else {"prompt_token_ids": job.prompts[0].token_ids}
        if job.continuous_usage:  # nothing has been generated as far as this chunk tells
            extra["usage"] = counts(record.prompt_tokens, 0)
        self._prompt_shown = True
        frame = self._event(
            [{"index": index, "delta": opening, "logprobs": None, "finish_reason": None}], record, **extra
        )
        if job.echo is not None:
            frame += self._heads[index] + encode(job.echo[0]) + self._tail
        return frame

    def _frame(self, delta: Delta, record: Record) -> bytes:
        job = self._job
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        choice: dict[str, Any] = {"index": delta.index, "delta": content, "logprobs": None}
        if job.logprobs and delta.logprobs:
            choice["logprobs"] = self._logprobs(delta.logprobs)
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if job.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._event([choice], record)

    def _parsed(self, delta: Delta, record: Record) -> bytes:
        """A chunk for each run of events of one kind; with the last one goes what belongs to the step."""
        job, index = self._job, delta.index
        assert delta.events is not None
        contents = [found for found in map(self._content_of, joined(delta.events)) if found]
        self._called[index] |= any(isinstance(event, CallBegin) for event in delta.events)
        if self._plain and delta.finish_reason is None:
            return b"".join([self._heads[index][: -len(CONTENT)] + encode(one) + self._tail[1:] for one in contents])
        chunks = [self._choice_of(index, one) for one in contents or [{}]]
        last = chunks[-1]
        if job.logprobs and delta.logprobs:
            last["logprobs"] = self._logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            last["finish_reason"] = finish_reason(delta.finish_reason, self._called[index], job)
            last["stop_reason"] = delta.stop_reason
        if job.return_token_ids:
            last["token_ids"] = delta.token_ids
        return b"".join([self._event([chunk], record) for chunk in chunks])

    @staticmethod
    def _choice_of(index: int, content: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": content, "logprobs": None, "finish_reason": None}

    def _content_of(self, event: Event) -> dict[str, Any] | None:
        """The delta of a chunk; None: the event is not shown."""
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning": event.text, "reasoning_content": event.text} if self._job.reasoning else None
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        if isinstance(event, CallArguments):
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return None

    # ---- whole -------------------------------------------------------------------------------------------------

    def whole(self, choices: list[Choice], prompts: list[PromptFacts], total: Usage) -> ChatCompletion:
        job = self._job
        result = ChatCompletion(
            id=job.answer_id,
            created=job.created,
            model=job.model,
            choices=[self._choice(choice) for choice in choices],
            usage=shown(total, job),
        )
        if job.return_token_ids and len(job.prompts) == 1:
            result.prompt_token_ids = job.prompts[0].token_ids
        if job.prompt_logprobs:
            result.prompt_logprobs = prompt_logprobs(prompts[0].logprobs or [])
        return result

    def _choice(self, choice: Choice) -> ChatChoice:
        job = self._job
        result = ChatChoice(
            index=choice.index,
            message=self._message(choice),
            logprobs=self._logprobs(choice.logprobs) if job.logprobs else None,
            finish_reason=finish_reason(choice.finish_reason, bool(choice.message.calls), job),
            stop_reason=choice.stop_reason,
        )
        if job.return_token_ids:
            result.token_ids = choice.token_ids
        return result

    def _message(self, choice: Choice) -> AnswerMessage:
        """content is null where an answer is calls, or reasoning, and nothing else; "" where the request named the
        function, as vLLM has it."""
        job, message = self._job, choice.message
        text = (job.echo[choice.index // job.n] if job.echo is not None else "") + "".join(choice.texts)
        shown = text or job.named_tool or not (message.calls or message.reasoning)
        result = AnswerMessage(content=text if shown else None)
        if message.reasoning and job.reasoning:
            result.reasoning = result.reasoning_content = message.reasoning
        if message.calls:
            result.tool_calls = [
                AnsweredCall(call.id, CalledFunction(call.name, call.arguments)) for call in message.calls
            ]
        return result


def finish_reason(reason: str | None, called: bool, job: Job) -> str | None:
    """A choice that stopped behind calls says so; where the request named the function it says "stop", as OpenAI
    does."""
    return "tool_calls" if reason == "stop" and called and not job.named_tool else reason
