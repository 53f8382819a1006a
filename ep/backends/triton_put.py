# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Rows to their experts and back by kernels that put them into other ranks' memory themselves (NVSHMEM's functions for
a device).

Legend: T tokens of this rank, D hidden size, K experts per token, N = T * K pairs, G ranks, M most tokens of a rank, S
slots of a rank, C = G * M rows per slot, B blocks of a row, W choices that a message has room for (CHOICES).

A message is a token on its way to a rank, once however many of its experts are there: the turn in which it was sent
(int64, at 0), its slots (int32 [W], at 16; -1 where there is none), its weights (float32 [W]), its row, and with FP8
the row's scales. It has a place of its own at the receiver: [sender, token]. A message that is older than the turn is
none.

A put adds 1 to the sender's word at the receiver when it is there. When all are under way, the sender adds what is
missing to M + 1. So the word grows by M + 1 in every turn, however much each sends and in whatever order it arrives:
one number to wait for, and nothing to set back. Results travel in the same way, one row per token and rank: the sum
over the experts there.

Nothing waits for the host, and no wait is without a bound: a sender whose word does not grow is noted as lost, and left
out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.triton.quant import to_fp8

_CHOICES = tl.constexpr(16)
_SLOTS_AT = tl.constexpr(16)  # bytes into a message
_WEIGHTS_AT = tl.constexpr(80)
_ROW_AT = tl.constexpr(144)
CHOICES, ROW_AT = _CHOICES.value, _ROW_AT.value
END_BYTES = 16  # of the message that ends a turn: the number of tokens, and the turn
_NUMBERS = [  # one compiled form for all of them: no rank compiles in the middle of an exchange
    "num_tokens", "top_k", "num_slots", "rank", "ranks", "most", "signal_add", "spins",
]  # fmt: skip


@triton.jit
def _await(word_ptr, lost_ptr, index, wanted, expected, spins):
    """Which of the wanted senders' words have come to `expected`. index, wanted [I]; spins: how often it looks at most.
    Who is noted as lost is not waited for, also when that is noted meanwhile (by the host, which knows sooner)."""
    lost = tl.load(lost_ptr + index, mask=wanted, other=1, volatile=True)
    word = tl.load(word_ptr + index, mask=wanted, other=0, volatile=True)
    missing = tl.sum((wanted & (lost == 0) & (word < expected)).to(tl.int32), 0)
    left = spins
    while (missing > 0) & (left > 0):
        lost = tl.load(lost_ptr + index, mask=wanted, other=1, volatile=True)
        word = tl.load(word_ptr + index, mask=wanted, other=0, volatile=True)
        missing = tl.sum((wanted & (lost == 0) & (word < expected)).to(tl.int32), 0)
        left -= 1
    # What was put before is seen by reads after this one.
    word = tl.atomic_add(word_ptr + index, tl.zeros_like(word), mask=wanted, sem="acquire", scope="sys")
    came = wanted & (lost == 0) & (word >= expected)
    tl.store(lost_ptr + index, tl.full(index.shape, 1, tl.int32), mask=wanted & (word < expected))
    return came


@triton.jit
def _put(PUT: tl.constexpr, target, source, num_bytes, word, value, signal_add, rank):
    """num_bytes from here to the same address on `rank`, and then `value` onto the word there."""
    tl.debug_barrier()  # the block has written what its threads are about to read
    PUT(target, source, num_bytes, word, value, signal_add, rank)


