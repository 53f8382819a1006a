"""A profile as a trace file: Chrome's trace event format, as JSON, which ui.perfetto.dev and chrome://tracing open.

One process per node; of each rank one thread that schedules, one for its steps, and one per lane. Times are
microseconds from the first event, on the clock of the lowest rank.

Nodes of one machine share a clock. Between machines the difference is found from the agreements: no rank leaves the
agreement of a step before everybody has entered it, which bounds the difference from both sides. Format: "Trace Event
Format" (Google, document 1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec

from ep.recorder import Event, Kind, events_of
from front.messages import ProfilePart
from front.profiling import Profile

TraceEvent = dict[str, Any]
Node = tuple[str, str, str]  # host, clock, network

_encode = msgspec.json.Encoder().encode

NAMES = {
    Kind.ATTENTION: "attention",
    Kind.DISPATCH: "dispatch",
    Kind.WAIT_DISPATCH: "wait",
    Kind.EXPERTS: "experts",
    Kind.COMBINE: "combine",
    Kind.WAIT_COMBINE: "wait",
    Kind.SCHEDULING: "scheduling",
    Kind.AGREEMENT: "agreement",
    Kind.PREPARING: "preparing",
    Kind.FORWARD: "forward",
    Kind.BALANCING: "balancing",
    Kind.SAMPLING: "sampling",
    Kind.DRAFTING: "drafting",
}
_OF_LANES = frozenset(kind for kind in Kind if kind <= Kind.WAIT_COMBINE)
_OF_SCHEDULER = frozenset((Kind.SCHEDULING, Kind.AGREEMENT))
_THREADS = 256  # numbers for the threads of a rank: 0 schedules, 1 computes, 2 + lane


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What was written. ranks: those that are in it; lost: those that began and are not; dropped: events that found no
    place in their rank's memory (the latest ones)."""

    file: str
    ranks: list[int]
    lost: list[int]
    events: int
    dropped: int
    seconds: float


class Offset(NamedTuple):
    """What is added to a clock's times, give or take `error`, in ns; error None: unknown, and the offset a guess."""

    ns: int
    error: int | None


class Digest(NamedTuple):
    """What is to be known of a part before it is written. agreements: (epoch, step) -> its start and end."""

    num_events: int
    first: int
    lanes: list[int]
    agreements: dict[tuple[int, int], tuple[int, int]]


