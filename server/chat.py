"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.outputs import Delta
from server.endpoint import ChunkWriter, encode, make_job, take
from server.errors import bad_request
from server.generate import Answer, Choice, Job, PromptFacts
from server.logprobs import chat_logprobs, prompt_logprobs
from server.logs import Record
from server.openai import AnswerMessage, ChatChoice, ChatCompletion, ChatMessage, ChatRequest, ToolCall, Usage
from server.params import check_chat, either, sampling_params
from server.service import Service

# A request may not set these through chat_template_kwargs: they have fields of their own.
RESERVED = frozenset({"self", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"})
NAMES = {"logprobs": "top_logprobs", "prompt": "messages"}  # the engine's names of what a chat request calls otherwise

_decoder = msgspec.json.Decoder(ChatRequest)


class ChatCompletions:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: Request) -> Response:
        body, model, request_id = await take(self._service, request, _decoder, check_chat)
        job = await self._job(body, model, request_id)
        return Answer(self._service, job, ChatWriter(job))

    async def _job(self, body: ChatRequest, model: str, request_id: str) -> Job:
        service = self._service
        wanted = either(body.max_completion_tokens, body.max_tokens)
        logprobs = either(body.top_logprobs, 0) if body.logprobs else None
        params = sampling_params(
            body, service.defaults, max_tokens=wanted, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs
        )
        text = render_messages(
            service,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=template_kwargs(body),
        )
        (token_ids,) = await service.encode([text], either(body.add_special_tokens, False), "messages")
        service.check_token_ids(token_ids, "messages")
        token_ids = service.truncate(token_ids, body.truncate_prompt_tokens, body.truncation_side or "left", wanted)
        last = body.messages[-1]
        return make_job(
            service,
            body,
            model,
            request_id,
            [token_ids],
            params,
            NAMES if body.max_completion_tokens is None else {**NAMES, "max_tokens": "max_completion_tokens"},
            answer_id=f"chatcmpl-{request_id}",
            logprobs=bool(body.logprobs),
            echo=[text_of(last, len(body.messages) - 1)] if body.echo and last.role == "assistant" else None,
        )


# ---- messages -----------------------------------------------------------------------------------------------------


def template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """chat_template_kwargs, and what reasoning_effort means to templates that know it."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    return kwargs


def render_messages(
    service: Service,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    kwargs: Mapping[str, Any],
) -> str:
    """The prompt's text. ApiError 400. add_generation_prompt: true unless said otherwise or the last message goes on."""
    goes_on = either(continue_final_message, False)
    if goes_on and add_generation_prompt:
        field = "continue_final_message"
        raise bad_request("continue_final_message and add_generation_prompt cannot both be true", field)
    reserved = RESERVED & kwargs.keys()
    if reserved:
        field = "chat_template_kwargs"
        raise bad_request(f"chat_template_kwargs may not hold {', '.join(sorted(reserved))}", field)
    plain = [message_dict(message, index) for index, message in enumerate(messages)]
    try:
        return service.tokenizer.apply_chat_template(
            plain,
            add_generation_prompt=either(add_generation_prompt, not goes_on),
            continue_final_message=goes_on,
            chat_template=service.config.chat_template,
            **kwargs,
        )
    except (ValueError, TypeError) as error:
        raise bad_request(f"messages: {error}", "messages", "invalid_value") from None


def message_dict(message: ChatMessage, index: int) -> dict[str, Any]:
    """As chat templates want it: content is a text, absent fields are absent, arguments of tool calls are objects."""
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": text_of(message, index)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call, index, place) for place, call in enumerate(message.tool_calls)]
    reasoning = either(message.reasoning, message.reasoning_content)
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    return result


def text_of(message: ChatMessage, index: int) -> str:
    """Parts are joined by line breaks, as vLLM does. Only an assistant that calls tools may have no content."""
    content = message.content
    where = f"messages[{index}].content"
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise bad_request(f"{where} is missing", where, "invalid_value")
    texts = []
    for place, part in enumerate(content):
        if part.type not in ("text", "input_text", "refusal"):
            field = f"{where}[{place}].type"
            raise bad_request(f"{field}: {part.type[:40]!r} is not supported, only text is", field, "invalid_value")
        if part.text is None:
            field = f"{where}[{place}].text"
            raise bad_request(f"{field} is missing", field, "invalid_value")
        texts.append(part.text)
    return "\n".join(texts)


def _tool_call(call: ToolCall, index: int, place: int) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            field = f"messages[{index}].tool_calls[{place}].function.arguments"
            raise bad_request(f"{field} must be a JSON object", field, "invalid_value") from None
    function = {"name": call.function.name, "arguments": arguments or {}}
    return {"id": call.id, "type": call.type or "function", "function": function}


# ---- answers ------------------------------------------------------------------------------------------------------


class ChatWriter(ChunkWriter):
    """Everything of a chunk but its text is rendered once for each choice."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, "chat.completion.chunk")
        choices = range(job.num_choices)
        self._heads = [b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (self._head, i) for i in choices]
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + self._end
        self._begun = [False] * job.num_choices
        self._prompt_shown = not job.return_token_ids

    # ---- streamed ----------------------------------------------------------------------------------------------

    def frames(self, deltas: list[Delta], record: Record) -> bytes:
        heads, tail, begun, plain = self._heads, self._tail, self._begun, self._plain
        parts: list[bytes] = []
        for delta in deltas:
            index = delta.index
            if not begun[index]:
                begun[index] = True
                parts.append(self._opening(index, record))
            if plain and delta.finish_reason is None:
                if delta.text:  # half a character, or the beginning of a stop string, is held back
                    parts += (heads[index], encode(delta.text), tail)
            else:
                parts.append(self._frame(delta, record))
        return b"".join(parts)

    def _opening(self, index: int, record: Record) -> bytes:
        """The first chunk of a choice says who speaks; with echo, a second one repeats the message that goes on."""
        job = self._job
        opening = {"role": "assistant", "content": ""}
        extra = {} if self._prompt_shown else {"prompt_token_ids": job.prompts[0].token_ids}
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
            choice["logprobs"] = chat_logprobs(delta.logprobs, job.tokens_as_ids)
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if job.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._event([choice], record)

    # ---- whole -------------------------------------------------------------------------------------------------

    def whole(self, choices: list[Choice], prompts: list[PromptFacts], total: Usage) -> ChatCompletion:
        job = self._job
        result = ChatCompletion(
            id=job.answer_id,
            created=job.created,
            model=job.model,
            choices=[self._choice(choice) for choice in choices],
            usage=total,
        )
        if job.return_token_ids:
            result.prompt_token_ids = job.prompts[0].token_ids
        if job.prompt_logprobs:
            result.prompt_logprobs = prompt_logprobs(prompts[0].logprobs or [])
        return result

    def _choice(self, choice: Choice) -> ChatChoice:
        job = self._job
        before = job.echo[0] if job.echo is not None else ""
        result = ChatChoice(
            index=choice.index,
            message=AnswerMessage(content=before + "".join(choice.texts)),
            logprobs=chat_logprobs(choice.logprobs, job.tokens_as_ids) if job.logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if job.return_token_ids:
            result.token_ids = choice.token_ids
        return result
