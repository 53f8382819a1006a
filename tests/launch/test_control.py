"""What the supervisors of several machines say to each other, and whom the head refuses."""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from ports import free_ports
from served import until

from configs.engine import EngineConfig, Plan
from configs.hosts import Hosts
from configs.server import ServerConfig
from engine.plan import make_plan
from launch.control import MAX_FRAME, Beat, ControlConnection, Hello, Lost, Message, Refused, Started
from launch.head import HeadSupervisor
from launch.identity import differences, other_weights, versions
from models.tiny import CHECKPOINT


@pytest.fixture
def pair() -> Iterator[tuple[ControlConnection, ControlConnection]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = ControlConnection(socket.create_connection(listener.getsockname()))
        other = ControlConnection(listener.accept()[0])
        yield one, other
        one.close()
        other.close()


def hear(link: ControlConnection, count: int = 1) -> list[Message]:
    found: list[Message] = []

    def listen() -> bool:
        found.extend(link.receive())
        return len(found) >= count or bool(link.closed)

    until(listen, 10, f"{count} message(s)")
    return found


def test_messages_arrive_whole_and_in_order(pair: tuple[ControlConnection, ControlConnection]) -> None:
    one, other = pair
    sent = [Started(rank, 1000 + rank) for rank in range(50)] + [Lost(3, "x" * 100_000, 0.5, 7)]
    for message in sent:
        one.send(message)
    found: list[Message] = []
    while len(found) < len(sent):
        one.flush()
        found += hear(other)
    assert found == sent
    one.send(Beat())  # is not shown, but is a sign of life
    until(lambda: other.receive() == [] and other.silent < 0.5, 5, "the beat")


def test_last_words_are_heard(pair: tuple[ControlConnection, ControlConnection]) -> None:
    one, other = pair
    one.send(Started(1, 2))
    one.close()
    assert hear(other) == [Started(1, 2)]
    until(lambda: other.receive() == [] and other.closed, 5, "its end")
    assert other.closed == "it has closed the connection"


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "is no message of a Moesaic supervisor"),
        ((MAX_FRAME + 1).to_bytes(4, "big"), "is no message of a Moesaic supervisor"),
        (b"\0\0\0\x03abc", "is it another version?"),
    ],
)
def test_noise_ends_a_connection(pair: tuple[ControlConnection, ControlConnection], noise: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as noisy:
        link = ControlConnection(listener.accept()[0])
        noisy.sendall(noise)
        assert hear(link) == [] and said in link.closed


def test_silence_is_measured_from_when_this_process_ran(pair: tuple[ControlConnection, ControlConnection]) -> None:
    now = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        link = ControlConnection(listener.accept()[0], clock=lambda: now[0])
        for _ in range(8):
            now[0] += 0.5
            link.receive()
        assert link.silent == 4.0
        now[0] += 5.0  # it was stopped itself
        link.receive()
        assert link.silent == 0.0
        other.close()
        link.close()


# ---- whom the head refuses ----


class Head:
    def __init__(self, size: int, local: int) -> None:
        port = free_ports(4 + size)
        self.hosts = Hosts(head="127.0.0.1", port=port, size=size, first=0, local=local)
        self.plan = make_plan(EngineConfig(data_parallel_size=size), hosts=self.hosts)
        self.connections: list[ControlConnection] = []
        root = Path(tempfile.gettempdir())
        self.supervisor = HeadSupervisor(self.plan, ServerConfig(), self.hosts, root, 30.0, lambda url: None)

    def ask(self, change: Callable[[Hello], dict[str, Any]] = lambda hello: {}, **given: Any) -> Message | None:
        """The head's answer; None: it takes this machine, and waits for others."""
        hello = Hello(versions=versions(), plan=self.plan, first=2, local=1)
        values = {name: getattr(hello, name) for name in Hello.__struct_fields__} | change(hello) | given
        link = ControlConnection(socket.create_connection(("127.0.0.1", self.hosts.port)))
        self.connections.append(link)
        link.send(Hello(**values))
        before, answers = len(self.supervisor.hosts), []

        def look() -> bool:
            self.supervisor._accept()
            answers.extend(link.receive())
            return bool(answers) or len(self.supervisor.hosts) > before

        until(look, 10, "an answer")
        return answers[0] if answers else None


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head(size=4, local=2)
    yield made
    for link in made.connections:
        link.close()
    made.supervisor._end()


def other_plan(**fields: Any) -> Callable[[Hello], dict[str, Any]]:
    return lambda hello: {"plan": structs.replace(hello.plan, **fields)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda hello: {"versions": {**hello.versions, "torch": "1.0"}}, "version of torch is 1.0 there and "),
        (lambda hello: {"versions": {}}, "version of moesaic is unknown there and "),
        (other_plan(data_parallel_size=5), "data_parallel_size is 5 there and 4 on the head"),
        (other_plan(dtype="bfloat16", max_model_len=9), "max_model_len is 9 there"),
        (
            other_plan(checkpoint={"config.json": (1, 2, 3, "abc")}),
            "model is another checkpoint there: config.json (1 bytes, digest abc) than on the head (",
        ),
        (lambda hello: {"first": 1}, "data_parallel_start_rank 1: the head has ranks 0 to 1"),
        (lambda hello: {"local": 3}, "data_parallel_size_local is 3: ranks 2 to 4 of 4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    head: Head, change: Callable[[Hello], dict[str, Any]], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = head.ask(change)
    assert isinstance(answer, Refused) and said in answer.error and not answer.again
    assert "event=host_refused" in capfd.readouterr().err
    assert not head.supervisor.hosts


def test_ranks_that_overlap_are_refused(head: Head) -> None:
    assert head.ask(first=2, local=1) is None
    answer = head.ask(first=2, local=2)
    assert answer == Refused("data_parallel_start_rank 2: 127.0.0.1 has rank 2")
    head.supervisor.hosts[0].link._heard -= 2.0  # it may be the same machine, whose end has not been noticed yet
    answer = head.ask(first=2, local=1)
    assert isinstance(answer, Refused) and answer.again


def test_whoever_says_nothing_is_shown_out(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.head.HELLO_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", head.hosts.port)) as silent:
        silent.setblocking(False)
        until(lambda: head.supervisor._accept() or head.supervisor.unknown_peers, 5, "it is there")
        until(lambda: head.supervisor._accept() or not head.supervisor.unknown_peers, 5, "it is gone")


def test_whoever_comes_and_goes_at_once_does_no_harm(head: Head) -> None:
    """A port scanner resets the connection before it is accepted."""
    with socket.create_connection(("127.0.0.1", head.hosts.port)) as scanner:
        scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for _ in range(3):
        head.supervisor._accept()
    assert not head.supervisor.unknown_peers
    assert head.ask(first=2, local=1) is None, "others are still heard"


def test_a_taken_port_is_refused(head: Head) -> None:
    with pytest.raises(ValueError, match=rf"cannot listen on 127.0.0.1:{head.hosts.port} \(--data-parallel-address\)"):
        HeadSupervisor(head.plan, ServerConfig(), head.hosts, Path(tempfile.gettempdir()), 30.0, lambda url: None)


def test_plans_may_differ_in_what_a_machine_decides_for_itself() -> None:
    plan: Plan = make_plan(EngineConfig(data_parallel_size=2))
    own = structs.replace(plan, model_path="/elsewhere", num_kv_blocks=7, threads_per_rank=9, native_kernels="avx2")
    assert differences(own, plan) == []
    assert differences(structs.replace(plan, block_size=8), plan) == ["block_size is 8 there and 16 on the head"]


def test_weights_are_compared_wherever_they_lie(tmp_path: Path) -> None:
    for path in CHECKPOINT.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    here, there = (make_plan(EngineConfig(model=str(path))) for path in (CHECKPOINT, tmp_path))
    assert other_weights(there, here) == "" and differences(there, here) == []
    weights = tmp_path / "model.safetensors"
    payload = bytearray(weights.read_bytes())
    payload[-5] ^= 1
    weights.write_bytes(payload)
    there = make_plan(EngineConfig(model=str(tmp_path)))
    assert other_weights(there, here).startswith("model is another checkpoint there: model.safetensors (")
