"""Hooks: what goes with the steps of a rank beside its requests. They are a list, and none of them knows of another.

A companion (`StepCompanion`) lives as long as the rank, on the rank's thread. It may add words to the record of every
step, by which the ranks agree (engine/agreement.py), and may send a `StepHook` with a step that is computed: that one
acts on the device thread, around the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from dbo.steps import Steps
from engine.agreement import StepPlan
from engine.schedule import Schedule
from ep.recorder import Kind
from front.messages import FrontToRank, RankStats, RankToFront

LOOK_SECONDS = 0.005  # how soon a rank that sleeps looks again what a busy companion has done


class StepHook:
    """Of one step or of several, on the thread that computes them. What it does not do is left as it is here.

    needed: there is to be a step for it, though no rank has tokens; the same on all ranks. watches: it only looks on.
    """

    needed = False
    watches = False

    def begin(self, schedule: Schedule) -> None:
        """The step begins."""

    def before(self) -> None:
        """Its inputs are laid out, and nothing is computed yet."""

    def after(self) -> Steps[None]:
        """The forward pass is made. Yields where bytes are in flight, equally often on all ranks. Raises PeerLost."""
        yield from ()

    def ended(self, kind: Kind, num_tokens: int) -> None:
        """A part of the step is over: PREPARING, FORWARD, BALANCING (`after` of all hooks, if any does more than
        watch), SAMPLING or DRAFTING."""


class Lesson(NamedTuple):
    """So many requests at a time are to be computed by this rank, beside what the others compute, as long as goes_on()
    says so, which none without requests says for ever."""

    num_requests: int
    goes_on: Callable[[], bool]


class StepCompanion:
    """num_words: that it adds to the record, equally many on all ranks. practises: a lesson of its own is under way."""

    num_words = 0
    practises = False

    @property
    def has_work(self) -> bool:
        """The ranks are to stay awake for it."""
        return False

    @property
    def busy(self) -> bool:
        """It thinks about something, or has something for the front: a rank that sleeps looks again soon."""
        return False

    def formed(self) -> None:
        """The ranks of an epoch have met."""

    def dropped(self) -> None:
        """The epoch is over; no step runs any more."""

    def close(self) -> None:
        """The rank ends."""

    def lessons(self) -> Iterator[Lesson]:
        """What it wants to be practised by all ranks that have met, before they say that they are ready."""
        return iter(())

    def scheduling(self) -> None:
        """A schedule is about to be made."""

    def propose(self, schedule: Schedule) -> Sequence[int]:
        """The words of the next record; the schedule is made."""
        return ()

    def agreed(self, plan: StepPlan) -> None:
        """The ranks have agreed on what they do next."""

    def join(self, plan: StepPlan, proposals: Sequence[Sequence[int]]) -> StepHook | None:
        """A step follows. proposals: the words of every rank. What goes with it."""
        return None

    def take(self, message: FrontToRank) -> bool:
        """Whether the message was for this one."""
        return False

    def add_to(self, stats: RankStats) -> RankStats:
        """With what it counts."""
        return stats

    def take_events(self) -> Sequence[RankToFront]:
        """What is to be told to the front."""
        return ()


class Companions:
    """All of one rank. muted: the words of those that do not practise are zeros, and they go with no step."""

    def __init__(self, members: Sequence[StepCompanion]) -> None:
        self.members = members
        self.muted = False
        ends = list(accumulate(member.num_words for member in members))
        self._num_words = ends[-1] if ends else 0
        places = [slice(end - member.num_words, end) for member, end in zip(members, ends, strict=True)]
        self._places = dict(zip(members, places, strict=True))
        self._watching, self._hearing = self._that("scheduling"), self._that("agreed")
        self._speaking, self._joining = self._that("propose"), self._that("join")

    def _that(self, name: str) -> list[StepCompanion]:
        """Those that have a method of their own of that name: steps are short, and what a call costs counts."""
        base = getattr(StepCompanion, name)
        return [member for member in self.members if getattr(type(member), name) is not base]

    @property
    def has_work(self) -> bool:
        return not self.muted and any(member.has_work for member in self.members)

    @property
    def busy(self) -> bool:
        return not self.muted and any(member.busy for member in self.members)

    def scheduling(self) -> None:
        for member in self._watching:
            member.scheduling()

    def agreed(self, plan: StepPlan) -> None:
        for member in self._hearing:
            member.agreed(plan)

    def propose(self, schedule: Schedule) -> list[int]:
        """All their words, one after another."""
        words: list[int] = []
        for member in self._speaking:
            words += member.propose(schedule) if not self.muted or member.practises else [0] * member.num_words
        assert len(words) == self._num_words
        return words

    def join(self, plan: StepPlan) -> list[StepHook]:
        hooks: list[StepHook] = []
        for member in self._joining:
            if not self.muted or member.practises:
                hook = member.join(plan, self.said(member, plan))
                if hook is not None:
                    hooks.append(hook)
        return hooks

    def said(self, member: StepCompanion, plan: StepPlan) -> list[Sequence[int]]:
        """The words of this one, of every rank."""
        place = self._places[member]
        return [words[place] for words in plan.words]
