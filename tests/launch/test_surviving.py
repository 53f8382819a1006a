"""A server that loses ranks under load: no client notices, and the rank comes back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest
from served import command_line, served, until
from streams import mode, wave


@pytest.mark.parametrize(
    ("backend", "kind", "num_losses"),
    [
        ("shm", signal.SIGKILL, 1),
        pytest.param("shm", signal.SIGKILL, 5, marks=pytest.mark.slow),
        pytest.param("gloo", signal.SIGKILL, 2, marks=pytest.mark.slow),
        pytest.param("shm", signal.SIGSTOP, 2, marks=pytest.mark.slow),
        pytest.param("gloo", signal.SIGSTOP, 1, marks=pytest.mark.slow),
    ],
)
def test_no_client_notices_a_lost_rank(tmp_path: Path, backend: str, kind: signal.Signals, num_losses: int) -> None:
    chance = random.Random(f"{backend} {kind}")
    with served(tmp_path, "-dp", "3", "--all2all-backend", backend) as server:
        expected = asyncio.run(wave(server))
        killed = []
        for _ in range(num_losses):
            name = f"rank {chance.randrange(3)}"

            def find(name: str = name) -> int | None:
                """None also while the front has not heard that the last one is gone."""
                pid = server.children().get(name)
                return None if mode(server) != "full" or pid in killed else pid

            victim = until(find, 60, "all ranks serve")
            killed.append(victim)

            def lose(victim: int = victim) -> None:
                time.sleep(chance.random())
                os.kill(victim, kind)

            assert asyncio.run(wave(server, lose)) == expected
        until(lambda: mode(server) == "full", 60, "all ranks serve")
        metrics = server.get("/metrics")
        assert f'moesaic:rank_losses_total{{model_name="moesaic-tiny"}} {num_losses}.0' in metrics
        assert asyncio.run(wave(server)) == expected
        for pid in killed:
            assert not command_line(pid)
    log = (tmp_path / "server.log").read_text()
    assert log.count("event=rank_restarted") == num_losses and "Traceback" not in log
