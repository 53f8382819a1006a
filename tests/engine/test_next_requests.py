"""Behind a long step a rank waits a moment for what clients ask next."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_wire import DEADLINE, add_request, send_when_connected

from engine.process import arrivals
from engine.process.arrivals import TRIED_AGAIN, Arrivals
from front.messages import Abort, AddRequest
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


def test_as_many_requests_are_waited_for_as_have_ended(
    connected: tuple[ZmqRanks, RankSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, socket = connected
    monkeypatch.setattr(arrivals, "WAIT_SHARE", DEADLINE)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(Arrivals(socket).take, 2, 1.0)
        messages = [add_request(1), Abort([7]), add_request(2)]
        for message in messages:
            ranks.send(0, message)
        assert waiting.result(2 * DEADLINE) == messages


@pytest.mark.parametrize(("num_ended", "took"), [(0, 1.0), (1, 0.01), (1, 0.2)])
def test_nothing_is_waited_for_long(connected: tuple[ZmqRanks, RankSocket], num_ended: int, took: float) -> None:
    """Nor at all, where no request has ended or steps are short."""
    assert Arrivals(connected[1]).take(num_ended, took) == []


def test_what_was_in_vain_is_seldom_done_again(
    connected: tuple[ZmqRanks, RankSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, socket = connected
    waits = Arrivals(socket)
    assert waits.take(1, 0.2) == []
    monkeypatch.setattr(arrivals, "WAIT_SHARE", DEADLINE)  # a wait would be noticed
    for _ in range(TRIED_AGAIN - 1):
        assert waits.take(1, 1.0) == []
    ranks.send(0, add_request(1))
    assert [type(message) for message in waits.take(1, 1.0)] == [AddRequest]
    ranks.send(0, add_request(2))
    assert [type(message) for message in waits.take(1, 1.0)] == [AddRequest]  # as the last wait was not
