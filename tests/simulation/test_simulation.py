"""The control plane under a few hundred seeded schedules; `python -m tests.simulation` runs as many as one likes."""

from __future__ import annotations

import pytest
from msgspec import structs

from front.params import SamplingParams
from tests.simulation.__main__ import run_one
from tests.simulation.plants import PLANTS
from tests.simulation.schedules import draw
from tests.simulation.simulation import Simulation
from tests.simulation.standin import Facts, continuation

# Seeds that find what was wrong once (tests/simulation/plants.py). When schedules are drawn otherwise, look for others:
# python -m tests.simulation --schedules 3000 --plant NAME
REGRESSIONS = {
    "end-with-the-last": 5,
    "fail-unread": 22,
    "forget-filled": 337,
    "form-alone": 5,
    "open-recovery": 10,
    "sleep-on": 894,
    "take-other-weights": 202,
    "wait-unsaid": 50,
    "thread-beats": 2,
}


@pytest.mark.parametrize("first", [0, 20, *(pytest.param(first, marks=pytest.mark.slow) for first in (40, 60))])
def test_schedules(first: int) -> None:
    for seed in range(first, first + 20):
        _, error = run_one(seed)
        assert not error, f"python -m tests.simulation --schedules 1 --verbose --seed {seed}: {error}"


@pytest.mark.parametrize(
    "plant",
    [
        "repeat-token",
        "keep-steps",
        "skip-expert",
        "new-detokenizer",
        "min-tokens-anew",
        "work-is-never-a-hang",
        "work-is-a-hang",
        "accusers-are-accused",
        "nobody-is-accused",
    ],
)
def test_a_planted_bug_is_found(plant: str) -> None:
    with PLANTS[plant]():
        assert any(run_one(seed)[1] for seed in range(40))


@pytest.mark.parametrize("plant", REGRESSIONS)
def test_what_was_wrong_once(plant: str) -> None:
    seed = REGRESSIONS[plant]
    assert run_one(seed)[1] == ""
    with PLANTS[plant]():
        assert run_one(seed)[1]


def test_the_same_seed_gives_the_same_events() -> None:
    traces: list[list[str]] = []
    for _ in range(2):
        trace: list[str] = []
        simulation = Simulation(draw(65), trace.append)
        simulation.run()
        traces.append(trace)
    assert traces[0] == traces[1] and len(traces[0]) > 50


def test_faults_do_happen() -> None:
    total = sum((run_one(seed)[0] for seed in range(40)), start=run_one(100)[0] + run_one(116)[0])
    for what in (
        "kill",
        "stop",
        "hang",
        "busy",
        "cut",
        "aloof",
        "pause",
        "slow",
        "crash",
        "front",
        "supervisor",
        "resize",
        "all",
        "away",
        "changed",
        "stall",
        "replayed",
        "refused",
    ):
        assert total[what] > 0, what


def test_without_faults_tokens_are_those_of_the_plain_continuation() -> None:
    schedule = structs.replace(draw(3), faults=[])
    simulation = Simulation(schedule)
    simulation.run()
    assert simulation.counts["losses"] == 0
    for client in simulation.front.clients:
        if not client.aborted:
            params = client.request.prompt.params
            assert params.seed is not None
            expected = continuation(client.request.prompt.token_ids, params, params.seed, schedule.facts)
            assert client.tokens[0] == expected.token_ids and client.texts[0] == expected.text


def test_a_continuation_depends_on_everything_before_it() -> None:
    facts, params = Facts(1, 4), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    plain = continuation([1, 2, 3], params, 1, facts).token_ids
    assert continuation([2, 2, 3], params, 1, facts).token_ids != plain
    assert continuation([1, 2, 3], params, 2, facts).token_ids == plain
    assert continuation([1, 2, 3, *plain[:4]], params, 1, facts).token_ids[:4] == plain[4:]
