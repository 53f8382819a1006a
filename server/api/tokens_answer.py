"""Token ids in and out, as vLLM has it: POST /inference/v1/generate continues token ids and answers with token ids; the
.../render endpoints answer with the body that it takes, instead of continuing a prompt or a conversation."""

from __future__ import annotations

from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from front.outputs import Delta, PositionLogprobs, TokenLogprob
from server.api.chat import NAMES, chat_job
from server.api.completions import completion_job
from server.api.endpoint import ChunkWriter, Taken, make_job, take
from server.api.generate import Answer, Choice, Job, PromptFacts
from server.api.logprobs import bounded, prompt_logprobs
from server.api.openai import ChatRequest, CompletionRequest, Usage
from server.api.params import sampling_params
from server.api.tokens import SAMPLING
from server.logs import Record
from server.service import Service, json_response


class Tokens:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self, request: Request) -> Response:
        taken = await take(self._service, request, "tokens", CompletionRequest)
        body = taken.body
        params = sampling_params(
            body,
            self._service.defaults,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )
        logprobs = body.logprobs is not None
        job = make_job(
            self._service, taken, params, {"prompt": "token_ids"}, answer_id=taken.request_id, logprobs=logprobs
        )
        return Answer(self._service, job, TokensWriter(job))

    async def of_completion(self, request: Request) -> Response:
        taken = await take(self._service, request, "completion", CompletionRequest)
        bodies = _rendered(taken, completion_job(self._service, taken))
        for index, body in enumerate(bodies):
            body["request_id"] += f"-{index}"
        return json_response(bodies)

    async def of_chat(self, request: Request) -> Response:
        return await self._of_chat(request, "chat", "chatcmpl-")

    async def of_messages(self, request: Request) -> Response:
        return await self._of_chat(request, "messages", "msg_")

    async def _of_chat(self, request: Request, kind: Literal["chat", "messages"], prefix: str) -> Response:
        taken = await take(self._service, request, kind, ChatRequest)
        (body,) = _rendered(taken, chat_job(self._service, taken, prefix + taken.request_id, NAMES))
        return json_response(body)


def _rendered(taken: Taken[Any], job: Job) -> list[dict[str, Any]]:
    """Of each prompt the body of a TokensRequest."""
    asked = taken.body
    bodies = []
    for prompt in job.prompts:
        params = {name: getattr(prompt.params, name) for name in sorted(SAMPLING)}
        params["structured_outputs"] = taken.structured_outputs
        params = {name: value for name, value in params.items() if value is not None and value != ()}
        bodies.append(
            {
                "request_id": job.answer_id,
                "token_ids": prompt.token_ids,
                "sampling_params": params,
                "model": job.model,
                "stream": job.stream,
                "stream_options": asked.stream_options,
                "cache_salt": asked.cache_salt,
                "priority": prompt.priority,
            }
        )
    return bodies


class TokensWriter(ChunkWriter):
    def __init__(self, job: Job) -> None:
        super().__init__(job, "")
        self._common = {"request_id": job.answer_id}
        self._first = job.return_token_ids

    def frames(self, deltas: list[Delta], record: Record) -> bytes:
        parts = []
        for delta in deltas:
            extra = {"prompt_token_ids": self._job.prompts[0].token_ids} if self._first else {}
            self._first = False
            choice = self._choice(
                delta.index, delta.token_ids, delta.logprobs or [], delta.finish_reason, delta.stop_reason
            )
            parts.append(self._event([choice], record, **extra))
        return b"".join(parts)

    def whole(self, choices: list[Choice], prompts: list[PromptFacts], total: Usage) -> dict[str, Any]:
        job = self._job
        answer: dict[str, Any] = self._common | {
            "model": job.model,
            "created": job.created,
            "choices": [
                self._choice(one.index, one.token_ids, one.logprobs, one.finish_reason, one.stop_reason)
                for one in choices
            ],
            "usage": total,
            "prompt_logprobs": prompt_logprobs(prompts[0].logprobs or []) if job.prompt_logprobs else None,
        }
        if job.return_token_ids:
            answer["prompt_token_ids"] = job.prompts[0].token_ids
        return answer

    def _choice(
        self,
        index: int,
        token_ids: list[int],
        positions: list[PositionLogprobs],
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> dict[str, Any]:
        content = [_with_top(position) for position in positions] if self._job.logprobs else None
        return {
            "index": index,
            "token_ids": token_ids,
            "logprobs": None if content is None else {"content": content},
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


def _with_top(position: PositionLogprobs) -> dict[str, Any]:
    """The token that was drawn comes first among the others too."""
    chosen = position.chosen
    others = [token for token in position.top if token.token_id != chosen.token_id]
    return {**_entry(chosen), "top_logprobs": [_entry(token) for token in (chosen, *others)]}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token_id": token.token_id, "logprob": bounded(token.logprob)}
