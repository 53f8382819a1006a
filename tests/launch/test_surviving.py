"""A server that loses ranks under load, by a kill, by a hang, or all at once: no client notices, and they come back. Tests of
the same kind of server share one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import streams
from hanging import NAP, SLEEP, hanging, losses
from served import Server, command_line, served, until
from streams import all_serve, answer, kill_all, mode, ranks_of, undisturbed, wave

TOKENS_OF_A_WAVE = streams.NUM_STREAMS * streams.NUM_TOKENS


class Surviving:
    def __init__(self, server: Server, log: Path) -> None:
        self.server = server
        self._log = log
        self._read = 0

    @property
    def num_losses(self) -> int:
        line = 'moesaic:rank_losses_total{model_name="moesaic-tiny"} '
        [counted] = [text for text in self.server.get("/metrics").splitlines() if text.startswith(line)]
        return round(float(counted.removeprefix(line)))

    def begin(self) -> list[list[int]]:
        """What streams are expected to say; the log begins here."""
        all_serve(self.server)
        self._read = len(self._log.read_text())
        return undisturbed(self.server)

    @property
    def log(self) -> str:
        return self._log.read_text()[self._read :]


@pytest.fixture(scope="module")
def surviving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surviving]:
    backend, num_ranks = request.param
    folder = tmp_path_factory.mktemp(f"{backend}-{num_ranks}")
    with hanging(folder), served(folder, "-dp", str(num_ranks), "--all2all-backend", backend) as server:
        yield Surviving(server, folder / "server.log")


def on(*servers: tuple[str, int]) -> pytest.MarkDecorator:
    """(backend, number of ranks) of the servers it runs on; the first one is enough for `make test`."""
    params = [
        pytest.param(server, id=f"{server[0]}-{server[1]}", marks=[pytest.mark.slow] if number else [])
        for number, server in enumerate(servers)
    ]
    return pytest.mark.parametrize("surviving", params, indirect=True)


SHM, GLOO = ("shm", 3), ("gloo", 3)


@on(SHM, GLOO)
@pytest.mark.parametrize("num_losses", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_no_client_notices_a_killed_rank(surviving: Surviving, num_losses: int) -> None:
    lose_ranks(surviving, signal.SIGKILL, num_losses)


@pytest.mark.slow
@on(SHM, GLOO)
def test_no_client_notices_a_stopped_rank(surviving: Surviving) -> None:
    lose_ranks(surviving, signal.SIGSTOP, 2)


def lose_ranks(surviving: Surviving, kind: signal.Signals, num_losses: int) -> None:
    expected, server, before = surviving.begin(), surviving.server, surviving.num_losses
    chance = random.Random(f"{kind} {num_losses}")
    killed: list[int] = []
    for _ in range(num_losses):
        name = f"rank {chance.randrange(3)}"

        def find(name: str = name) -> int | None:
            """None also while the front has not heard that the last one is gone."""
            pid = server.children().get(name)
            return None if mode(server) != "full" or pid in killed else pid

        victim = until(find, 60, "all ranks serve")
        killed.append(victim)
        lost_after = chance.randrange(TOKENS_OF_A_WAVE // 2)
        assert asyncio.run(wave(server, lambda victim=victim: os.kill(victim, kind), lost_after)) == expected
    all_serve(server)
    assert surviving.num_losses == before + num_losses
    assert asyncio.run(wave(server)) == expected
    for pid in killed:
        assert not command_line(pid)
    assert surviving.log.count("event=rank_restarted") == num_losses and "Traceback" not in surviving.log


@pytest.mark.attacks
@on(SHM, GLOO, ("shm", 4), ("gloo", 2))
@pytest.mark.parametrize(
    "kind", [pytest.param(SLEEP, id="asleep"), pytest.param(NAP, id="napping", marks=pytest.mark.slow)]
)
def test_a_hung_loop_is_killed_and_nobody_else(surviving: Surviving, kind: signal.Signals) -> None:
    expected, server = surviving.begin(), surviving.server
    children = server.children()
    hung_after = TOKENS_OF_A_WAVE // 10
    assert asyncio.run(wave(server, lambda: os.kill(children["rank 1"], kind), hung_after)) == expected
    all_serve(server)
    now = server.children()
    assert all((now[name] == pid) == (name != "rank 1") for name, pid in children.items())
    idle = now["rank 0"]
    os.kill(idle, kind)  # while nothing is asked for
    until(lambda: server.children().get("rank 0") != idle, 20, "the idle one is killed")
    all_serve(server)
    assert asyncio.run(wave(server)) == expected
    [first, second] = losses(surviving.log)
    assert first.startswith(f"event=rank_lost rank=1 pid={children['rank 1']} reason='hung: no heartbeat for 2.")
    assert second.startswith(f"event=rank_lost rank=0 pid={idle} reason='hung: no heartbeat for 2.")
    assert "Traceback" not in surviving.log


@pytest.mark.attacks
@on(SHM, ("shm", 4))
@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_all_ranks_killed(surviving: Surviving, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    monkeypatch.setattr(streams, "NUM_STREAMS", 8 if rounds == 1 else 64)
    expected, server, before = surviving.begin(), surviving.server, surviving.num_losses
    for _ in range(rounds):
        all_serve(server)

        def during() -> None:
            killed = set(ranks_of(server).values())
            kill_all(server)

            def known() -> bool:  # or others serve already, before it was asked
                said = answer(lambda: server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
                if not isinstance(said, tuple):
                    return killed.isdisjoint(ranks_of(server).values())
                status, again, body = said
                assert status == 503 and again and "of" in body and "ranks serve" in body, body
                return True

            until(known, 10, "it says that none serves, or others do")

        assert asyncio.run(wave(server, during, TOKENS_OF_A_WAVE // 10)) == expected
    all_serve(server)
    assert surviving.num_losses == before + rounds * len(ranks_of(server))
