"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.outputs import Delta, PositionLogprobs
from server.errors import ApiError, bad_request
from server.generate import Answer, Choice, Job, PromptFacts
from server.logprobs import completion_logprobs, prompt_logprobs
from server.logs import Record
from server.openai import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from server.params import check_common, check_completion, either, sampling_params
from server.service import Service, record_of

DEFAULT_MAX_TOKENS = 16

_decoder = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode


class Completions:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: Request) -> Response:
        service = self._service
        body = await service.read(request, _decoder)
        model = service.model_name(body.model)
        check_common(body, service.config, service.plan.scheduling_policy == "priority")
        check_completion(body)
        service.require_ready()
        job = await self._job(body, model, either(body.request_id, record_of(request.scope).request_id))
        return Answer(service, job, CompletionWriter(service, job))

    async def _job(self, body: CompletionRequest, model: str, request_id: str) -> Job:
        service = self._service
        wanted = either(body.max_tokens, DEFAULT_MAX_TOKENS)
        token_id_lists, texts = await self._prompt(body)
        echo = either(body.echo, False)
        echo_logprobs = echo and body.logprobs is not None
        params = sampling_params(
            body,
            service.defaults,
            max_tokens=1 if wanted == 0 else wanted,
            logprobs=body.logprobs,
            prompt_logprobs=either(body.prompt_logprobs, body.logprobs if echo_logprobs else None),
        )
        if echo and texts is None:
            texts = [service.tokenizer.decode(ids, params.skip_special_tokens) for ids in token_id_lists]
        salt = either(body.cache_salt, "")
        options = body.stream_options
        return Job(
            request_id=request_id,
            answer_id=f"cmpl-{request_id}",
            model=model,
            created=int(time.time()),
            prompts=service.prompts(request_id, token_id_lists, params, either(body.priority, 0), salt),
            n=params.n,
            stream=either(body.stream, False),
            include_usage=options is not None and either(options.include_usage, False),
            continuous_usage=options is not None and either(options.continuous_usage_stats, False),
            logprobs=body.logprobs is not None,
            echo=texts if echo else None,
            echo_logprobs=echo_logprobs,
            prompt_logprobs=body.prompt_logprobs is not None,
            no_output=wanted == 0,
            return_token_ids=either(body.return_token_ids, False),
            tokens_as_ids=either(body.return_tokens_as_token_ids, False),
        )

    async def _prompt(self, body: CompletionRequest) -> tuple[list[list[int]], list[str] | None]:
        """Token ids of every prompt, and their texts where texts were given. ApiError 400."""
        service = self._service
        texts, token_id_lists = split_prompt(body.prompt, service.config.max_prompts)
        if texts is not None:
            token_id_lists = await service.encode(texts, either(body.add_special_tokens, True))
        cut = body.truncate_prompt_tokens
        side = body.truncation_side or "left"
        result = []
        for token_ids in token_id_lists:
            service.check_token_ids(token_ids, "prompt")
            result.append(service.truncate(token_ids, cut, side, body.max_tokens))
        return result, texts if cut is None else None


def split_prompt(
    prompt: str | list[str | int | list[int]] | None, max_prompts: int
) -> tuple[list[str] | None, list[list[int]]]:
    """A prompt is a text, texts, token ids or lists of token ids. Returns (texts, []) or (None, token ids)."""
    if not prompt:
        raise _bad_prompt("must not be empty")
    if isinstance(prompt, str):
        return [prompt], []
    if all(isinstance(item, int) for item in prompt):
        return None, [[item for item in prompt if isinstance(item, int)]]
    if len(prompt) > max_prompts:
        raise _bad_prompt(f"may hold at most {max_prompts} prompts, got {len(prompt)}")
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return texts, []
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) != len(prompt):
        raise _bad_prompt("must be a text, texts, token ids or lists of token ids, not a mixture")
    if not all(lists):
        raise _bad_prompt("must not hold an empty list of token ids")
    return None, lists


def _bad_prompt(message: str) -> ApiError:
    return bad_request(f"prompt {message}", "prompt", "invalid_value")


class CompletionWriter:
    """Everything of a chunk but its text is rendered once for each choice."""

    def __init__(self, service: Service, job: Job) -> None:
        self._job = job
        self._tokenizer = service.tokenizer
        self._common = {"id": job.answer_id, "object": "text_completion", "created": job.created, "model": job.model}
        common = _encode(self._common)[:-1]
        self._heads = [b'data: %b,"choices":[{"index":%d,"text":' % (common, i) for i in range(job.num_choices)]
        usage = b',"usage":null' if job.include_usage else b""
        self._tail = b',"logprobs":null,"finish_reason":null}]%b}\n\n' % usage
        self._plain = not (job.logprobs or job.return_token_ids or job.continuous_usage)
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
                    parts += (heads[delta.index], _encode(delta.text), tail)
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
            choice["logprobs"] = self._logprobs(positions, prompt, self._offsets[delta.index])
            self._offsets[delta.index] += len(text)
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if job.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = job.prompts[prompt].token_ids
        return self._event([choice], record)

    def _event(self, choices: list[dict[str, Any]], record: Record) -> bytes:
        chunk = self._common | {"choices": choices}
        if self._job.continuous_usage:
            chunk["usage"] = continuous_usage(record)
        elif self._job.include_usage:
            chunk["usage"] = None
        return b"data: %b\n\n" % _encode(chunk)

    def usage_frame(self, total: Usage) -> bytes:
        return b"data: %b\n\n" % _encode(self._common | {"choices": [], "usage": total})

    # ---- whole -------------------------------------------------------------------------------------------------

    def whole(self, choices: list[Choice], prompts: list[PromptFacts], total: Usage) -> Completion:
        job = self._job
        return Completion(
            id=job.answer_id,
            created=job.created,
            model=job.model,
            choices=[self._choice(choice, choice.index // job.n, prompts) for choice in choices],
            usage=total,
        )

    def _choice(self, choice: Choice, prompt: int, prompts: list[PromptFacts]) -> CompletionChoice:
        job = self._job
        positions: list[PositionLogprobs | None] = list(choice.logprobs)
        if job.echo_logprobs:
            positions = (prompts[prompt].logprobs or []) + positions
        result = CompletionChoice(
            index=choice.index,
            text=(job.echo[prompt] if job.echo is not None else "") + "".join(choice.texts),
            logprobs=self._logprobs(positions, prompt, 0) if job.logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if job.return_token_ids:
            result.token_ids = choice.token_ids
            result.prompt_token_ids = job.prompts[prompt].token_ids
        if job.prompt_logprobs:
            result.prompt_logprobs = prompt_logprobs(prompts[prompt].logprobs or [])
        return result

    def _logprobs(self, positions: list[PositionLogprobs | None], prompt: int, offset: int) -> CompletionLogprobs:
        first = self._job.prompts[prompt].token_ids[0]
        name = f"token_id:{first}" if self._job.tokens_as_ids else self._tokenizer.token_str(first)
        return completion_logprobs(positions, name, offset, self._job.tokens_as_ids)


def continuous_usage(record: Record) -> dict[str, int]:
    """stream_options.continuous_usage_stats: the totals so far."""
    prompt, output = record.prompt_tokens, record.output_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
