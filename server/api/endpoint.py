"""What the generating endpoints do alike: from a request's body to its job, and the events that a streamed answer is
made of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec
from starlette.requests import Request

from front.messages import SamplingParams, StructuredOutputsParams
from server.api.generate import Job
from server.api.openai import GenerationRequest, Usage
from server.api.params import either
from server.api.structured import structured_outputs
from server.errors import unavailable
from server.intake import Prompts, unpack
from server.logs import Record
from server.service import Service, record_of

Body = TypeVar("Body", bound=GenerationRequest)
LONG_PROMPT = 4096  # tokens

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Taken(Generic[Body]):
    """body: without its prompt or messages. texts: what echo shows of each prompt; None: nothing."""

    body: Body
    model: str
    request_id: str
    token_id_lists: list[list[int]]
    texts: list[str] | None
    prediction: list[int]
    structured: StructuredOutputsParams | None
    structured_field: str  # which says that


async def take(
    service: Service, request: Request, kind: Literal["completion", "chat"], form: type[Body]
) -> Taken[Body]:
    """form: that of the body. ApiError."""
    found = await service.take(request, kind)
    assert isinstance(found, Prompts)
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
    structured = await structured_outputs(body, service.tokenizer)
    return Taken(body, found.model, name, token_id_lists, found.texts, unpack(found.prediction), *structured)


def make_job(
    service: Service, taken: Taken[Body], params: SamplingParams, names: Mapping[str, str], **shown: Any
) -> Job:
    """names: what fields are called in this request where the engine has another name. shown: other fields of Job.
    ApiError 400."""
    body = taken.body
    if taken.structured is not None:
        params = msgspec.structs.replace(params, structured_outputs=taken.structured)
        names = {**names, "structured_outputs": taken.structured_field}
    options = body.stream_options
    priority, salt = either(body.priority, 0), either(body.cache_salt, "")
    return Job(
        request_id=taken.request_id,
        model=taken.model,
        created=int(time.time()),
        prompts=service.prompts(taken.request_id, taken.token_id_lists, params, priority, salt, names),
        n=params.n,
        stream=either(body.stream, False),
        include_usage=options is not None and either(options.include_usage, False),
        continuous_usage=options is not None and either(options.continuous_usage_stats, False),
        prompt_logprobs=body.prompt_logprobs is not None,
        return_token_ids=either(body.return_token_ids, False),
        tokens_as_ids=either(body.return_tokens_as_token_ids, False),
        **shown,
    )


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
        chunk = self._common | {"choices": choices} | extra
        if self._job.continuous_usage:
            prompt, output = record.prompt_tokens, record.output_tokens
            chunk["usage"] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        elif self._job.include_usage:
            chunk["usage"] = None
        return b"data: %b\n\n" % encode(chunk)

    def usage_frame(self, total: Usage) -> bytes:
        return b"data: %b\n\n" % encode(self._common | {"choices": [], "usage": total})
