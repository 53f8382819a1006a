"""What goes with the steps of a rank: words in the record, and hooks around the forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import hf_tiny
import pytest
import torch
from test_runner import PROMPT, decode, first_step, make_runner

from dbo.steps import Steps, drain
from engine.agreement import Agreement, Proposal, StepPlan
from engine.hooks import Companions, StepCompanion, StepHook
from engine.schedule import Schedule
from ep.recorder import Kind
from ep.transport.group import MailboxGroup, MailboxWorld
from models.base import CausalLM

torch.set_num_threads(1)


class Says(StepCompanion):
    """Adds its words to every record, and keeps what it is told."""

    def __init__(self, *words: int, goes: bool = True) -> None:
        self.num_words = len(words)
        self.words = words
        self.goes = goes
        self.heard: list[Sequence[Sequence[int]]] = []

    def propose(self, schedule: Schedule) -> Sequence[int]:
        return self.words

    def join(self, plan: StepPlan, said: Sequence[Sequence[int]]) -> StepHook | None:
        self.heard.append(said)
        return StepHook() if self.goes else None


def test_each_hears_its_own_words_of_every_rank() -> None:
    """None knows of another: their number and order are those of the list."""
    world = MailboxWorld(3)
    ranks = [[Says(rank, 10 + rank), Says(goes=False), Says(-rank)] for rank in range(3)]
    companions = [Companions(members) for members in ranks]
    companions[1].muted = True  # as in practice: its record is as long as the others'
    agreements = [Agreement(MailboxGroup(world, rank), 4, 0) for rank in range(3)]
    pending = [
        agreement.propose(Proposal(1, True, False, 9, words=own.propose(Schedule(0))))
        for agreement, own in zip(agreements, companions, strict=True)
    ]
    plans = [plan.wait() for plan in pending]
    assert plans[0] == plans[1] == plans[2] and plans[0].epoch == 4
    assert [len(own.join(plan)) for own, plan in zip(companions, plans, strict=True)] == [2, 0, 2]
    for rank in (0, 2):
        first, silent, last = ranks[rank]
        assert first.heard == [[(0, 10), (0, 0), (2, 12)]]
        assert silent.heard == [[(), (), ()]]
        assert last.heard == [[(0,), (0,), (-2,)]]
    assert not ranks[1][0].heard


class Notes(StepHook):
    def __init__(self, name: str, log: list[str], yields: int = 0) -> None:
        self.name, self.log, self.yields = name, log, yields

    def begin(self, schedule: Schedule) -> None:
        self.log.append(f"{self.name} begins {schedule.step_id}")

    def before(self) -> None:
        self.log.append(f"{self.name} before")

    def after(self) -> Steps[None]:
        for _ in range(self.yields):
            yield
        self.log.append(f"{self.name} after")

    def ended(self, kind: Kind, num_tokens: int) -> None:
        self.log.append(f"{kind.name} {num_tokens}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CausalLM]:
    yield hf_tiny.load_ours(hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("hooks")).path)


@pytest.mark.parametrize("threaded", [False, True])
def test_hooks_act_around_the_forward_pass(model: CausalLM, threaded: bool) -> None:
    log: list[str] = []
    first, second = Notes("a", log, yields=2), Notes("b", log)
    runner, plain = make_runner(model, threaded), make_runner(model)
    flights = [runner.launch(first_step(), [first, second]), runner.launch(decode(1, len(PROMPT)))]
    tokens = [drain(flight.steps()).token_ids for flight in flights]
    runner.close()
    assert tokens == [drain(plain.steps(step)).token_ids for step in (first_step(), decode(1, len(PROMPT)))]
    prepared, computed = [f"PREPARING {len(PROMPT)}"] * 2, [f"FORWARD {len(PROMPT)}"] * 2
    around = ["a begins 0", "b begins 0", "a before", "b before", *prepared, *computed]
    assert log == [*around, "a after", "b after", *["BALANCING 0"] * 2, *["SAMPLING 1"] * 2]


def test_turns_of_hooks_are_turns_of_the_step(model: CausalLM) -> None:
    runner = make_runner(model)
    turns = [sum(1 for _ in runner.steps(Schedule(0), hooks)) for hooks in ((), [Notes("a", [], yields=2)])]
    assert turns[1] == turns[0] + 2


def test_a_hook_that_fails_fails_its_step(model: CausalLM) -> None:
    class Fails(StepHook):
        def before(self) -> None:
            raise ValueError("no")

    runner = make_runner(model, threaded=True)
    with pytest.raises(ValueError, match="no"):
        drain(runner.launch(first_step(), [Fails()]).steps())
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        drain(runner.launch(decode(1, len(PROMPT))).steps())
    runner.close()
