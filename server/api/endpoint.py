"""What the generating endpoints do alike: from a request's body to its job, and the events that a streamed answer is
made of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request

from front.chat.format import OutputFormat
from front.params import SamplingParams, StructuredOutputsParams
from server.api.generate import Job
from server.api.messages import MessagesRequest
from server.api.openai import GenerationRequest, StreamOptions, Usage
from server.api.params import beam_params, either
from server.api.responses import ResponsesRequest
from server.api.structured import structured_outputs
from server.errors import ApiError, bad_request, unavailable
from server.logs import Record
from server.service import Service, record_of
from server.taken import GeneratingKind, Prompts, unpack

Body = TypeVar("Body", bound=GenerationRequest)
LONG_PROMPT = 4096  # tokens
RANK_HEADER = "X-data-parallel-rank"
DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


class Taken(Struct, Generic[Body]):
    """body: without its prompt or messages. texts: what echo shows of each prompt; None: nothing."""

    body: Body
    model: str
    request_id: str
    token_id_lists: list[list[int]]
    texts: list[str] | None
    prediction: list[int]
    format: OutputFormat | None
    named_tool: bool
    structured_outputs: StructuredOutputsParams | None
    structured_field: str  # which says that
    source: ResponsesRequest | MessagesRequest | None  # what became this body
    items: bytes
    rank: int | None  # that is to compute it


async def take(
    service: Service, request: Request, kind: GeneratingKind, form: type[Body], earlier: bytes = b""
) -> Taken[Body]:
    """form: that of the body. earlier: items of the conversation before it (/v1/responses). ApiError."""
    found = await service.take(request, kind, earlier)
    assert isinstance(found, Prompts)
    record_of(request.scope).ignored = found.ignored
    service.require_ready()
    if found.token_ids is None:
        raise unavailable("the ranks began to serve just now; try again")
    token_id_lists = []
    for packed in found.token_ids:
        token_id_lists.append(unpack(packed))
        if len(token_id_lists[-1]) > LONG_PROMPT:
            await asyncio.sleep(0)  # others may have their turn
    body = found.completion or found.chat
    assert isinstance(body, form)
    name = either(body.request_id, record_of(request.scope).request_id)
    structured, field = await structured_outputs(
        body, found.structured_outputs, found.format, service.tokenizer, service.config.structured_outputs_backend
    )
    return Taken(
        body=body,
        model=found.model,
        request_id=name,
        token_id_lists=token_id_lists,
        texts=found.texts,
        prediction=unpack(found.prediction),
        format=found.format,
        named_tool=found.named_tool,
        structured_outputs=structured,
        structured_field=field,
        source=found.responses or found.messages,
        items=found.items,
        rank=wanted_rank(service, request),
    )


def wanted_rank(service: Service, request: Request) -> int | None:
    """What vLLM's header says; None: it is not there. ApiError 400."""
    text = request.headers.get(RANK_HEADER)
    if text is None:
        return None
    last = service.engine.members.count - 1
    if len(text) > 4 or not text.isascii() or not text.isdigit() or int(text) > last:
        raise bad_request(
            f"{RANK_HEADER} must be a rank of this server, from 0 to {last}, not {text[:32]!r}", RANK_HEADER
        )
    return int(text)


def make_job(
    service: Service, taken: Taken[Body], params: SamplingParams, names: Mapping[str, str], **shown: Any
) -> Job:
    """names: what fields are called in this request where the engine has another name. shown: other fields of Job.
    ApiError 400."""
    body = taken.body
    if taken.structured_outputs is not None:
        params = msgspec.structs.replace(params, structured_outputs=taken.structured_outputs)
        names = {**names, "structured_outputs": taken.structured_field}
    beams = beam_params(body, params, service.plan.logprobs_mode)
    if beams is not None:  # what the model recommends is of draws
        params = msgspec.structs.replace(params, repetition_penalty=1.0, min_tokens=0)
    options = body.stream_options or StreamOptions()
    forced = service.config.enable_force_include_usage
    include_usage = forced or either(options.include_usage, False)
    priority, salt = either(body.priority, 0), either(body.cache_salt, "")
    prompts = service.prompts(taken.request_id, taken.token_id_lists, params, priority, salt, names, taken.format)
    for prompt in prompts:
        prompt.rank = taken.rank
    return Job(
        request_id=taken.request_id,
        model=taken.model,
        created=int(time.time()),
        prompts=prompts,
        n=params.n,
        stream=either(body.stream, False),
        include_usage=include_usage,
        usage_details=service.config.enable_prompt_tokens_details,
        continuous_usage=include_usage and (forced or either(options.continuous_usage_stats, False)),
        prompt_logprobs=body.prompt_logprobs is not None,
        return_token_ids=either(body.return_token_ids, False),
        tokens_as_ids=either(body.return_tokens_as_token_ids, service.config.return_tokens_as_token_ids),
        named_tool=taken.named_tool,
        beams=beams,
        **shown,
    )


def counts(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def shown(total: Usage, job: Job) -> Usage:
    """With its details, unless the server is to leave them out."""
    return total if job.usage_details else Usage(total.prompt_tokens, total.completion_tokens, total.total_tokens)


class ChunkWriter:
    """What every event of a streamed answer repeats, rendered once. `_plain`: a chunk holds nothing but its text."""

    def __init__(self, job: Job, kind: str) -> None:
        """kind: the `object` of a chunk."""
        self._job = job
        self._common = {"id": job.answer_id, "object": kind, "created": job.created, "model": job.model}
        self._head = encode(self._common)[:-1]
        self._end = b',"usage":null}\n\n' if job.include_usage else b"}\n\n"
        self._plain = not (job.logprobs or job.return_token_ids or job.continuous_usage)

    def _event(self, choices: list[dict[str, Any]], record: Record, **extra: Any) -> bytes:
        """extra: other fields, also in the place of the usage."""
        chunk = self._common | {"choices": choices} | extra
        if "usage" not in extra and self._job.continuous_usage:
            prompt, output = record.prompt_tokens, record.output_tokens
            chunk["usage"] = counts(prompt, output)
        elif "usage" not in extra and self._job.include_usage:
            chunk["usage"] = None
        return b"data: %b\n\n" % encode(chunk)

    def end(self, total: Usage, record: Record) -> bytes:
        if not self._job.include_usage:
            return DONE
        return b"data: %b\n\n%b" % (encode(self._common | {"choices": [], "usage": shown(total, self._job)}), DONE)

    def failed(self, error: ApiError) -> bytes:
        return b"data: %b\n\n%b" % (error.body(), DONE)
