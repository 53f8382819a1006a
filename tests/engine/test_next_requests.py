"""Behind a long step a rank waits a moment for what clients ask next."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_wire import DEADLINE, add_request, send_when_connected, until

from engine.process import arrivals
from engine.process.arrivals import TRIED_AGAIN, Arrivals
from front.messages import Abort, FrontToRank, TokenOutput
from front.wire import RankSocket, ZmqRanks


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[tuple[ZmqRanks, RankSocket]]:
    endpoint = f"ipc://{tmp_path}/front.ipc"
    ranks, socket = ZmqRanks(endpoint, 1), RankSocket(endpoint, 0)
    send_when_connected(ranks, 0, Abort([0]))
    assert socket.poll(DEADLINE) == [Abort([0])]
    yield ranks, socket
    socket.close()
    ranks.close()


def after(socket: RankSocket, num_ended: int, waits: Arrivals | None = None) -> Arrivals:
    """As they are when a step has ended in which so many requests did, and one more did not."""
    waits = waits or Arrivals(socket)
    waits.note([TokenOutput(number, [5], "stop" if number else None) for number in range(num_ended + 1)])
    return waits


def test_as_many_requests_are_waited_for_as_have_ended(
    connected: tuple[ZmqRanks, RankSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first step has lasted since the machine was started, as far as is known."""
    ranks, socket = connected
    monkeypatch.setattr(arrivals, "WAIT_SHARE", DEADLINE)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(after(socket, 2).take)
        messages = [add_request(1), Abort([7]), add_request(2)]
        for message in messages:
            ranks.send(0, message)
        assert waiting.result(2 * DEADLINE) == messages


@pytest.mark.parametrize(("num_ended", "long"), [(0, True), (1, False), (1, True)])
def test_nothing_is_waited_for_long(
    connected: tuple[ZmqRanks, RankSocket], monkeypatch: pytest.MonkeyPatch, num_ended: int, long: bool
) -> None:
    """Nor at all, where no request has ended or steps are short."""
    if not long:
        monkeypatch.setattr(arrivals, "LONG_STEP", float("inf"))
    assert after(connected[1], num_ended).take() == []


class Watched(RankSocket):
    """It notes how long its owner would wait."""

    def __init__(self, endpoint: str, rank: int) -> None:
        super().__init__(endpoint, rank)
        self.timeouts: list[float] = []

    def poll(self, timeout: float) -> list[FrontToRank]:
        self.timeouts.append(timeout)
        return super().poll(timeout)

    def waited(self) -> bool:
        """Since this was last asked."""
        timeouts, self.timeouts = self.timeouts, []
        return any(timeouts)


def test_what_was_in_vain_is_seldom_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "LONG_STEP", 0.0)
    monkeypatch.setattr(arrivals, "WAIT_SHARE", 100.0)  # of steps that take no time here
    endpoint = f"ipc://{tmp_path}/front.ipc"
    ranks, socket = ZmqRanks(endpoint, 1), Watched(endpoint, 0)
    send_when_connected(ranks, 0, add_request(1))
    until(lambda: socket.inbox.poll(0) != 0)
    waits = Arrivals(socket)
    waited = []
    for _ in range(2 * TRIED_AGAIN + 2):
        waits.take()
        waited.append(socket.waited())
        after(socket, 2, waits)
    seldom = [True] + [False] * (TRIED_AGAIN - 1)
    assert waited == [False, *seldom, *seldom, True]  # before the first one no step has ended
    socket.close()
    ranks.close()
