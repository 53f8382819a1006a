"""What a trace (front/trace_file.py) says of its steps: how long they took, what was computed, what travelled, what was
hidden.

Ranks wait for each other in every exchange, so that what the slowest computes between two of them is what the step
takes; and an exchange begins when the last rank has sent. Both are read from all ranks' slices together.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

Slice = dict[str, Any]

_COMPUTED = frozenset(("attention", "dispatch", "experts", "combine"))


class StepFigures(NamedTuple):
    """Of one forward pass; milliseconds.

    forward: of the slowest rank. computed: attention, experts, and what packing tokens takes, always of the slowest
    rank. travelled: from the end of the last rank's dispatch or combine until every rank has waited for it; with
    several lanes something else is done in that time, so it says how long an exchange takes only where steps are not
    split. flight, waited: summed over lanes and ranks, how long tokens were in flight for a rank and for how much of
    that it waited.
    """

    step: int
    tokens: tuple[int, ...]  # of each rank
    lanes: int
    forward: float
    computed: float
    travelled: float
    flight: float
    waited: float


def figures(trace: dict[str, Any]) -> list[StepFigures]:
    """Of every step that all ranks have recorded whole, in their order."""
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    ranks = trace["otherData"]["ranks"]
    threads = {
        event["tid"]: event["args"]["name"].split()
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    forwards: dict[int, dict[int, Slice]] = defaultdict(dict)
    lanes: dict[int, dict[tuple[int, int], list[Slice]]] = defaultdict(lambda: defaultdict(list))
    for item in slices:
        _, rank, *place = threads[item["tid"]]
        if item["name"] == "forward":
            forwards[item["args"]["step"]][int(rank)] = item
        elif item["cat"] == "lane":
            lanes[item["args"]["step"]][int(rank), int(place[-1])].append(item)
    whole = {step: forward for step, forward in sorted(forwards.items()) if sorted(forward) == sorted(ranks)}
    within = {step: _within(forward, lanes[step]) for step, forward in whole.items()}
    return [
        _step(step, forward, within[step])
        for step, forward in whole.items()
        if within[step] and len({len(items) for items in within[step].values()}) == 1
    ]


def _within(forward: dict[int, Slice], lanes: dict[tuple[int, int], list[Slice]]) -> dict[tuple[int, int], list[Slice]]:
    """Without what a drafter computes and exchanges in the same step, after the forward pass."""
    ends = {rank: _end(item) for rank, item in forward.items()}
    return {place: [item for item in items if item["ts"] < ends[place[0]]] for place, items in lanes.items()}


def _step(step: int, forward: dict[int, Slice], lanes: dict[tuple[int, int], list[Slice]]) -> StepFigures:
    """Every rank and lane has equally many slices of the same kinds, in order: place by place they belong together."""
    computed = travelled = flight = waited = 0.0
    for lane in sorted({lane for _, lane in lanes}):
        of_ranks = [items for (_, own), items in lanes.items() if own == lane]
        for place, item in enumerate(of_ranks[0]):
            here = [items[place] for items in of_ranks]
            if item["name"] in _COMPUTED:
                computed += max(one["dur"] for one in here)
            else:
                sent = [_end(items[place - 1]) for items in of_ranks]
                travelled += max(0.0, max(map(_end, here)) - max(sent))
                flight += sum(_end(one) - begun for one, begun in zip(here, sent, strict=True))
                waited += sum(one["dur"] for one in here)
    return StepFigures(
        step=step,
        tokens=tuple(forward[rank]["args"]["tokens"] for rank in sorted(forward)),
        lanes=len({lane for _, lane in lanes}),
        forward=max(item["dur"] for item in forward.values()) / 1000,
        computed=computed / 1000,
        travelled=travelled / 1000,
        flight=flight / 1000,
        waited=waited / 1000,
    )


def _end(item: Slice) -> float:
    end: float = item["ts"] + item["dur"]
    return end
