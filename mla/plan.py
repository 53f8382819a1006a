"""How the attention of one step is cut into calls: worked out once per step, on the host, and shared by all layers.

Sequences are put into groups of similar length; a group is padded to its longest and runs as one batch. Its keys are
read in pieces of bounded size, whose results are merged (mla/merge.py); most groups have one piece.

Legend: T tokens of the step, b sequences of a group, Q queries of each (padded), S keys of each in a piece (padded),
B sequences of the step, N blocks of a sequence, U padded query rows of a side. Other letters in mla/protocol.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from layers.step import StepInput
from mla.protocol import MlaShape, PrefillMode

# Nanoseconds per floating-point operation of the absorbed way over those of the naive way, at prefill
# (benchmarks/bench_mla_prefill.py measures it).
ABSORBED_COST = 0.9
GATHER_BYTES = 4 << 20  # gathered cache rows of a group: they should stay in the processor's cache
PIECE_BYTES = 16 << 20  # the same of a sequence alone: merging pieces costs more than reading memory
BUILT_BYTES = 48 << 20  # keys and values built at a time by the naive way
MAX_PADDED_QUERIES = 64  # longer prefills gain nothing from company
MAX_WASTE = 1.3  # padded work over real work in a group, in (query, key) pairs
FREE_WASTE = 1024  # padding below this is cheaper than one more group


class Limits(Struct, frozen=True):
    """Keys per group of several sequences and per piece of one alone, and queries per tile. None of them changes
    results beyond rounding."""

    absorbed_keys: int
    absorbed_piece: int
    naive_keys: int  # of a group, and of a piece
    absorbed_tile: int
    naive_tile: int = 128

    @staticmethod
    def of(shape: MlaShape, itemsize: int) -> Limits:
        built = shape.num_heads * (shape.key_dim + shape.v_head_dim) * itemsize
        return Limits(
            absorbed_keys=max(256, GATHER_BYTES // (shape.cache_dim * itemsize)),
            absorbed_piece=max(1024, PIECE_BYTES // (shape.cache_dim * itemsize)),
            naive_keys=max(256, BUILT_BYTES // built),
            absorbed_tile=max(1, 1024 // shape.num_heads),
        )


class KeyTile(Struct, frozen=True):
    """Queries first:last of a group see all keys below num_open of the piece, none from num_keys on, and of those
    between the ones that are not hidden: bool [b, last - first, num_keys - num_open]; None: nothing is hidden."""

    first: int
    last: int
    num_open: int
    num_keys: int
    hidden: Tensor | None


class KeyPiece(Struct, frozen=True):
    """S consecutive keys of each sequence. blocks: int64 [b * blocks of a piece].

    With more than one sequence S is a whole number of blocks and every tile takes all of it: a part of it would have to
    be copied together before a product.
    """

    blocks: Tensor
    num_keys: int
    tiles: tuple[KeyTile, ...]


class QueryGroup(Struct, frozen=True):
    """Padded query rows first_row : first_row + b * Q of its side."""

    first_row: int
    num_sequences: int
    num_queries: int
    pieces: tuple[KeyPiece, ...]


class PlanSide(Struct, frozen=True):
    """What runs one way (absorbed or naive). rows: int64 [U], token of each padded query row, or None: tokens
    first_token : first_token + U as they lie."""

    num_rows: int
    first_token: int
    rows: Tensor | None
    groups: tuple[QueryGroup, ...]


class PrefillPlan(Struct, frozen=True):
    """restore: int64 [T], where each token's result lies in [rows of absorbed | rows of naive]; None: at its place."""

    absorbed: PlanSide
    naive: PlanSide
    restore: Tensor | None


class PrefillFlops(Struct, frozen=True):
    naive: int
    absorbed: int


