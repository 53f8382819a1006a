"""Real ranks move experts under load, through shared memory and gloo, with the balancer on its thread; one is killed meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_tiny
import msgspec
import numpy as np
import pytest
from balanced import RESTLESS
from rank_parts import make_plan
from survivors import undisturbed
from test_rank_processes import cpu_seconds
from test_survival_processes import JOBS, Front

from configs.eplb import EplbConfig
from front.messages import BalanceCommand, BalanceReply, BalanceReport, RankReady, RankToFront, Shutdown

SLOW = EplbConfig(
    window_size=8, reweight_interval=2, move_interval=0, move_budget_mib=0.004
)  # an expert takes many steps
BACKENDS = ["shm", pytest.param("gloo", marks=pytest.mark.slow)]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("balance")).path


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> dict[int, list[int]]:
    return undisturbed(checkpoint, JOBS)


class BalancedFront(Front):
    """Asks the lowest live rank."""

    def ask(self, kind: Any, path: str | None = None) -> Any:
        number = time.monotonic_ns()
        self.send(self.alive.index(True), BalanceCommand(command_id=number, kind=kind, path=path))

        def mine(message: RankToFront) -> bool:
            return isinstance(message, BalanceReply) and message.command_id == number

        seen = self.wait_for(lambda seen: any(map(mine, seen)))
        (reply,) = [message for message in seen if isinstance(message, BalanceReply) and mine(message)]
        assert reply.error == ""
        return msgspec.json.decode(reply.body)

    def wait_moved(self) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while (status := self.ask("status")).get("moving", 0):
            assert time.monotonic() < deadline
            self.receive(0.05)
        return status  # type: ignore[no-any-return]


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Any]:
    fronts: list[BalancedFront] = []

    def begin(backend: str, config: EplbConfig, asynchronous: bool = True) -> BalancedFront:
        plan = make_plan(
            checkpoint,
            data_parallel_size=3,
            all2all_backend=backend,
            async_scheduling=asynchronous,
            slots_per_rank=4,
            exchange_timeout=20.0,
            eplb=config,
        )
        fronts.append(BalancedFront(plan))
        return fronts[-1]

    yield begin
    for front in fronts:
        front.close()


@pytest.mark.slow  # tests/launch/test_eplb_serving.py moves them in a server
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_experts_move_under_load(
    expected: dict[int, list[int]], start: Any, backend: str, asynchronous: bool, tmp_path: Path
) -> None:
    front = start(backend, RESTLESS, asynchronous)
    front.wait_ready()
    for index in range(6):
        front.add(index, index % 3)
    reported = front.wait_for(lambda seen: any(isinstance(message, BalanceReport) for message in seen))
    assert all(message.status.rank == 0 for message in reported if isinstance(message, BalanceReport))
    front.ask("record", str(tmp_path / "load.jsonl"))
    assert front.ask("rebalance")["taken"]
    front.wait_finished()
    assert front.outputs == expected
    status = front.wait_moved()
    assert status["moves"] > 0 and status["reweights"] > 0 and status.get("failures", 0) == 0, status
    for index in range(6, 12):
        front.add(index, index % 3)
    front.wait_finished()
    assert {index - 6: front.outputs[index] for index in range(6, 12)} == expected
    assert (tmp_path / "load.jsonl").stat().st_size > 0
    front.receive(0.3)  # the balancer still sees the last steps, and may follow
    moves = front.wait_moved()["moves"]
    taken = front.ask("rebalance")  # of ranks that sleep: they wake, bring it to an end, and sleep again
    assert front.wait_moved()["moves"] == moves + taken["moves"]
    front.receive(0.3)
    before = [cpu_seconds(process) for process in front.processes]
    time.sleep(1.0)
    used = [cpu_seconds(process) - then for process, then in zip(front.processes, before, strict=True)]
    assert max(used) < 0.1, f"idle ranks used {used} s of CPU in 1 s"
    front.send(1, Shutdown())
    assert [process.wait(10) for process in front.processes] == [0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_is_killed_while_experts_move(
    expected: dict[int, list[int]], start: Any, backend: str, victim: int
) -> None:
    front = start(backend, SLOW)
    front.begin(6)
    before = front.ask("status").get("moves", 0)
    assert front.ask("rebalance")["moves"] > 2
    front.wait_for(lambda _: front.ask("status").get("moves", 0) > before)  # on its way, and far from its end
    front.processes[victim].kill()
    front.lose(victim)
    front.wait_joined({0, 1, 2} - {victim})
    front.wait_finished()
    assert front.outputs == expected

    front.restart(victim)
    front.wait_for(lambda seen: any(isinstance(message, RankReady) for message in seen))
    front.alive[victim] = True
    front.tell()
    for index in range(6, 12):
        front.add(index, index % 3)
    front.wait_joined({0, 1, 2})
    front.wait_for(lambda _: all(len(front.outputs[index]) > 8 for index in range(6, 12)))
    assert front.ask("rebalance")["taken"]
    front.wait_finished()
    assert {index - 6: front.outputs[index] for index in range(6, 12)} == expected
    status = front.wait_moved()
    assert status.get("failures", 0) == 0, status
    placement = front.ask("placement")
    shares = np.array(placement["share_u16"])
    assert shares.shape == (3, 3, 4) and placement["alive"] == [True] * 3
    front.send(2, Shutdown())
    assert [process.wait(10) for process in front.processes] == [0, 0, 0]
