"""Messages between front and ranks over real sockets."""

from __future__ import annotations

import argparse
import logging
import select
import socket as socketlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from engine.process.rank_loop import run
from front.messages import (
    Abort,
    AddRequest,
    Membership,
    Outputs,
    RankFailed,
    RankLost,
    RankStats,
    Shutdown,
    TokenOutput,
)
from front.params import SamplingParams
from front.wire import (
    LINGER_SECONDS,
    NotConnected,
    Numbers,
    RankSocket,
    Reporter,
    ZmqDoorbell,
    ZmqRanks,
    sleep_until_called,
)

DEADLINE = 5.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)


def send_when_connected(ranks: ZmqRanks, rank: int, message: Shutdown | Abort | AddRequest) -> None:
    def sent() -> bool:
        try:
            ranks.send(rank, message)
        except ConnectionError:
            return False
        return True

    until(sent)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/front.ipc"


def add_request(request_id: int) -> AddRequest:
    params = SamplingParams(
        max_tokens=3, logit_bias={7: 1.5}, stop_token_ids=(1, 2), bad_words_token_ids=((3, 4), (5,))
    )
    return AddRequest(request_id=request_id, token_ids=[1, 2, 3], prompt_len=3, params=params, seed=2**63 - 1)


def test_round_trip(endpoint: str) -> None:
    ranks = ZmqRanks(endpoint, 2)
    sockets = [RankSocket(endpoint, rank) for rank in range(2)]
    message = add_request(2**62)
    send_when_connected(ranks, 1, message)
    assert sockets[1].poll(DEADLINE) == [message]
    assert sockets[0].poll(0) == []
    outputs = Outputs(1, [TokenOutput(2**62, [5], "stop", 5)], RankStats(running=1), 1.25)
    sockets[1].send(outputs)
    assert ranks.receive(DEADLINE) == [outputs]
    for socket in sockets:
        socket.close()
    ranks.close()


def test_receive_zero_takes_everything(endpoint: str) -> None:
    """The descriptor is edge-triggered: one wake-up for many messages, so all must be taken."""
    ranks = ZmqRanks(endpoint, 1)
    socket = RankSocket(endpoint, 0)
    assert ranks.receive(0) == []
    for number in range(500):
        socket.send(Outputs(0, [TokenOutput(number, [number])], RankStats()))
    received: list[int] = []
    deadline = time.monotonic() + DEADLINE
    while len(received) < 500:
        readable, _, _ = select.select([ranks.fileno()], [], [], deadline - time.monotonic())
        assert readable, "messages are missing and the descriptor is silent"
        for message in ranks.receive(0):
            assert isinstance(message, Outputs)
            received += [output.request_id for output in message.outputs]
    assert received == list(range(500))
    socket.close()
    ranks.close()


def test_sending_does_not_swallow_a_wake_up(endpoint: str) -> None:
    ranks = ZmqRanks(endpoint, 1)
    socket = RankSocket(endpoint, 0)
    send_when_connected(ranks, 0, Abort([0]))
    for number in range(200):
        socket.send(RankFailed(0, str(number)))
        ranks.send(0, Abort([number]))
        readable, _, _ = select.select([ranks.fileno()], [], [], DEADLINE)
        assert readable
        until(lambda: len(ranks.receive(0)) > 0)
    socket.close()
    ranks.close()


def test_an_absent_rank_is_an_error_and_does_not_block(endpoint: str) -> None:
    ranks = ZmqRanks(endpoint, 2)
    with pytest.raises(ConnectionError, match="rank 1 is not connected"):
        ranks.send(1, Shutdown())
    with pytest.raises(ValueError, match=r"rank 2 is not in 0\.\.1"):
        ranks.send(2, Shutdown())
    socket = RankSocket(endpoint, 1)
    send_when_connected(ranks, 1, Shutdown())
    socket.close()

    def refused() -> bool:
        try:
            ranks.send(1, Shutdown())
        except ConnectionError:
            return True
        return False

    until(refused)
    ranks.close()


def test_a_restarted_rank_takes_over_its_name(endpoint: str) -> None:
    """The supervisor reports for a rank under its name too."""
    ranks = ZmqRanks(endpoint, 1)
    first, second = RankSocket(endpoint, 0), RankSocket(endpoint, 0)
    second.send(RankFailed(0, "killed"))
    assert ranks.receive(DEADLINE) == [RankFailed(0, "killed")]
    first.close()
    second.close()
    ranks.close()


def test_what_does_not_decode_is_dropped_and_named(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    ranks = ZmqRanks(endpoint, 1)
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect(f"{endpoint}-up")
    with caplog.at_level(logging.ERROR, "moesaic.wire"):
        push.send(b"\xc1 nonsense")
        push.send(b"\x81\xa4type\xa3add")
        until(lambda: ranks.receive(0.1) == [] and len(caplog.records) == 2)
    assert all("dropped a message" in record.getMessage() for record in caplog.records)
    push.close()
    context.term()
    ranks.close()


def test_a_taken_address_is_a_clear_error() -> None:
    with socketlib.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"cannot bind {endpoint}"):
            ZmqRanks(endpoint, 1)


