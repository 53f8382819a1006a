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
from front.async_llm import AsyncLLM
from front.chat.format import OutputFormat
from front.chat.thinking import within_budget
from front.outputs import Prompt
from front.params import SamplingParams
from front.sampling_params import resolve, validate
from front.text.tokenizer import Tokenizer
from server.api.params import FIELDS
from server.errors import ApiError, bad_request, from_value_error, unavailable
from server.in_flight import InFlightRequests
from server.intake import Intake, decoded, known_model
from server.intake_process import IntakeProcess
from server.logs import Record
from server.metrics import Metrics
from server.taken import Answered, Kind, Prompts, Refused
from server.tracing import Traces

State = Literal["loading", "ready", "short", "draining", "failed"]
Body = TypeVar("Body")
BODY_SECONDS = 60.0  # a body that takes longer to come is given up
INLINE_BYTES = 16 << 10  # larger bodies are taken by a process of its own, so that streams do not stand still
ADMIN_BYTES = 1 << 20  # the most that a route takes which has neither prompts nor tokens

_encode = msgspec.json.Encoder().encode


def json_response(value: object, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type="application/json")


def record_of(scope: Scope) -> Record:
    """The record that the outermost layer (server/middleware.py) keeps for this request."""
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
        traces: Traces | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.plan = plan
        self.config = config
        self.defaults = defaults
        self.created = created
        self.traces = traces
        self.announced = True  # that requests are served: to whoever started this process
        self.in_flight = InFlightRequests(
            capacity=lambda: plan.max_num_seqs * engine.members.count,
            max_queued=config.max_queued_requests,
            request_timeout=config.request_timeout,
            keep_alive=config.keep_alive_interval,
        )
        self.metrics = Metrics(engine, plan, self.in_flight)
        self._intake = Intake(tokenizer, plan, config)
        self._large = IntakeProcess(tokenizer, plan, config)
        self._serial = itertools.count()

    def close(self) -> None:
        """Ends the process that takes large bodies, and sends the last traces."""
        self._large.close()
        if self.traces is not None:
            self.traces.close()

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
        if not self.announced:
            return "loading", "about to serve"
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
        return known_model(self.plan.served_model_names, wanted)

    @property
    def vocab_size(self) -> int:
        """Of the model once it is loaded: it may be larger than the tokenizer's."""
        return min((ready.vocab_size for ready in self.engine.ready.values()), default=self.tokenizer.vocab_size)

    # ---- from a body to prompts --------------------------------------------------------------------------------

    async def read(self, request: Request, decoder: msgspec.json.Decoder[Body]) -> Body:
        """The body of a request that has no need of a large one. ApiError 400 for what does not parse, 408 for what
        does not come."""
        body = await self.body(request)
        if len(body) > ADMIN_BYTES:
            raise ApiError(413, f"the body is larger than the {ADMIN_BYTES} bytes of this route", code="body_too_large")
        return decoded(body, decoder)

    async def take(self, request: Request, kind: Kind, earlier: bytes = b"") -> Prompts | Answered:
        """The body, made ready (server/intake.py). ApiError as `read`, and for all that is wrong with it."""
        body = await self.body(request)
        serving = self.state()[0] == "ready"
        if len(body) + len(earlier) <= INLINE_BYTES:
            taken = self._intake.take(kind, body, self.vocab_size, serving, earlier)
        else:
            taken = await self._large.take(kind, body, self.vocab_size, serving, earlier)
        if isinstance(taken, Refused):
            raise taken.error()
        return taken

    async def body(self, request: Request) -> bytes:
        """ApiError 408 when it does not come."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await request.body()
        except ClientDisconnect:
            raise bad_request("the client left before its body had come") from None
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s", code="timeout") from None

    def prompts(
        self,
        request_id: str,
        token_id_lists: Sequence[list[int]],
        params: SamplingParams,
        priority: int,
        cache_salt: str,
        names: Mapping[str, str],
        format: OutputFormat | None = None,
    ) -> list[Prompt]:
        """Checked, with a name each that no other request in flight has. ApiError 400; names: of fields
        (from_value_error)."""
        prompts = []
        serial = next(self._serial)
        try:
            validate(params, self.vocab_size, self.plan.max_logprobs, bool(self.plan.logits_processors))
            for index, token_ids in enumerate(token_id_lists):
                resolved = resolve(params, self.tokenizer, len(token_ids), self.plan.max_model_len)
                family = self._intake.formats.reasoning
                resolved = within_budget(resolved, self.tokenizer, family, format, token_ids)
                name = f"{request_id}/{serial}.{index}"
                prompt = Prompt(
                    request_id=name,
                    token_ids=token_ids,
                    params=resolved,
                    priority=priority,
                    cache_salt=cache_salt,
                    format=format,
                )
                prompts.append(prompt)
        except ValueError as error:
            raise from_value_error(error, FIELDS, {"extra_args": "vllm_xargs", **names}) from None
        return prompts
