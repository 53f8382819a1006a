"""Routes of the balancer: what it sees and does (GET), and what an administrator tells it (POST)."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from front.balancing import BalancerRefused, BalancerSilent, Question
from front.messages import BalanceStatus
from server.api.params import new_file
from server.errors import ApiError, unavailable
from server.service import Service, json_response

RECORDING = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}\.jsonl")

SCRAPE_SECONDS = 0.25  # how long a scrape of /metrics may wait for the balancer

_status_decoder = msgspec.json.Decoder(BalanceStatus)


class RecordRequest(msgspec.Struct):
    """path: the name of a new file in the recordings' directory; null ends the recording."""

    path: str | None


_record_decoder = msgspec.json.Decoder(RecordRequest)


def trouble(service: Service) -> dict[str, str | int]:
    """What /health and /ready say of a balancer that fails; empty when all is well. Serving goes on either way."""
    status = service.engine.front.balance
    if service.plan.eplb is None or status is None or not status.last_error:
        return {}
    return {"eplb": "failing", "eplb_error": status.last_error, "eplb_failures": status.failures}


async def refresh(service: Service) -> None:
    """Ask what the balancer does now, for a scrape; what it said before stays when it does not answer at once."""
    if service.plan.eplb is not None and service.engine.is_ready:
        with contextlib.suppress(BalancerSilent, BalancerRefused):
            await service.engine.balancing.ask("status", seconds=SCRAPE_SECONDS)


class Eplb:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def status(self, request: Request) -> Response:
        """Answers also when experts are not balanced, and why."""
        plan = self._service.plan
        if plan.eplb is None:
            return json_response({"enabled": False, "reason": plan.reasons.get("eplb", "off")})
        status = _status_decoder.decode(await self._ask("status"))
        return json_response({"enabled": True, **msgspec.structs.asdict(status)})

    async def placement(self, request: Request) -> Response:
        return _json(await self._ask("placement"))

    async def load(self, request: Request) -> Response:
        return _json(await self._ask("load"))

    async def plan(self, request: Request) -> Response:
        """What would move; nothing does."""
        return _json(await self._ask("plan"))

    async def rebalance(self, request: Request) -> Response:
        """Take a full plan; its experts move from now on, within the budget of every step."""
        return _json(await self._ask("rebalance"))

    async def record(self, request: Request) -> Response:
        self._require_balancing()
        body = await self._service.read(request, _record_decoder)
        path = None if body.path is None else str(self._recording(body.path))
        return _json(await self._ask("record", path))

    def _recording(self, name: str) -> Path:
        """ApiError unless it is a new file, right in the directory that the operator has set aside."""
        directory = self._service.config.eplb_record_dir
        if directory is None:
            raise ApiError(
                403, "recordings need a directory: start the server with --eplb-record-dir", code="no_record_dir"
            )
        rule = "that ends in .jsonl, of at most 126 letters, digits, '_', '-' and '.'"
        return new_file(Path(directory), name, RECORDING, "path", rule, "--eplb-record-dir")

    def _require_balancing(self) -> None:
        plan = self._service.plan
        if plan.eplb is None:
            why = plan.reasons.get("eplb", "off")
            raise ApiError(404, f"experts are not balanced on this server: {why}", code="eplb_off")
        self._service.require_ready()

    async def _ask(self, question: Question, path: str | None = None) -> bytes:
        self._require_balancing()
        try:
            return await self._service.engine.balancing.ask(question, path)
        except BalancerSilent as error:
            raise unavailable(f"the balancer does not answer: {error}; try again") from None
        except BalancerRefused as error:
            raise ApiError(409, f"{question}: {error}", code="eplb_refused") from None


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