def test_doorbells(tmp_path: Path, endpoint: str) -> None:
    endpoints = [f"ipc://{tmp_path}/bell-{rank}.ipc" for rank in range(3)]
    ranks = ZmqRanks(endpoint, 1)
    inbox = RankSocket(endpoint, 0)
    bells = [ZmqDoorbell(endpoints, rank) for rank in range(3)]
    assert not bells[1].heard(0)
    bells[0].ring(7)
    for listener in (1, 2):
        sleep_until_called(inbox, bells[listener], DEADLINE)
        assert bells[listener].heard(7)
        assert not bells[listener].heard(7), "a ring is heard once"
    assert not bells[0].heard(7), "a rank does not ring itself"
    bells[2].ring(7)
    sleep_until_called(inbox, bells[0], DEADLINE)
    assert not bells[0].heard(8), "a ring for an earlier sleep is forgotten"
    began = time.monotonic()
    sleep_until_called(inbox, bells[0], 0.05)
    assert time.monotonic() - began >= 0.04
    send_when_connected(ranks, 0, Shutdown())
    sleep_until_called(inbox, bells[0], DEADLINE)
    assert inbox.poll(0) == [Shutdown()]
    for bell in bells:
        bell.close()
    inbox.close()
    ranks.close()


def test_a_doorbell_follows_the_membership(tmp_path: Path) -> None:
    endpoints = [f"ipc://{tmp_path}/bell-{rank}.ipc" for rank in range(4)]
    bells = [ZmqDoorbell(endpoints[:2], rank) for rank in range(2)]
    bells.append(ZmqDoorbell(endpoints[:3], 2))  # added later
    bells[0].reach(endpoints[:3])
    bells[0].ring(5)
    until(lambda: bells[1].heard(5))
    until(lambda: bells[2].heard(5))
    bells[0].reach([endpoints[0], endpoints[2]])
    bells[0].ring(6)
    until(lambda: bells[2].heard(6))
    assert not bells[1].heard(6)
    bells[0].reach(endpoints)  # back again; and one that has not come yet is nobody's trouble
    bells[0].ring(7)
    until(lambda: bells[1].heard(7))
    for bell in bells:
        bell.close()


def test_the_supervisor_reads_every_count_once(tmp_path: Path) -> None:
    front, supervisor = Numbers(tmp_path / "resizes"), Numbers(tmp_path / "resizes")
    assert supervisor.read() == []
    front.write(4)
    front.write(12)
    assert supervisor.read() == [4, 12] and supervisor.read() == []
    with (tmp_path / "resizes").open("ab") as file:
        file.write(b"1")  # half of a line
    assert supervisor.read() == []
    front.write(3)
    assert supervisor.read() == [13]


def test_more_ranks_can_be_sent_to(endpoint: str) -> None:
    ranks = ZmqRanks(endpoint, 1)
    with pytest.raises(ValueError, match=r"rank 1 is not in 0\.\.0"):
        ranks.send(1, Shutdown())
    ranks.resize(2)
    second = RankSocket(endpoint, 1)
    send_when_connected(ranks, 1, Shutdown())
    ranks.resize(1)
    assert ranks.size == 2 and second.poll(DEADLINE) == [Shutdown()]
    second.close()
    ranks.close()


def test_the_supervisor_tells_of_a_rank_that_is_gone(endpoint: str) -> None:
    reporter = Reporter(endpoint)  # before the front is there
    ranks = ZmqRanks(endpoint, 2)
    first = RankSocket(endpoint, 1)
    send_when_connected(ranks, 1, Shutdown())
    first.close()
    lost = RankLost(1, "killed by SIGKILL", 12.5, 4711)
    reporter.send(lost)
    assert ranks.receive(DEADLINE) == [lost]

    def gone() -> bool:
        try:
            ranks.send(1, Shutdown())
        except NotConnected:
            return True
        return False

    until(gone)
    second = RankSocket(endpoint, 1)  # the next life takes the name over
    change = Membership(2, [True, True])
    until(lambda: not gone())
    ranks.send(1, change)
    came: list[object] = []
    until(lambda: bool(came.extend(second.poll(0.05))) or change in came)
    for part in (reporter, second, ranks):
        part.close()


def test_a_rank_that_fails_before_the_front_listens_is_heard(endpoint: str, tmp_path: Path) -> None:
    """Its process waits with the report for longer than one that ends in service waits with its last messages."""
    options = argparse.Namespace(
        plan=tmp_path / "none.json", rank=0, runtime_dir=tmp_path, memory=None, front=endpoint, network=None, join=False
    )
    with ThreadPoolExecutor(1) as threads:
        code = threads.submit(run, options)
        with pytest.raises(TimeoutError):
            code.result(LINGER_SECONDS + 0.3)
        ranks = ZmqRanks(endpoint, 1)
        (failed,) = ranks.receive(DEADLINE)
        assert isinstance(failed, RankFailed) and "none.json" in failed.error
        assert code.result(DEADLINE) == 3
    ranks.close()
