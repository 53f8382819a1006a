"""The weights of experts on their way from rank to rank, a chunk per step, into memory beside the slots; then swapped
in.

Everybody works out the same list of moves and the same chunks, so that nothing is said about them. Until the swap
nothing that computes has changed: a migration that is given up is forgotten.

Legend: L MoE layers, G ranks of the group (the live ones), S slots of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eplb.placement import Placement

Ints = npt.NDArray[np.int64]
Storage = Callable[[int, int], tuple[Tensor, ...]]  # (layer, slot of this rank) -> all tensors of its expert


class Move(NamedTuple):
    """An expert comes to a slot. Ranks are the placement's."""

    layer: int
    rank: int
    slot: int
    from_rank: int
    from_slot: int


class _Part(NamedTuple):
    """Bytes start to stop of an expert, from a rank of the group to another; at: where they lie in what that one
    receives."""

    move: Move
    source: int
    target: int
    start: int
    stop: int
    at: int


def plan_moves(current: Placement, target: Placement) -> list[Move]:
    """For every slot whose expert changes where it comes from: its own rank, else the nearest holder (Distance), of
    equally near ones that which sends least so far. Ordered by layer, rank and slot."""
    old, new = current.slot_to_expert, target.slot_to_expert
    sent = [0] * current.num_ranks
    moves = []
    for layer, rank, slot in np.argwhere((old != new) & (new >= 0)).tolist():
        holders = np.argwhere(old[layer] == new[layer, rank, slot]).tolist()
        source, source_slot = min(
            (holder for holder in holders if current.alive[holder[0]]),
            key=lambda holder: (holder[0] != rank, current.distance(rank, holder[0]), sent[holder[0]], holder),
        )
        sent[source] += source != rank
        moves.append(Move(layer, rank, slot, source, source_slot))
    return moves


class Migration:
    """The moves from one placement to the next, as one rank takes part in them.

    In chunks numbered 0 to num_chunks - 1: `outgoing` says what to send, `receive` takes what came. `swap` after the
    last one. From the first chunk to the swap it holds memory for the experts that this rank is brought.
    """

    def __init__(self, current: Placement, target: Placement, rank: int, storage: Storage, chunk_bytes: int) -> None:
        """storage: the slots of this rank; experts of a layer are equally large on all ranks. chunk_bytes: what one
        rank receives at most in one chunk."""
        assert chunk_bytes > 0 and current.alive == target.alive
        live = [index for index, alive in enumerate(current.alive) if alive]
        self._size = len(live)
        self._me = live.index(rank)
        self._storage = storage
        self.moves = plan_moves(current, target)
        expert_bytes = {
            layer: sum(tensor.nbytes for tensor in storage(layer, 0)) for layer in {move.layer for move in self.moves}
        }
        self._mine = [move for move in self.moves if move.rank == rank]
        self.bytes_received = 0  # by all ranks together, over the wire
        self._chunks: list[list[_Part]] = []
        self._at: dict[Move, int] = {}  # where a move of this rank lies in what it is brought
        filled = dict.fromkeys(live, 0)
        for move in self.moves:
            if move.from_rank == move.rank:
                continue
            size, first = expert_bytes[move.layer], filled[move.rank]
            if move.rank == rank:
                self._at[move] = first
            self._cut(move, live.index(move.from_rank), live.index(move.rank), first, size, chunk_bytes)
            filled[move.rank] += size
            self.bytes_received += size
        # Moves within the rank are staged too: their sources may be swapped over.
        end = filled[rank]
        for move in self._mine:
            if move not in self._at:
                self._at[move] = end
                end += expert_bytes[move.layer]
        self._staged_bytes = end
        self._staged: Tensor | None = None

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def sizes(self, chunk: int) -> Ints:
        """Bytes of this chunk from each rank to each rank, int64 [G, G]."""
        sizes_GG = np.zeros((self._size, self._size), dtype=np.int64)
        for part in self._chunks[chunk]:
            sizes_GG[part.source, part.target] += part.stop - part.start
        return sizes_GG

    def outgoing(self, chunk: int) -> dict[int, list[Tensor]]:
        """For each rank what this one sends to it: views of the slots."""
        sent: dict[int, list[Tensor]] = {}
        for part in self._chunks[chunk]:
            if part.source == self._me:
                move = part.move
                flat = _flat(self._storage(move.layer, move.from_slot))
                sent.setdefault(part.target, []).extend(_slice(flat, part.start, part.stop))
        return sent

    def receive(self, chunk: int, arrived: Sequence[Tensor]) -> None:
        """arrived: what each rank has sent, uint8."""
        staged = self._stage()
        read = [0] * self._size
        for part in self._chunks[chunk]:
            if part.target == self._me:
                size, first = part.stop - part.start, read[part.source]
                staged[part.at : part.at + size].copy_(arrived[part.source][first : first + size])
                read[part.source] += size

    def swap(self) -> None:
        """Write what has arrived into the slots; between steps only, on every rank before the same step."""
        for move in self._mine:
            if move.from_rank == move.rank:
                self._copy(move, self._storage(move.layer, move.from_slot), out=True)
        for move in self._mine:
            self._copy(move, self._storage(move.layer, move.slot), out=False)
        self._staged = None

    def _copy(self, move: Move, storage: Sequence[Tensor], out: bool) -> None:
        at, memory = self._at[move], self._stage()
        for flat in _flat(storage):
            staged = memory[at : at + flat.numel()]
            if out:
                staged.copy_(flat)
            else:
                flat.copy_(staged)
            at += flat.numel()

    def _cut(self, move: Move, source: int, target: int, first: int, size: int, chunk_bytes: int) -> None:
        at = first
        while at < first + size:
            chunk = at // chunk_bytes
            stop = min((chunk + 1) * chunk_bytes, first + size)
            while len(self._chunks) <= chunk:
                self._chunks.append([])
            self._chunks[chunk].append(_Part(move, source, target, at - first, stop - first, at))
            at = stop

    def _stage(self) -> Tensor:
        if self._staged is None:
            device = self._storage(self.moves[0].layer, 0)[0].device
            self._staged = torch.empty(self._staged_bytes, dtype=torch.uint8, device=device)
        return self._staged


def _flat(storage: Sequence[Tensor]) -> list[Tensor]:
    """The bytes of each tensor."""
    return [tensor.reshape(-1).view(torch.uint8) for tensor in storage]


def _slice(flat: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Bytes start to stop of tensors that follow each other."""
    found, first = [], 0
    for tensor in flat:
        lo, hi = max(start - first, 0), min(stop - first, tensor.numel())
        if lo < hi:
            found.append(tensor[lo:hi])
        first += tensor.numel()
    return found