@triton.jit
def _ranks_of(slot_ptr, token, num_slots, top_k, there):
    """The ranks of a token's choices [..., W], -1 where there is none. token, there: [...] in one more dimension."""
    choice = tl.arange(0, _CHOICES)[None, :]
    slot = tl.load(slot_ptr + token * top_k + choice, mask=there & (choice < top_k), other=-1).to(tl.int32)
    return slot, tl.where(slot >= 0, slot // num_slots, -1)


@triton.jit(do_not_specialize=_NUMBERS)
def send_rows_kernel(
    x_ptr, slot_ptr, weight_ptr, rows_ptr, turn_ptr, stage_ptr, end_ptr, inbox_ptr, ends_ptr, word_ptr,
    num_tokens, top_k, num_slots, rank, most, signal_add,
    PUT: tl.constexpr, BYTES: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    SCALES_AT: tl.constexpr,
    FP8: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A program per pair, then one per rank that ends the turn there. x [T, D], slot and weight [T, K] contiguous; rows
    [S] becomes zero; turn [2]: the turn that begins, and the one that goes on, which this makes the same."""
    number = tl.program_id(0)
    turn = tl.load(turn_ptr)
    one = tl.full((), 1, tl.int64)
    word_ptr += rank
    if number < num_tokens * top_k:
        token, choice = number // top_k, number % top_k
        index = tl.arange(0, _CHOICES)
        slot_1W, rank_1W = _ranks_of(slot_ptr, tl.full((1, 1), 0, tl.int32) + token, num_slots, top_k, True)
        slot, of_slot = tl.sum(slot_1W, 0), tl.sum(rank_1W, 0)
        to = tl.sum(tl.where(index == choice, of_slot, 0), 0)
        before = tl.sum(((of_slot == to) & (index < choice)).to(tl.int32), 0)
        if (to >= 0) & (before == 0):  # the first of this token's choices that is there
            message = stage_ptr + number.to(tl.int64) * BYTES
            weight = tl.load(weight_ptr + token * top_k + index, mask=index < top_k, other=0.0)
            tl.store(message.to(tl.pointer_type(tl.int64)), turn)
            tl.store((message + _SLOTS_AT).to(tl.pointer_type(tl.int32)) + index, slot)
            tl.store((message + _WEIGHTS_AT).to(tl.pointer_type(tl.float32)) + index, weight)
            row = message + _ROW_AT
            if FP8:
                block = tl.arange(0, BLOCKS)
                column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
                x = tl.load(x_ptr + token.to(tl.int64) * D + column, mask=column < D, other=0.0).to(tl.float32)
                value, scale = to_fp8(x)
                tl.store(row.to(tl.pointer_type(tl.float8e4nv)) + column, value, mask=column < D)
                scale_ptr = (message + SCALES_AT).to(tl.pointer_type(tl.float32))
                tl.store(scale_ptr + block, scale, mask=block * 128 < D)
            else:
                column = tl.arange(0, SIZE)
                x = tl.load(x_ptr + token.to(tl.int64) * D + column, mask=column < D, other=0.0)
                tl.store(row.to(tl.pointer_type(x_ptr.dtype.element_ty)) + column, x, mask=column < D)
            target = inbox_ptr + (rank * most + token).to(tl.int64) * BYTES
            _put(PUT, target, message, one * BYTES, word_ptr, one, signal_add, to)
    else:
        to = number - num_tokens * top_k
        if to == 0:
            slot = tl.arange(0, SLOTS)
            tl.store(rows_ptr + slot, tl.zeros_like(slot), mask=slot < num_slots)
            tl.store(turn_ptr + 1, turn)
        count = 0
        for first in range(0, num_tokens, TOKENS):
            token = first + tl.arange(0, TOKENS)[:, None]
            _, of_slot = _ranks_of(slot_ptr, token, num_slots, top_k, token < num_tokens)
            count += tl.sum(tl.max((of_slot == to).to(tl.int32), 1), 0)
        end = end_ptr + to * 2
        tl.store(end, num_tokens.to(tl.int64))
        tl.store(end + 1, turn)
        _put(PUT, ends_ptr + rank * 2, end, one * 16, word_ptr, one * (most + 1 - count), signal_add, to)


@triton.jit
def _take_row(
    message, x_ptr, scale_ptr, rows_ptr, weight_ptr, top_k, num_slots, first_slot, num_places,
    D: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, SCALES_AT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A message's row into each of its slots here: where, [W]."""
    index = tl.arange(0, _CHOICES)
    slot_at = (message + _SLOTS_AT).to(tl.pointer_type(tl.int32))
    slot = tl.load(slot_at + index, mask=index < top_k, other=-1) - first_slot
    mine = (index < top_k) & (slot >= 0) & (slot < num_slots)
    position = tl.atomic_add(rows_ptr + slot, tl.full(index.shape, 1, tl.int32), mask=mine, sem="relaxed")
    place = tl.where(mine, slot * num_places + position, -1)
    weight = tl.load((message + _WEIGHTS_AT).to(tl.pointer_type(tl.float32)) + index, mask=mine, other=0.0)
    tl.store(weight_ptr + index, weight)
    column, block = tl.arange(0, SIZE), tl.arange(0, BLOCKS)
    x = tl.load((message + _ROW_AT).to(tl.pointer_type(x_ptr.dtype.element_ty)) + column, mask=column < D)
    scale = tl.zeros((BLOCKS,), tl.float32)
    if FP8:
        scale_at = (message + SCALES_AT).to(tl.pointer_type(tl.float32))
        scale = tl.load(scale_at + block, mask=block * 128 < D, other=0.0)
    for choice in range(top_k):
        one = tl.sum(tl.where(index == choice, place, 0), 0).to(tl.int64)
        tl.store(x_ptr + one * D + column, x, mask=(one >= 0) & (column < D))
        if FP8:
            tl.store(scale_ptr + one * ((D + 127) // 128) + block, scale, mask=(one >= 0) & (block * 128 < D))
    return place


@triton.jit(do_not_specialize=_NUMBERS)
def take_rows_kernel(
    inbox_ptr, ends_ptr, word_ptr, lost_ptr, turn_ptr, x_ptr, scale_ptr, rows_ptr, count_ptr, place_ptr, weight_ptr,
    top_k, num_slots, rank, ranks, most, spins,
    BYTES: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, SCALES_AT: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Some programs per sender, which share its messages. They wait for it; then x [S, C, D] and scale [S, C, B] get
    the row of each message for each of its slots here, rows [S] counts them, and place [G, M, W] says where (row of S *
    C, or -1), with weight [G, M, W]; count [G]: tokens of the senders. The turn that begins next is set."""
    sender, first, step = tl.program_id(0) % ranks, tl.program_id(0) // ranks, tl.num_programs(0) // ranks
    turn = tl.load(turn_ptr + 1)
    if tl.program_id(0) == 0:
        tl.store(turn_ptr, turn + 1)
    index = tl.arange(0, _CHOICES)
    came = _await(word_ptr, lost_ptr, sender + tl.zeros_like(index), index == 0, turn * (most + 1), spins)
    count = tl.load(ends_ptr + sender * 2)
    count = tl.where(tl.max(came.to(tl.int32), 0) > 0, count, 0)
    if first == 0:
        tl.store(count_ptr + sender, count.to(tl.int32))
    for token in range(first, most, step):
        at = (sender * most + token).to(tl.int64)
        message = inbox_ptr + at * BYTES
        here = token < count
        # A sender that has nothing for this rank may be a turn ahead: what it writes then is no message of this one.
        here = here & (tl.load(message.to(tl.pointer_type(tl.int64)), mask=here, other=0) == turn)
        place = tl.full(index.shape, -1, tl.int32)
        if here:
            place = _take_row(
                message, x_ptr, scale_ptr, rows_ptr, weight_ptr + at * _CHOICES, top_k, num_slots, rank * num_slots,
                ranks * most, D, SIZE, BLOCKS, SCALES_AT, FP8,
            )  # fmt: skip
        tl.store(place_ptr + at * _CHOICES + index, place)


@triton.jit(do_not_specialize=_NUMBERS)
def return_rows_kernel(
    y_ptr, count_ptr, place_ptr, weight_ptr, turn_ptr, stage_ptr, end_ptr, inbox_ptr, ends_ptr, word_ptr,
    top_k, rank, ranks, most, signal_add,
    PUT: tl.constexpr, BYTES: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some programs per sender, which share its tokens, then one per sender that ends the turn there. y [S * C, D]:
    what the experts made of the rows; the sum of a token's rows, each times its weight, goes back."""
    number, step = tl.program_id(0), tl.num_programs(0) // ranks - 1
    to, first = number % ranks, number // ranks
    num_tokens = tl.load(count_ptr + to)
    one = tl.full((), 1, tl.int64)
    index = tl.arange(0, _CHOICES)
    word_ptr += rank
    if first < step:
        for token in range(first, num_tokens, step):
            at = (to * most + token).to(tl.int64)
            place = tl.load(place_ptr + at * _CHOICES + index)
            if tl.max(place, 0) >= 0:
                weight = tl.load(weight_ptr + at * _CHOICES + index)
                column = tl.arange(0, SIZE)
                acc = tl.zeros((SIZE,), tl.float32)
                for choice in range(top_k):
                    row = tl.sum(tl.where(index == choice, place, 0), 0).to(tl.int64)
                    y = tl.load(y_ptr + row * D + column, mask=(row >= 0) & (column < D), other=0.0).to(tl.float32)
                    acc += tl.sum(tl.where(index == choice, weight, 0.0), 0) * y
                source = stage_ptr + at * BYTES
                row_at = source.to(tl.pointer_type(y_ptr.dtype.element_ty))
                tl.store(row_at + column, acc.to(y_ptr.dtype.element_ty), mask=column < D)
                target = inbox_ptr + (rank * most + token).to(tl.int64) * BYTES
                _put(PUT, target, source, one * BYTES, word_ptr, one, signal_add, to)
    else:
        count = 0
        for begin in range(0, num_tokens, TOKENS):
            token = begin + tl.arange(0, TOKENS)[:, None]
            at = (to * most + token) * _CHOICES + index[None, :]
            place = tl.load(place_ptr + at, mask=token < num_tokens, other=-1)
            count += tl.sum(tl.max((place >= 0).to(tl.int32), 1), 0)
        end = end_ptr + to * 2
        tl.store(end, one * count)
        tl.store(end + 1, tl.load(turn_ptr + 1))
        _put(PUT, ends_ptr + rank * 2, end, one * 16, word_ptr, one * (most + 1 - count), signal_add, to)


@triton.jit(do_not_specialize=_NUMBERS)
def sum_rows_kernel(
    inbox_ptr, word_ptr, lost_ptr, turn_ptr, slot_ptr, out_ptr, out_stride,
    top_k, num_slots, ranks, most, spins,
    BYTES: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A program per token. Waits for the ranks that have its experts; out [T, D], rows of any stride: the sum of
    what they made."""
    token = tl.program_id(0)
    turn = tl.load(turn_ptr + 1)
    other = tl.arange(0, RANKS)
    _, of_slot = _ranks_of(slot_ptr, tl.full((1, 1), 0, tl.int32) + token, num_slots, top_k, True)
    wanted = tl.max((of_slot == other[:, None]).to(tl.int32), 1) > 0
    came = _await(word_ptr, lost_ptr, other, wanted & (other < ranks), turn * (most + 1), spins)
    column = tl.arange(0, SIZE)
    acc = tl.zeros((SIZE,), tl.float32)
    for rank in range(ranks):
        here = tl.max((came & (other == rank)).to(tl.int32), 0) > 0
        row = (inbox_ptr + (rank * most + token).to(tl.int64) * BYTES).to(tl.pointer_type(out_ptr.dtype.element_ty))
        acc += tl.load(row + column, mask=here & (column < D), other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * out_stride + column, acc.to(out_ptr.dtype.element_ty), mask=column < D)


def bound(kernel_name, requires):
    """This kernel, under `requires`: a new one each time, because a compiled kernel keeps the state of the NVSHMEM
    under which it was loaded."""
    kernel = globals()[kernel_name]
    return requires(type(kernel)(kernel.fn, do_not_specialize=_NUMBERS))
