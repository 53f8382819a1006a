"""`moesaic explain --nnodes N`: experts over N machines, or a replica on each."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from msgspec import structs

from configs.replicas import Sharing
from moesaic.explain import command

# qwen3moe-small in bfloat16 (docs/cpu_cluster.md).
SMALL = Sharing(
    nodes=2, ranks=1, experts=64, chosen=8, layers=16, hidden=1024, item=2, sent_item=2, expert_bytes=16 * 64 * 2359296,
    other_bytes=1 << 28, link=1.25e9, round_trip=2e-4, memory=16 << 30, reads=10e9,
)  # fmt: skip


def test_bytes_and_round_trips_by_the_formula() -> None:
    assert SMALL.bytes_per_token == pytest.approx(16 * (1 - 0.5**8) * (2 * 2048 + 64))
    assert SMALL.round_trips == pytest.approx(2 * 16 * 2e-4)
    halved = structs.replace(SMALL, sent_item=1)
    assert SMALL.bytes_per_token - halved.bytes_per_token == pytest.approx(16 * (1 - 0.5**8) * 1024)
    # Two ranks of each machine: a token goes to each far one that has some of its experts.
    four = structs.replace(SMALL, ranks=2)
    assert four.bytes_per_token == pytest.approx(16 * 2 * (1 - 0.75**8) * (2 * 2048 + 64))


def test_what_is_read_of_the_experts() -> None:
    one, many = SMALL.row(1), SMALL.row(100000)
    assert one.replica_ms == pytest.approx(1000 * SMALL.expert_bytes / 8 / 10e9)
    assert many.replica_ms == pytest.approx(2 * many.shared_ms) == pytest.approx(1000 * SMALL.expert_bytes / 10e9)


def test_advice() -> None:
    assert "with fewer run a replica on each" in SMALL.advice
    assert structs.replace(SMALL, round_trip=0.05).advice.startswith("Run a replica on each machine: at no number")
    assert structs.replace(SMALL, link=1e6).advice.startswith("Run a replica on each machine")
    assert "a replica does not fit" in structs.replace(SMALL, memory=1 << 30).advice


def explain(*words: str) -> str:
    done = CliRunner().invoke(command, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_embedded_model_on_two_machines() -> None:
    found = json.loads(explain("--json", "--nnodes", "2", "--expect-mbit", "1000", "--expect-ms", "0.5"))
    assert found["plan"]["data_parallel_size"] == 2 and found["plan"]["all2all_backend"] == "gloo"
    machines = found["machines"]
    assert (machines["nodes"], machines["link"], machines["round_trip"]) == (2, 1.25e8, 5e-4)
    assert machines["advice"].startswith("Run a replica on each machine") and len(machines["rows"]) == 5
    assert all(row["saved_ms"] < 0 < row["exchange_ms"] for row in machines["rows"])
    assert "machines" not in json.loads(explain("--json", "-dp", "2"))
    assert "or a replica on each" in explain("--nnodes", "2", "-dpl", "2,1")


def test_which_ranks_share_a_store() -> None:
    assert json.loads(explain("--json", "-dp", "3"))["distances"] == {"same_store": [1, 2]}
    apart = json.loads(explain("--json", "-dp", "2", "--num-redundant-experts", "0"))
    assert apart["distances"] == {"same_machine": [1]}
    four = json.loads(explain("--json", "--nnodes", "2", "-dp", "4"))
    assert four["distances"] == {"same_store": [1], "other_machine": [2, 3]}
    assert json.loads(explain("--json", "-dp", "1"))["distances"] == {}
    text = explain("-dp", "2")
    assert "same store" in text and "mapped: nothing is brought" in text


def test_auto_is_refused() -> None:
    done = CliRunner().invoke(command, ["--nnodes", "auto"])
    assert isinstance(done.exception, ValueError) and "--nnodes must be a number for explain" in str(done.exception)
