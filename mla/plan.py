"""How the attention of one step is cut into calls: worked out once per step, on the host, and shared by all layers.

Sequences are put into groups of similar length; a group is padded to its longest and runs as one batch. Its keys are
read in pieces of bounded size, whose results are merged (mla/merge.py); most groups have one piece.

Legend: T tokens of the step, b sequences of a group, Q queries of each (padded), S keys of each in a piece (padded),
B sequences of the step, N blocks of a sequence, U padded query rows of a side. Other letters in mla/protocol.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layers.step import StepInput
from mla.protocol import MlaShape, PrefillMode

# Nanoseconds per floating-point operation of the absorbed way over those of the naive way, at prefill
# (benchmarks/bench_mla_prefill.py measures it).
ABSORBED_COST = 1.0
GATHER_BYTES = 4 << 20  # gathered cache rows of a group: they should stay in the processor's cache
BUILT_BYTES = 48 << 20  # keys and values built at a time by the naive way
MAX_PADDED_QUERIES = 64  # longer prefills gain nothing from company
MAX_WASTE = 1.3  # padded work over real work in a group


@dataclass(frozen=True, slots=True)
class Limits:
    """Keys per piece of the two ways, and queries per tile. None of them changes results beyond rounding."""

    absorbed_keys: int
    naive_keys: int
    absorbed_tile: int
    naive_tile: int = 128

    @staticmethod
    def of(shape: MlaShape, itemsize: int) -> Limits:
        built = shape.num_heads * (shape.key_dim + shape.value_dim) * itemsize
        return Limits(
            absorbed_keys=max(256, GATHER_BYTES // (shape.cache_dim * itemsize)),
            naive_keys=max(256, BUILT_BYTES // built),
            absorbed_tile=max(1, 512 // shape.num_heads),
        )


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries first:last of a group see keys below num_open of the piece, perhaps those up to num_keys, none later."""

    first: int
    last: int
    num_open: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class Piece:
    """S consecutive keys of each sequence. blocks: int64 [b * blocks of a piece]; hidden: bool [b, Q, S] or None."""

    blocks: Tensor
    num_keys: int
    hidden: Tensor | None
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Padded query rows first_row : first_row + b * Q of its side."""

    first_row: int
    num_sequences: int
    num_queries: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """What runs one way (absorbed or naive). rows: int64 [U], token of each padded query row, or None: tokens
    first_token : first_token + U as they lie."""

    num_rows: int
    first_token: int
    rows: Tensor | None
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """restore: int64 [T], where each token's result lies in [rows of absorbed | rows of naive], or None: at its place."""

    absorbed: Side
    naive: Side
    restore: Tensor | None


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Host numbers of one sequence of the step."""

    index: int
    first_token: int
    num_queries: int
    num_keys: int


def prefers_absorbed(shape: MlaShape, num_queries: int, num_keys: int) -> bool:
    """Whether a prefill of the last `num_queries` of `num_keys` tokens is estimated to run faster absorbed.

    The naive way builds keys and values of the whole context; the absorbed way pays more per (query, key) pair.
    """
    pairs = num_queries * (num_keys - num_queries) + num_queries * (num_queries + 1) // 2
    per_token = shape.latent_dim * (shape.nope_dim + shape.value_dim)
    naive = num_keys * per_token + pairs * (shape.key_dim + shape.value_dim)
    absorbed = num_queries * per_token + pairs * (shape.cache_dim + shape.latent_dim)
    return absorbed * ABSORBED_COST < naive


def make_plan(step: StepInput, shape: MlaShape, prefill: PrefillMode, limits: Limits) -> Plan:
    sequences = [
        _Sequence(b, first, last - first, num_keys)
        for b, (first, last, num_keys) in enumerate(
            zip(step.query_starts, step.query_starts[1:], step.kv_lens, strict=False)
        )
        if last > first
    ]
    absorbed, naive = [], []
    for sequence in sequences:
        if sequence.index < step.num_decodes or prefill == "absorbed":
            absorbed.append(sequence)
        elif prefill == "naive" or not prefers_absorbed(shape, sequence.num_queries, sequence.num_keys):
            naive.append(sequence)
        else:
            absorbed.append(sequence)
    order = [-1] * step.num_tokens
    absorbed_side = _side(step, absorbed, limits.absorbed_keys, limits.absorbed_tile, order, 0)
    naive_side = _side(step, naive, limits.naive_keys, limits.naive_tile, order, absorbed_side.num_rows)
    in_place = order == list(range(absorbed_side.num_rows + naive_side.num_rows))
    restore = None if in_place else torch.tensor(order, device=step.slots_T.device)
    return Plan(absorbed_side, naive_side, restore)


def _side(
    step: StepInput, sequences: list[_Sequence], max_keys: int, tile: int, order: list[int], first_place: int
) -> Side:
    """Lays out the rows of a side, and notes in `order` where each of its tokens lies, counted from first_place."""
    tokens: list[int] = []
    groups = []
    for members in _cut(sequences, step.block_size, max_keys):
        num_queries = max(s.num_queries for s in members)
        first_row = len(tokens)
        for s in members:
            own = range(s.first_token, s.first_token + s.num_queries)
            place = first_place + len(tokens)
            order[own.start : own.stop] = range(place, place + s.num_queries)
            tokens.extend(own)
            tokens.extend([s.first_token] * (num_queries - s.num_queries))
        pieces = _pieces(step, members, num_queries, max_keys, tile)
        groups.append(Group(first_row, len(members), num_queries, pieces))
    first = tokens[0] if tokens else 0
    as_they_lie = tokens == list(range(first, first + len(tokens)))
    rows = None if as_they_lie else torch.tensor(tokens, device=step.slots_T.device)
    return Side(len(tokens), first, rows, tuple(groups))


def _cut(sequences: list[_Sequence], block_size: int, max_keys: int) -> Iterator[Sequence[_Sequence]]:
    """Groups whose padded keys stay under max_keys and whose padded work stays under MAX_WASTE times the real one."""
    if not sequences:
        return
    longest = max(s.num_keys for s in sequences) + block_size
    if all(s.num_queries == 1 for s in sequences) and len(sequences) * longest <= max_keys:
        mean = sum(s.num_keys for s in sequences) / len(sequences)
        if longest <= MAX_WASTE * mean + 2 * block_size:
            yield sequences  # as they lie: queries need no reordering
            return
    group: list[_Sequence] = []
    queries = keys = work = 0
    for s in sorted(sequences, key=lambda s: (s.num_queries, s.num_keys)):
        count = len(group) + 1
        queries = max(queries, s.num_queries)
        keys = max(keys, s.num_keys)
        work += s.num_queries * s.num_keys
        fits = queries <= MAX_PADDED_QUERIES and count * (keys + block_size) <= max_keys
        if group and not (fits and count * queries * keys <= MAX_WASTE * work + 512):
            yield group
            group, queries, keys, work = [], s.num_queries, s.num_keys, s.num_queries * s.num_keys
        group.append(s)
    yield group


def _pieces(
    step: StepInput, members: Sequence[_Sequence], num_queries: int, max_keys: int, tile: int
) -> tuple[Piece, ...]:
    """Cut the keys of a group. Only a sequence alone can be longer than max_keys, and be cut into more than one."""
    longest = max(s.num_keys for s in members)
    per_piece = longest if longest <= max_keys else max(1, max_keys // step.block_size) * step.block_size
    device = step.block_table_BN.device
    first, last = members[0].index, members[-1].index
    adjacent = [s.index for s in members] == list(range(first, last + 1))
    chosen = slice(first, last + 1) if adjacent else torch.tensor([s.index for s in members], device=device)
    table_bN = step.block_table_BN[chosen]
    contexts = [s.num_keys - s.num_queries for s in members]
    pieces = []
    for start in range(0, longest, per_piece):
        num_keys = min(longest - start, per_piece)
        num_blocks = -(-num_keys // step.block_size)
        first_block = start // step.block_size
        tiles = []
        for q in range(0, num_queries, tile):
            end = min(q + tile, num_queries)
            visible = min(num_keys, max(contexts) + end - start)
            if visible > 0:
                tiles.append(Tile(q, end, max(0, min(visible, min(contexts) + q + 1 - start)), visible))
        hidden = None
        if any(t.num_open < t.num_keys for t in tiles):
            key_S = torch.arange(start, start + num_keys, device=device)
            query_Q = torch.arange(num_queries, device=device)
            hidden = key_S > (torch.tensor(contexts, device=device)[:, None] + query_Q)[:, :, None]
        blocks = table_bN[:, first_block : first_block + num_blocks].reshape(-1)
        pieces.append(Piece(blocks, num_keys, hidden, tuple(tiles)))
    return tuple(pieces)