def prefill_flops(shape: MlaShape, num_queries: int, num_keys: int) -> PrefillFlops:
    """Floating-point operations of a prefill of the last `num_queries` of `num_keys` tokens.

    The naive way builds keys and values of the whole context; the absorbed way pays more per (query, key) pair.
    """
    pairs = num_queries * (num_keys - num_queries) + num_queries * (num_queries + 1) // 2
    per_token = shape.latent_dim * (shape.qk_nope_head_dim + shape.v_head_dim)
    naive = num_keys * per_token + pairs * (shape.key_dim + shape.v_head_dim)
    absorbed = num_queries * per_token + pairs * (shape.cache_dim + shape.latent_dim)
    return PrefillFlops(2 * shape.num_heads * naive, 2 * shape.num_heads * absorbed)


def prefers_absorbed(shape: MlaShape, num_queries: int, num_keys: int) -> bool:
    """Whether such a prefill is estimated to run faster the absorbed way."""
    flops = prefill_flops(shape, num_queries, num_keys)
    return flops.absorbed * ABSORBED_COST < flops.naive


def absorbs(shape: MlaShape, mode: PrefillMode, num_queries: int, num_keys: int) -> bool:
    """Whether such a prefill runs the absorbed way."""
    return mode == "absorbed" or (mode == "auto" and prefers_absorbed(shape, num_queries, num_keys))


def make_plan(
    step: StepInput, shape: MlaShape, prefill: PrefillMode, limits: Limits, first_token: int = 0
) -> PrefillPlan:
    """Cut a step into groups. Sequences without queries are left out. first_token: num_decodes, if decodes are left
    out too."""
    counts = [last - first for first, last in zip(step.query_starts, step.query_starts[1:], strict=False)]
    decodes = [] if first_token else list(_cut_decodes(step, limits.absorbed_keys))
    absorbed: list[int] = []
    naive: list[int] = []
    for b in range(step.num_decodes, len(counts)):
        if counts[b] == 0:
            continue
        (absorbed if absorbs(shape, prefill, counts[b], step.kv_lens[b]) else naive).append(b)
    order = [-1] * step.num_tokens
    absorbed_groups = [*decodes, *_cut_prefills(step, absorbed, counts, limits.absorbed_keys)]
    absorbed_side = _side(step, absorbed_groups, counts, limits.absorbed_piece, limits.absorbed_tile, order, 0)
    naive_groups = list(_cut_prefills(step, naive, counts, limits.naive_keys))
    first = absorbed_side.num_rows
    naive_side = _side(step, naive_groups, counts, limits.naive_keys, limits.naive_tile, order, first)
    del order[:first_token]
    in_place = order == list(range(absorbed_side.num_rows + naive_side.num_rows))
    restore = None if in_place else torch.tensor(order, device=step.slots_T.device)
    return PrefillPlan(absorbed_side, naive_side, restore)


