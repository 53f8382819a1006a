"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from front.outputs import Delta, PositionLogprobs
from server.api.endpoint import ChunkWriter, Taken, encode, make_job, shown, take
from server.api.generate import Answer, Choice, Job, PromptFacts
from server.api.logprobs import completion_logprobs, prompt_logprobs
from server.api.openai import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from server.api.params import either, sampling_params
from server.logs import Record
from server.service import Service

DEFAULT_MAX_TOKENS = 16


class Completions:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: Request) -> Response:
        taken = await take(self._service, request, "completion", CompletionRequest)
        job = completion_job(self._service, taken)
        return Answer(self._service, job, CompletionWriter(self._service, job))


def completion_job(service: Service, taken: Taken[CompletionRequest]) -> Job:
    """ApiError 400."""
    body = taken.body
    wanted = either(body.max_tokens, DEFAULT_MAX_TOKENS)
    echo = either(body.echo, False)
    echo_logprobs = echo and body.logprobs is not None
    params = sampling_params(
        body,
        service.defaults,
        max_tokens=1 if wanted == 0 else wanted,
        logprobs=body.logprobs,
        prompt_logprobs=either(body.prompt_logprobs, body.logprobs if echo_logprobs else None),
    )
    return make_job(
        service,
        taken,
        params,
        {},
        answer_id=f"cmpl-{taken.request_id}",
        logprobs=body.logprobs is not None,
        echo=taken.texts,
        echo_logprobs=echo_logprobs,
        no_output=wanted == 0,
    )


class CompletionWriter(ChunkWriter):
    """Everything of a chunk but its text is rendered once for each choice."""

    def __init__(self, service: Service, job: Job) -> None:
        super().__init__(job, "text_completion")
        self._tokenizer = service.tokenizer
        self._heads = [b'data: %b,"choices":[{"index":%d,"text":' % (self._head, i) for i in range(job.num_choices)]
        self._tail = b',"logprobs":null,"finish_reason":null}]' + self._end
        self._begun = [job.echo is None and not job.return_token_ids] * job.num_choices
        self._offsets = [0] * job.num_choices
        self._prompt_positions: dict[int, list[PositionLogprobs | None]] = {}

    # ---- streamed ----------------------------------------------------------------------------------------------

    def frames(self, deltas: list[Delta], record: Record) -> bytes:
        heads, tail, begun, plain = self._heads, self._tail, self._begun, self._plain
        parts: list[bytes] = []
        for delta in deltas:
            if plain and delta.finish_reason is None and begun[delta.index]:
                if delta.text:  # half a character, or the beginning of a stop string, is held back
                    parts += (heads[delta.index], encode(delta.text), tail)
            else:
                parts.append(self._frame(delta, record))
        return b"".join(parts)

    def _frame(self, delta: Delta, record: Record) -> bytes:
        job = self._job
        prompt = delta.index // job.n
        first = not self._begun[delta.index]
        self._begun[delta.index] = True
        if delta.prompt_logprobs is not None:
            self._prompt_positions[prompt] = delta.prompt_logprobs
        text = delta.text
        if first and job.echo is not None:
            text = job.echo[prompt] + text
        choice: dict[str, Any] = {"index": delta.index, "text": text, "logprobs": None}
        if job.logprobs:
            positions: list[PositionLogprobs | None] = list(delta.logprobs or ())
            if first and job.echo_logprobs:
                positions = self._prompt_positions.get(prompt, []) + positions
            choice["logprobs"] = self._logprobs(positions, prompt, text, self._offsets[delta.index])
            self._offsets[delta.index] += len(text)
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if job.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = job.prompts[prompt].token_ids
        return self._event([choice], record)

    # ---- whole -------------------------------------------------------------------------------------------------

    def whole(self, choices: list[Choice], prompts: list[PromptFacts], total: Usage) -> Completion:
        job = self._job
        return Completion(
            id=job.answer_id,
            created=job.created,
            model=job.model,
            choices=[self._choice(choice, choice.index // job.n, prompts) for choice in choices],
            usage=shown(total, job),
        )

    def _choice(self, choice: Choice, prompt: int, prompts: list[PromptFacts]) -> CompletionChoice:
        job = self._job
        positions: list[PositionLogprobs | None] = list(choice.logprobs)
        if job.echo_logprobs:
            positions = (prompts[prompt].logprobs or []) + positions
        text = (job.echo[prompt] if job.echo is not None else "") + "".join(choice.texts)
        result = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._logprobs(positions, prompt, text, 0) if job.logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if job.return_token_ids:
            result.token_ids = choice.token_ids
            result.prompt_token_ids = job.prompts[prompt].token_ids
        if job.prompt_logprobs:
            result.prompt_logprobs = prompt_logprobs(prompts[prompt].logprobs or [])
        return result

    def _logprobs(
        self, positions: list[PositionLogprobs | None], prompt: int, text: str, offset: int
    ) -> CompletionLogprobs:
        asked = self._job.prompts[prompt]
        first = asked.token_ids[0], self._tokenizer.token_str(asked.token_ids[0])
        hidden = self._tokenizer.special_ids if asked.params.skip_special_tokens else ()
        return completion_logprobs(positions, first, text, offset, self._job.tokens_as_ids, hidden)
