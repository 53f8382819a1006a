"""Administration of the ranks: their live table, and how many there are to be (docs/surviving.md)."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from configs.machine import this_machine
from configs.resolve import MEBI
from engine.process.orphan import pid_of
from front.async_llm import EngineBusy
from server.api.openai import ResizeRequest
from server.errors import ApiError, bad_request
from server.service import Service, json_response

_decoder = msgspec.json.Decoder(ResizeRequest)


class RankRow(msgspec.Struct):
    """One rank as /admin/ranks shows it. pid: null while it loads or is lost. epoch: of the membership that it
    joined last."""

    rank: int
    state: str
    pid: int | None
    epoch: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    losses: int
    last_recovery_seconds: float | None


class RankTable(msgspec.Struct):
    """count: ranks that are to serve, which may be from `fewest` to `most`. epoch: of the newest membership."""

    count: int
    fewest: int
    most: int
    mode: str
    epoch: int
    ranks: list[RankRow]


class RankAdmin:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def table(self, request: Request) -> Response:
        return json_response(self._table())

    async def resize(self, request: Request) -> Response:
        """202 with the table as it is then: ranks that leave are gone from it, new ones are starting. 400 for a count
        that can never be, 409 for one that cannot be now."""
        body = await self._service.read(request, _decoder)
        self._check(body.count)
        try:
            self._service.engine.resize(body.count)
        except ValueError as error:
            raise bad_request(str(error), "count", "invalid_value") from None
        except EngineBusy as error:
            raise ApiError(409, str(error), param="count", code="not_now") from None
        return json_response(self._table(), 202)

    def _check(self, count: int) -> None:
        """What the machine says. ApiError 503 when nothing is served yet, or any more."""
        state, why = self._service.state()
        if state not in ("ready", "short"):
            raise ApiError(503, f"not ready: {why}", code=state)
        plan = self._service.plan
        if 0 < plan.data_parallel_size_local < plan.data_parallel_size:
            raise bad_request(
                "the number of ranks cannot be changed while they are on several machines", "count", "invalid_value"
            )
        if count > plan.max_ranks:
            reason = plan.reasons.get("max_ranks", "the server's limit")
            raise bad_request(
                f"count must be at most {plan.max_ranks}, not {count}: {reason}", "count", "invalid_value"
            )
        num_new = count - self._service.engine.members.count
        needed, free = num_new * plan.rank_bytes, this_machine().free_memory
        if num_new > 0 and needed > free:
            message = (
                f"{num_new} more rank(s) of {plan.rank_bytes // MEBI} MiB take {needed // MEBI} MiB, but "
                f"{free // MEBI} MiB of memory are free"
            )
            raise ApiError(409, message, param="count", code="no_memory")

    def _table(self) -> RankTable:
        engine = self._service.engine
        members = engine.members
        rows = []
        for rank, state in enumerate(members.states[: members.count]):
            stats, ready = engine.stats[rank], members.ready.get(rank)
            rows.append(
                RankRow(
                    rank=rank,
                    state=state.value,
                    pid=None if ready is None else pid_of(ready.process),
                    epoch=members.epochs[rank],
                    running=stats.running,
                    waiting=stats.waiting,
                    kv_blocks_used=stats.kv_blocks_used,
                    kv_blocks_total=stats.kv_blocks_total,
                    losses=members.losses[rank],
                    last_recovery_seconds=members.last_recovery.get(rank),
                )
            )
        return RankTable(
            count=members.count,
            fewest=members.fewest,
            most=self._service.plan.max_ranks,
            mode=members.mode,
            epoch=members.epoch,
            ranks=rows,
        )