def _cut_decodes(step: StepInput, max_keys: int) -> Iterator[Sequence[int]]:
    """Groups of decodes: as they lie if their lengths are similar, so that nothing is reordered; else by length."""
    num, size = step.num_decodes, step.block_size
    if num == 0:
        return
    lens = step.kv_lens[:num]
    padded = -(-max(lens) // size) * size
    if num * padded <= MAX_WASTE * (sum(lens) + num * size) + FREE_WASTE:
        per_group = max(1, max_keys // padded)
        for first in range(0, num, per_group):
            yield range(first, min(num, first + per_group))
        return
    yield from _cut_similar(sorted(range(num), key=lens.__getitem__), lens, [1] * num, size, max_keys)


def _cut_prefills(step: StepInput, members: list[int], counts: Sequence[int], max_keys: int) -> Iterator[Sequence[int]]:
    members.sort(key=lambda b: (counts[b], step.kv_lens[b]))
    yield from _cut_similar(members, step.kv_lens, counts, step.block_size, max_keys)


def _cut_similar(
    members: list[int], lens: Sequence[int], counts: Sequence[int], block_size: int, max_keys: int
) -> Iterator[Sequence[int]]:
    """Cut sorted sequences into groups whose padded keys stay under max_keys, and whose padded work stays under
    MAX_WASTE times the real one."""
    group: list[int] = []
    queries = keys = work = 0
    for b in members:
        own = counts[b] * (lens[b] + block_size)
        queries, keys, work = max(queries, counts[b]), max(keys, lens[b] + block_size), work + own
        padded = (len(group) + 1) * keys
        wasteful = padded * queries > MAX_WASTE * work + FREE_WASTE
        if group and (wasteful or queries > MAX_PADDED_QUERIES or padded > max_keys):
            yield group
            group, queries, keys, work = [], counts[b], lens[b] + block_size, own
        group.append(b)
    if group:
        yield group


def _side(
    step: StepInput,
    cut: list[Sequence[int]],
    counts: list[int],
    piece_keys: int,
    tile: int,
    order: list[int],
    place: int,
) -> PlanSide:
    """Lays out the rows of a side, and notes in `order` where each of its tokens lies, counted from `place`."""
    tokens: list[int] = []
    groups = []
    for members in cut:
        num_queries = max([counts[b] for b in members])
        first_row = len(tokens)
        for b in members:
            start = step.query_starts[b]
            at = place + len(tokens)
            if num_queries == 1:  # worth its own lines: hundreds of decodes a step
                tokens.append(start)
                order[start] = at
                continue
            order[start : start + counts[b]] = range(at, at + counts[b])
            tokens.extend(range(start, start + counts[b]))
            tokens.extend([start] * (num_queries - counts[b]))
        pieces = _pieces(step, members, counts, num_queries, piece_keys, tile)
        groups.append(QueryGroup(first_row, len(members), num_queries, pieces))
    first = tokens[0] if tokens else 0
    as_they_lie = tokens == list(range(first, first + len(tokens)))
    rows = None if as_they_lie else torch.tensor(tokens, device=step.slots_T.device)
    return PlanSide(len(tokens), first, rows, tuple(groups))


def _pieces(
    step: StepInput, members: Sequence[int], counts: list[int], num_queries: int, piece_keys: int, tile: int
) -> tuple[KeyPiece, ...]:
    """Cut the keys of a group. Only a sequence alone can be longer than piece_keys, and be cut into more than one."""
    size, device = step.block_size, step.block_table_BN.device
    contexts = [step.kv_lens[b] - counts[b] for b in members]
    lowest, highest = min(contexts), max(contexts)
    longest = max([step.kv_lens[b] for b in members])
    per_piece = longest if len(members) > 1 or longest <= piece_keys else max(1, piece_keys // size) * size
    adjacent = list(members) == list(range(members[0], members[-1] + 1))
    chosen = slice(members[0], members[-1] + 1) if adjacent else torch.tensor(members, device=device)
    table_bN = step.block_table_BN[chosen]
    contexts_b11 = torch.tensor(contexts, device=device)[:, None, None]
    pieces = []
    for start in range(0, longest, per_piece):
        num_keys = min(longest - start, per_piece)
        num_blocks = -(-num_keys // size)
        if len(members) > 1:
            num_keys = num_blocks * size
        tiles = []
        for first in range(0, num_queries, tile):
            last = min(first + tile, num_queries)
            visible = num_keys if len(members) > 1 else min(num_keys, highest + last - start)
            num_open = max(0, min(visible, lowest + first + 1 - start))
            hidden = None
            if num_open < visible:
                key_S = torch.arange(start + num_open, start + visible, device=device)
                hidden = key_S > contexts_b11 + torch.arange(first, last, device=device)[:, None]
            if visible > 0:
                tiles.append(KeyTile(first, last, num_open, visible, hidden))
        blocks = table_bN[:, start // size : start // size + num_blocks].reshape(-1)
        pieces.append(KeyPiece(blocks, num_keys, tuple(tiles)))
    return tuple(pieces)
