"""Experts are balanced while clients are served: they notice nothing, and an operator can see and steer it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import streams
from prometheus_client.parser import text_string_to_metric_families
from served import Server, served, until
from streams import mode, wave

from eplb.offline.placement_file import decode_placement
from eplb.offline.trace import read_trace

BY_HAND = {"window_size": 20, "reweight_interval": 0, "move_interval": 0}
RESTLESS = {"window_size": 20, "memory_steps": 5, "reweight_interval": 2, "move_interval": 4, "min_gain": 0.0}


def balanced(tmp_path: Path, ranks: int, eplb: dict[str, Any], *options: str) -> Any:
    words = ["-dp", str(ranks), "--dtype", "float32", "--enable-eplb", "--eplb-config", json.dumps(eplb)]
    return served(tmp_path, *words, "--admin-api-key", "boss", "--eplb-record-dir", str(tmp_path), *options)


def command(server: Server, what: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer boss"}
    request = urllib.request.Request(f"{server.url}/eplb/{what}", json.dumps(body or {}).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def steps_from_now(server: Server, steps: int) -> None:
    goal = server.get("/eplb/status")["steps"] + steps
    until(lambda: server.get("/eplb/status")["steps"] >= goal, 60, f"{steps} more steps")


def test_a_rebalance_under_load_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "NUM_TOKENS", 200)  # for as many steps
    with balanced(tmp_path, 2, BY_HAND, "--num-redundant-experts", "4") as server:
        with pytest.raises(urllib.error.HTTPError) as refusal:
            command(server, "rebalance")
        assert refusal.value.code == 409 and "no tokens" in refusal.value.read().decode()
        expected = asyncio.run(wave(server))  # also the load to plan for
        before, start = server.get("/eplb/status"), server.get("/eplb/placement")
        assert before["moves"] == before["reweights"] == 0
        answers: dict[str, Any] = {}

        def rebalance() -> None:
            command(server, "record", {"path": "loads.jsonl"})
            steps_from_now(server, 10)
            answers["plan"] = command(server, "plan")
            answers["rebalance"] = command(server, "rebalance")
            until(lambda: server.get("/eplb/status")["moves"] >= answers["rebalance"]["moves"], 60, "all have moved")
            steps_from_now(server, 10)
            command(server, "record", {"path": None})

        assert asyncio.run(wave(server, rebalance)) == expected
        assert 0 < len(answers["plan"]["moved"]) == answers["plan"]["moves"]
        assert asyncio.run(wave(server)) == expected
        status = server.get("/eplb/status")
        assert (status["moving"], status["failures"], status["last_error"], status["recording"]) == (0, 0, "", "")
        assert 0 < status["bytes_moved"] <= answers["rebalance"]["bytes"]
        taken = answers["rebalance"]
        assert statistics.fmean(taken["balance_planned"]) > statistics.fmean(taken["balance_now"])
        assert len(status["window_balance"]) == len(status["step_balance"]) == 4  # one drafts

        now = decode_placement(json.dumps(server.get("/eplb/placement")).encode()).placement
        old = decode_placement(json.dumps(start).encode()).placement
        assert now.slot_to_expert.shape == old.slot_to_expert.shape == (4, 2, 10)
        assert (now.slot_to_expert != old.slot_to_expert).any()
        trace = read_trace(tmp_path / "loads.jsonl")
        assert trace.load.shape[1:] == (4, 16) and trace.steps.sum() >= 20
        # each token has as many experts in every layer as in the others; the last one drafts
        assert len(set(trace.load[:, :3].sum((0, 2)).tolist())) == 1
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(server.get("/metrics"))
            for sample in family.samples
        }
        assert samples["moesaic:eplb_moves_total"] == status["moves"]
        assert samples["moesaic:eplb_failures_total"] == samples["moesaic:eplb_failing"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_next_rank_leads_when_the_leader_is_lost(tmp_path: Path, backend: str) -> None:
    with balanced(tmp_path, 4, RESTLESS, "--all2all-backend", backend, "--num-redundant-experts", "8") as server:
        expected = asyncio.run(wave(server))
        assert server.get("/eplb/status")["moves"] > 0

        def lose_the_leader() -> None:
            os.kill(server.children()["rank 0"], signal.SIGKILL)
            assert server.get("/eplb/status")["rank"] in (0, 1)  # whoever leads answers, also in the middle of it
            until(lambda: mode(server) == "full", 60, "rank 0 is back")

        assert asyncio.run(wave(server, lose_the_leader)) == expected
        assert asyncio.run(wave(server)) == expected
        status = server.get("/eplb/status")
        assert (status["rank"], status["failures"], status["last_error"]) == (0, 0, "")
        assert status["epoch"] == 2 and status["steps"] > 0


@pytest.mark.slow
def test_a_server_begins_with_a_planned_placement(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with balanced(first, 2, BY_HAND, "--num-redundant-experts", "4") as server:
        expected = asyncio.run(wave(server))
        command(server, "rebalance")
        until(lambda: server.get("/eplb/status")["moves"] > 0, 60, "experts have moved")
        until(lambda: server.get("/eplb/status")["moving"] == 0, 60, "all have moved")
        placement = server.get("/eplb/placement")
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(placement))
    eplb = {**BY_HAND, "placement": str(file)}
    with balanced(second, 2, eplb, "--num-redundant-experts", "4") as server:
        assert server.get("/eplb/placement")["checksum"] == placement["checksum"]
        assert asyncio.run(wave(server)) == expected