def write_trace(profile: Profile) -> Summary:
    """Write profile.path, one rank after another, so that no more than one is in memory; compressed when the name ends
    in .gz. OSError."""
    parts = profile.parts
    digests = {part.rank: digest_of(part) for part in parts}
    offsets = clock_offsets(parts, digests)
    shifts = {part.rank: offsets[part.clock].ns for part in parts}
    first = min((digests[rank].first + shift for rank, shift in shifts.items() if digests[rank].num_events), default=0)
    nodes = _nodes(parts)
    with _open(profile.path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = b""
        for event in _names(parts, nodes, digests):
            file.write(separator + _encode(event))
            separator = b",\n"
        for part in parts:
            for event in _rank_events(part, nodes[_node(part)], shifts[part.rank] - first):
                file.write(separator + _encode(event))
        other = {
            "ranks": [part.rank for part in parts],
            "lost_ranks": profile.lost,
            "dropped_events": {str(part.rank): part.num_dropped for part in parts},
            "clocks": {str(part.rank): _describe(offsets[part.clock]) for part in parts},
        }
        file.write(b'],"otherData":' + _encode(other) + b"}")
    return Summary(
        file=str(profile.path),
        ranks=[part.rank for part in parts],
        lost=profile.lost,
        events=sum(digest.num_events for digest in digests.values()),
        dropped=sum(part.num_dropped for part in parts),
        seconds=round(profile.seconds, 3),
    )


def _open(path: Path) -> IO[bytes]:
    return (
        cast(IO[bytes], gzip.open(path, "wb", compresslevel=5))
        if path.suffix == ".gz"
        else path.open("wb", buffering=1 << 20)
    )


def digest_of(part: ProfilePart) -> Digest:
    num_events, first, lanes = 0, 1 << 62, set[int]()
    agreements: dict[tuple[int, int], tuple[int, int]] = {}
    for event in events_of(part.events):
        num_events += 1
        first = min(first, event.start)
        if event.kind in _OF_LANES:
            lanes.add(event.lane)
        elif event.kind is Kind.AGREEMENT:
            agreements[event.amount, event.step] = (event.start, event.end)
    return Digest(num_events, first, sorted(lanes), agreements)


def clock_offsets(parts: Sequence[ProfilePart], digests: Mapping[int, Digest]) -> dict[str, Offset]:
    """By clock: how to come to that of the lowest rank.

    Of two ranks a and b, and of an agreement both took part in: a's end + offset >= b's start and b's end >= a's start
    + offset, since each needs the other's record.
    """
    offsets: dict[str, Offset] = {}
    if not parts:
        return offsets
    reference = min(parts, key=lambda part: part.rank)
    offsets[reference.clock] = Offset(0, 0)
    ours = digests[reference.rank]
    for part in parts:
        if part.clock in offsets:
            continue
        theirs = digests[part.rank]
        both = ours.agreements.keys() & theirs.agreements.keys()
        if both:  # clocks that drift apart during the profile may leave nothing between the bounds
            low = max(ours.agreements[key][0] - theirs.agreements[key][1] for key in both)
            high = min(ours.agreements[key][1] - theirs.agreements[key][0] for key in both)
            offsets[part.clock] = Offset((low + high) // 2, abs(high - low) // 2)
        else:
            offsets[part.clock] = Offset(ours.first - theirs.first, None)
    return offsets


def _describe(offset: Offset) -> str:
    if offset.error is None:
        return "another machine's, difference unknown"
    if offset.ns == offset.error == 0:
        return "the reference"
    return f"another machine's, moved by {offset.ns / 1e6:.3f} ms, within {offset.error / 1e6:.3f} ms"


def _node(part: ProfilePart) -> Node:
    return part.host, part.clock, part.network


def _nodes(parts: Sequence[ProfilePart]) -> dict[Node, int]:
    """The number of each, in the order of their lowest ranks."""
    nodes: dict[Node, int] = {}
    for part in sorted(parts, key=lambda part: part.rank):
        nodes.setdefault(_node(part), len(nodes))
    return nodes


def _names(parts: Sequence[ProfilePart], nodes: dict[Node, int], digests: Mapping[int, Digest]) -> Iterator[TraceEvent]:
    for (host, _, _), node in nodes.items():
        yield {"ph": "M", "name": "process_name", "pid": node, "tid": 0, "args": {"name": f"node {node}: {host}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": node, "tid": 0, "args": {"sort_index": node}}
    for part in parts:
        node = nodes[_node(part)]
        names = {0: "schedule", 1: "step"} | {2 + lane: f"lane {lane}" for lane in digests[part.rank].lanes}
        for place, name in names.items():
            tid = part.rank * _THREADS + place
            args = {"name": f"rank {part.rank} {name}"}
            yield {"ph": "M", "name": "thread_name", "pid": node, "tid": tid, "args": args}
            yield {"ph": "M", "name": "thread_sort_index", "pid": node, "tid": tid, "args": {"sort_index": tid}}


def _rank_events(part: ProfilePart, node: int, shift: int) -> Iterator[TraceEvent]:
    """In order of time."""
    dispatched: dict[tuple[int, int, int], TraceEvent] = {}  # (lane, step, layer) -> the arrow that waits for its end
    arrows: list[TraceEvent] = []
    last = 0
    for event in sorted(events_of(part.events), key=attrgetter("start")):
        last = max(last, event.end)
        place = 2 + event.lane if event.kind in _OF_LANES else int(event.kind not in _OF_SCHEDULER)
        where = {"pid": node, "tid": part.rank * _THREADS + place, "ts": (event.start + shift) / 1000}
        yield {"ph": "X", "name": NAMES[event.kind], "cat": "lane" if place > 1 else "rank", **where,
               "dur": (event.end - event.start) / 1000, "args": _args(event)}  # fmt: skip
        key = (event.lane, event.step, event.layer)
        arrow = {"name": "tokens", "cat": "exchange", **where}
        if event.kind is Kind.DISPATCH:
            dispatched[key] = arrow
        elif event.kind is Kind.COMBINE and key in dispatched:
            number = (part.rank << 32) + len(arrows)
            arrows.append({"ph": "s", "id": number, **dispatched.pop(key)})
            yield {"ph": "f", "bp": "e", "id": number, **arrow}
    yield from arrows
    if part.num_dropped:
        where = {"pid": node, "tid": part.rank * _THREADS + 1, "ts": max(0, last + shift) / 1000}
        yield {"ph": "i", "s": "t", "name": f"no room for {part.num_dropped} more events", "cat": "rank", **where}


def _args(event: Event) -> dict[str, int | str]:
    if event.kind is Kind.AGREEMENT:
        return {"epoch": event.amount, "step": event.step}
    if event.kind not in _OF_LANES:
        return {"step": event.step, "tokens": event.amount}
    args: dict[str, int | str] = {"step": event.step, "layer": event.layer, "tokens": event.amount}
    if event.kind in (Kind.EXPERTS, Kind.COMBINE):
        args["rows"] = args.pop("tokens")
    elif event.kind is Kind.WAIT_DISPATCH:
        args["for"] = "dispatch"
    elif event.kind is Kind.WAIT_COMBINE:
        args["for"] = "combine"
    return args
