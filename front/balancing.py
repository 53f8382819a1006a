"""The front's side of the balancer: asks the rank that leads it, and keeps what it last said. No torch here.

The lowest live rank leads. When it is lost before it has answered, the question goes to the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import statistics
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from front.front import Front
from front.messages import BalanceCommand, BalanceReply, BalanceReport, BalanceStatus, FrontToRank, RankToFront

Question = Literal["status", "placement", "load", "plan", "rebalance", "record"]

ANSWER_SECONDS = 10.0  # a whole recovery fits into it
AGAIN_SECONDS = 0.05  # ranks may know a moment earlier or later than the front who leads

log = logging.getLogger("moesaic.front")


class BalancerSilent(RuntimeError):
    """No rank has answered in time: try again."""


class BalancerRefused(RuntimeError):
    """The leading rank has said why it does not do it."""


class _Open(Struct, eq=False):
    command: BalanceCommand
    answer: asyncio.Future[BalanceReply]
    rank: int | None = None  # that was asked


class Balancing:
    """For one event loop. What the leading rank says unasked is in Front.balance."""

    def __init__(self, front: Front, send: Callable[[int, FrontToRank], None], log_windows: bool) -> None:
        """send: to a rank, which may be gone. log_windows: a log line at the end of every window; one comes after a
        failure anyway."""
        self._front = front
        self._send = send
        self._log_windows = log_windows
        self._failures = 0
        self._ids = itertools.count()
        self._open: dict[int, _Open] = {}

    async def ask(self, kind: Question, path: str | None = None, seconds: float = ANSWER_SECONDS) -> bytes:
        """The answer, as JSON. path: of a recording. BalancerSilent after `seconds`; BalancerRefused."""
        command = BalanceCommand(command_id=next(self._ids), kind=kind, path=path)
        question = _Open(command, asyncio.get_running_loop().create_future())
        self._open[command.command_id] = question
        try:
            async with asyncio.timeout(seconds):
                self._put(question)
                reply = await question.answer
        except TimeoutError:
            who = "no rank serves" if question.rank is None else f"rank {question.rank} has not answered"
            raise BalancerSilent(f"{who} within {seconds:g} s") from None
        finally:
            del self._open[command.command_id]
        if reply.error:
            raise BalancerRefused(reply.error)
        if kind == "status":
            self._front.balance = msgspec.json.decode(reply.body, type=BalanceStatus)
        return reply.body

    def on_event(self, message: RankToFront) -> None:
        """To be told everything but tokens, after the front has taken it."""
        if isinstance(message, BalanceReply):
            self._on_reply(message)
        elif isinstance(message, BalanceReport):
            self._on_report(message.status)
        else:
            leader = self._leader()
            for question in self._open.values():
                if question.rank != leader:
                    self._put(question)

    def _leader(self) -> int | None:
        members = self._front.members
        return min(members.up, default=None) if members.started else None

    def _put(self, question: _Open) -> None:
        question.rank = self._leader()
        if question.rank is not None and not question.answer.done():
            self._send(question.rank, question.command)

    def _on_reply(self, reply: BalanceReply) -> None:
        question = self._open.get(reply.command_id)
        if question is None or question.answer.done():
            return
        if reply.again:
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._put, question)
        else:
            question.answer.set_result(reply)

    def _on_report(self, status: BalanceStatus) -> None:
        failed = status.failures > self._failures
        self._failures = status.failures  # a new leader counts anew
        if failed or self._log_windows:
            log.log(
                logging.WARNING if failed else logging.INFO,
                "event=eplb rank=%d epoch=%d steps=%d window_balance=%s step_balance=%s lower_bound=%s age_steps=%d "
                "reweights=%d moves=%d bytes_moved=%d moving=%d failures=%d error=%r",
                status.rank,
                status.epoch,
                status.steps,
                _mean(status.window_balance),
                _mean(status.step_balance),
                _mean(status.lower_bound),
                status.age_steps,
                status.reweights,
                status.moves,
                status.bytes_moved,
                status.moving,
                status.failures,
                status.last_error,
            )


def _mean(per_layer: list[float]) -> str:
    return f"{statistics.fmean(per_layer):.4f}" if per_layer else "none"
