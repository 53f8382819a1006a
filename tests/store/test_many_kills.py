"""Ranks on one store that are killed again and again under load, one by one and all at once: no request fails, and no
token is another one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest
import streams
from served import served, until
from streams import mode, wave
from test_losing_all import all_serve, kill_all, ranks_of

pytestmark = [pytest.mark.store, pytest.mark.slow]

KILLS = 10
FORMATS = {"plain": [], "int8": ["--quantization", "int8"]}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("form", FORMATS)
def test_kills_of_one_and_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, num_ranks: int) -> None:
    monkeypatch.setattr(streams, "NUM_TOKENS", 120)
    chance = random.Random(f"{form} {num_ranks}")
    words = ["-dp", str(num_ranks), "--enable-dbo", "off", "--dtype", "bfloat16", "--deterministic", *FORMATS[form]]
    with served(tmp_path, *words) as server:
        expected = asyncio.run(wave(server))

        def lose_one() -> None:
            time.sleep(chance.random())
            os.kill(ranks_of(server)[f"rank {chance.randrange(num_ranks)}"], signal.SIGKILL)

        def back(losses: int) -> bool:
            """The front knows of the last loss too, which may have come after the wave."""
            known = f'rank_losses_total{{model_name="moesaic-tiny"}} {losses}.0' in server.get("/metrics")
            return known and mode(server) == "full"

        for losses in range(1, KILLS + 1):
            assert asyncio.run(wave(server, lose_one)) == expected
            until(lambda losses=losses: back(losses), 60, "all ranks serve")
        assert asyncio.run(wave(server, lambda: kill_all(server))) == expected
        all_serve(server)
        metrics = server.get("/metrics")
        assert f'rank_losses_total{{model_name="moesaic-tiny"}} {KILLS + num_ranks}.0' in metrics
        assert f'weight_store_mappings{{model_name="moesaic-tiny",store="0"}} {num_ranks}.0' in metrics
    log = (tmp_path / "server.log").read_text()
    assert log.count("event=rank_restarted") == KILLS + num_ranks and "Traceback" not in log
