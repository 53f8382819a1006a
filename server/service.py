"""What every route shares: the engine, the tokenizer, what was decided, and the requests in flight."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from configs.engine import Plan
from configs.server import ServerConfig
from engine.async_llm import AsyncLLM
from engine.messages import SamplingParams
from engine.outputs import Prompt
from engine.sampling_params import resolve, validate
from engine.text import Tokenizer
from server.errors import ApiError, bad_request, from_decode_error, from_value_error, unavailable
from server.flights import Flights
from server.logs import Record
from server.metrics import Metrics
from server.params import FIELDS

State = Literal["loading", "ready", "short", "draining", "failed"]
Body = TypeVar("Body")
BODY_SECONDS = 60.0  # a body that takes longer to come is given up
THREAD_CHARACTERS = 16384  # longer texts are tokenized in a thread, so that streams do not stand still

_encode = msgspec.json.Encoder().encode


def json_response(value: object, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type="application/json")


def record_of(scope: Scope) -> Record:
    """The record that the outermost layer (server/gate.py) keeps for this request."""
    record: Record = scope["moesaic.record"]
    return record


class Service:
    """defaults: how tokens are drawn unless a request says otherwise. created: Unix time of the start (/v1/models)."""

    def __init__(
        self,
        engine: AsyncLLM,
        tokenizer: Tokenizer,
        plan: Plan,
        config: ServerConfig,
        defaults: SamplingParams,
        created: int,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.plan = plan
        self.config = config
        self.defaults = defaults
        self.created = created
        self.flights = Flights(
            capacity=lambda: plan.max_num_seqs * engine.members.count,
            max_queued=config.max_queued_requests,
            request_timeout=config.request_timeout,
            keep_alive=config.keep_alive_interval,
        )
        self.metrics = Metrics(engine, plan, self.flights)
        self._serial = itertools.count()

    # ---- state -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[State, str]:
        """And, for people, why."""
        failed = self.engine.failed
        if failed is not None:
            return "failed", failed
        if self.engine.draining:
            return "draining", "the server is shutting down"
        if not self.engine.is_ready:
            missing = [str(rank) for rank in range(self.plan.data_parallel_size) if rank not in self.engine.ready]
            return "loading", f"waiting for rank {', '.join(missing)} to load the model"
        shortage = self.engine.shortage
        if shortage is not None:
            return "short", shortage
        return "ready", "serving"

    def require_ready(self) -> None:
        state, why = self.state()
        if state != "ready":
            raise unavailable(f"not ready: {why}", close=state in ("draining", "failed"))

    def model_name(self, wanted: str | None) -> str:
        """The served name. ApiError 404 when it is another's; none given means the first."""
        names = self.plan.served_model_names
        if not wanted:
            return names[0]
        if wanted not in names:
            raise ApiError(404, f"the model {wanted!r} does not exist", param="model", code="model_not_found")
        return wanted

    @property
    def vocab_size(self) -> int:
        """Of the model once it is loaded: it may be larger than the tokenizer's."""
        return min((ready.vocab_size for ready in self.engine.ready.values()), default=self.tokenizer.vocab_size)

    # ---- from a body to prompts --------------------------------------------------------------------------------

    async def read(self, request: Request, decoder: msgspec.json.Decoder[Body]) -> Body:
        """ApiError 400 for what does not parse, 408 for what does not come."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.body()
        except ClientDisconnect:
            raise bad_request("the client left before its body had come") from None
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s", code="timeout") from None
        if not body:
            raise bad_request("the body is empty; a JSON object is needed", code="invalid_json")
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise from_decode_error(error) from None

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, field: str = "prompt") -> list[list[int]]:
        def work() -> list[list[int]]:
            if len(texts) == 1:
                return [self.tokenizer.encode(texts[0], add_special_tokens)]
            return self.tokenizer.encode_batch(texts, add_special_tokens)

        try:
            if sum(len(text) for text in texts) > THREAD_CHARACTERS:
                return await asyncio.to_thread(work)
            return work()
        except ValueError as error:
            raise bad_request(f"{field}: {error}", field, "invalid_value") from None

    def check_token_ids(self, token_ids: Sequence[int], field: str) -> None:
        limit = self.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limit):
            wrong = next(token for token in token_ids if not 0 <= token < limit)
            raise bad_request(f"{field}: token id {wrong} is not in 0..{limit - 1}", field, "invalid_value")

    def truncate(self, token_ids: list[int], wanted: int | None, side: str, max_tokens: int | None) -> list[int]:
        """truncate_prompt_tokens: keep so many tokens, -1 as many as leave room for max_tokens; side: what is cut off."""
        if wanted is None:
            return token_ids
        if wanted < -1 or wanted == 0 or wanted > self.plan.max_model_len:
            limit = self.plan.max_model_len
            raise bad_request(
                f"truncate_prompt_tokens must be -1 or 1..{limit}, got {wanted}", "truncate_prompt_tokens"
            )
        keep = wanted if wanted > 0 else max(1, self.plan.max_model_len - (max_tokens or 1))
        return token_ids[:keep] if side == "right" else token_ids[-keep:]

    def prompts(
        self,
        request_id: str,
        token_id_lists: Sequence[list[int]],
        params: SamplingParams,
        priority: int,
        cache_salt: str,
        names: Mapping[str, str],
    ) -> list[Prompt]:
        """Checked, with a name each that no other request in flight has. ApiError 400; names: of fields (from_value_error)."""
        prompts = []
        serial = next(self._serial)
        try:
            validate(params, self.vocab_size, self.plan.max_logprobs)
            for index, token_ids in enumerate(token_id_lists):
                resolved = resolve(params, self.tokenizer, len(token_ids), self.plan.max_model_len)
                name = f"{request_id}/{serial}.{index}"
                prompt = Prompt(
                    request_id=name, token_ids=token_ids, params=resolved, priority=priority, cache_salt=cache_salt
                )
                prompts.append(prompt)
        except ValueError as error:
            raise from_value_error(error, FIELDS, names) from None
        return prompts
