"""What a trace says about its workload: skew, drift, changes of domain, noise. Pure functions; memory stays a few
records.

Legend: T records, L MoE layers, E logical experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from eplb.offline.trace import Progress, Trace

Floats = npt.NDArray[np.float64]

# A change of domain stands out this many median deviations from the usual drift, and is this large itself.
_BREAK_DEVIATIONS, _BREAK_AT_LEAST = 6.0, 0.1


class Skew(Struct, frozen=True, eq=False):
    """Of the whole trace, float64 [L]: gini (0 even, 1 one expert has all), top_over_mean (the hottest expert),
    top10_share (part of the load that the hottest 10 % receive), idle (experts without a token)."""

    gini: Floats
    top_over_mean: Floats
    top10_share: Floats
    idle: npt.NDArray[np.int64]


class Drift(Struct, frozen=True, eq=False):
    """Between neighbouring windows, float64 [T - 1, L]: spearman (rank correlation of the experts' loads; 1: the same
    order) and moved (part of the load that is on other experts than before). breaks: the windows that begin a new
    domain.
    """

    spearman: Floats
    moved: Floats
    breaks: tuple[int, ...]


def skew(load_LE: Floats) -> Skew:
    """load_LE: float64 [L, E]; a layer without load counts as even."""
    num_layers, num_experts = load_LE.shape
    rising = np.sort(load_LE, axis=1)
    total = rising.sum(1)
    some = total > 0
    place = np.arange(1, num_experts + 1)
    gini = np.zeros(num_layers)
    weighted = (rising * (2 * place - num_experts - 1)).sum(1)
    np.divide(weighted, num_experts * total, out=gini, where=some)
    hottest = max(1, round(num_experts / 10))
    top10 = np.full(num_layers, hottest / num_experts)
    np.divide(rising[:, -hottest:].sum(1), total, out=top10, where=some)
    top = np.ones(num_layers)
    np.divide(rising[:, -1] * num_experts, total, out=top, where=some)
    return Skew(gini, top, top10, (load_LE == 0).sum(1))


def ranks_of(load_LE: npt.NDArray[np.floating]) -> Floats:
    """The place of each expert in its layer's order of load, float64 [L, E]; equal loads share their mean place."""
    num_layers, num_experts = load_LE.shape
    order = np.argsort(load_LE, axis=1, kind="stable")
    rising = np.take_along_axis(load_LE, order, 1)
    # A run of equal loads begins where the load differs from the one before.
    begins = np.ones(rising.shape, dtype=bool)
    begins[:, 1:] = rising[:, 1:] != rising[:, :-1]
    starts = np.flatnonzero(begins.ravel())
    lengths = np.diff(np.append(starts, rising.size))
    middle = np.repeat(starts % num_experts + (lengths - 1) / 2, lengths).reshape(num_layers, num_experts)
    places = np.empty((num_layers, num_experts))
    np.put_along_axis(places, order, middle, 1)
    return places


def _correlation(a_LE: Floats, b_LE: Floats) -> Floats:
    """Pearson correlation of rows, float64 [L]; 1 where a row is constant."""
    a, b = a_LE - a_LE.mean(1, keepdims=True), b_LE - b_LE.mean(1, keepdims=True)
    size = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    out: Floats = np.divide((a * b).sum(1), size, out=np.ones(len(a)), where=size > 0)
    return out


def windows(trace: Trace, records: int) -> Iterator[Floats]:
    """The sums of `records` records each, float64 [L, E]; what is left over at the end is left out, unless it is
    all."""
    stop = max(1, trace.num_records // records) * records
    for start in range(0, stop, records):
        yield trace.window(start, min(start + records, trace.num_records))


def window_records(trace: Trace) -> int:
    """How many records make a window of about 100 steps, in a short trace fewer: so many that there are ten windows."""
    by_steps = round(100 / float(np.median(trace.steps)))
    return max(1, min(by_steps, trace.num_records // 10))


def drift(trace: Trace, records: int = 1, progress: Progress | None = None) -> Drift:
    """Compare each window of `records` records with the next one. With one window there is nothing to compare: T - 1
    = 0."""
    spearman: list[Floats] = []
    moved: list[Floats] = []
    before: tuple[Floats, Floats] | None = None
    count = max(1, trace.num_records // records)
    for index, load_LE in enumerate(windows(trace, records)):
        part_LE = load_LE / np.maximum(load_LE.sum(1, keepdims=True), np.finfo(float).tiny)
        places_LE = ranks_of(load_LE)
        if before is not None:
            spearman.append(_correlation(before[0], places_LE))
            moved.append(np.abs(part_LE - before[1]).sum(1) / 2)
        before = places_LE, part_LE
        if progress:
            progress(index + 1, count)
    if not spearman:
        none = np.zeros((0, trace.num_layers))
        return Drift(none, none, ())
    moved_TL = np.stack(moved)
    return Drift(np.stack(spearman), moved_TL, _breaks(moved_TL.mean(1)))


def _breaks(moved_T: Floats) -> tuple[int, ...]:
    usual = float(np.median(moved_T))
    spread = 1.4826 * float(np.median(np.abs(moved_T - usual)))
    limit = max(usual + _BREAK_DEVIATIONS * spread, usual + _BREAK_AT_LEAST)
    return tuple(int(index) + 1 for index in np.flatnonzero(moved_T > limit))


def step_noise(trace: Trace) -> Floats:
    """How much neighbouring records differ, over what random draws of so many tokens would differ: float64 [L].

    1 is pure sampling noise; above it loads come in bursts or drift. NaN with one record, or where loads are no counts.
    The expected squared difference of two Poisson counts is their sum.
    """
    squared, expected = np.zeros(trace.num_layers), np.zeros(trace.num_layers)
    before: Floats | None = None
    for load in trace.load:
        now = load.astype(np.float64)
        if not np.array_equal(now, np.rint(now)):
            return np.full(trace.num_layers, np.nan)
        if before is not None:
            # Steps differ in their number of tokens; that is no noise of the experts.
            a, b = before.sum(1, keepdims=True), now.sum(1, keepdims=True)
            both = (a > 0) & (b > 0)
            ratio = np.divide(a, b, out=np.ones_like(a), where=both)
            squared += np.where(both[:, 0], ((before - now * ratio) ** 2).sum(1), 0.0)
            expected += np.where(both[:, 0], (before + now * ratio * ratio).sum(1), 0.0)
        before = now
    noise = np.full(trace.num_layers, np.nan)
    np.divide(squared, expected, out=noise, where=expected > 0)
    return noise
