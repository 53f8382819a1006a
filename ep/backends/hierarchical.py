"""Expert parallelism of machines with several ranks each, in steps with few tokens: over links between machines
(ep/backends/linked.py), through shared memory inside of each, in the native calls of both (native/exchange.py).

To the links a machine is one rank with all its slots: a token goes once to each other machine that has some of its
experts, to the rank with this rank's place there. What has arrived so is brought, with this rank's own tokens, to an
exchange with the other ranks of its machine, whose sums go back: once per token and machine.

Legend: T tokens of this rank, D hidden size, K experts per token, N tokens that arrive over links, P choices of slots
here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import dbo.alive as alive
from ep.backends.linked import CHOICE_BYTES, TOP_K, LinkedAllToAll
from ep.protocol import Arrived, Later, PeerLost, Routing
from ep.recorder import Kind
from ep.transport.group import GlooGroup
from ep.transport.shm_group import ShmGroup
from moe_kernels import Layout, TokenBatch, TokenMemory
from native.exchange import LATE_COMBINE, TOO_MANY, FewTokens, PeerMemory
from native.tape import Late


class HierarchicalAllToAll:
    """One lane. Every rank of the group makes its lanes in the same order; a lane's next dispatch is made after the
    last combine has been waited for."""

    layout = Layout.RAGGED

    def __init__(self, group: GlooGroup, num_slots: int, hidden_size: int, dtype: torch.dtype, most: int) -> None:
        """group: with links, and the ranks of this machine. most: tokens of a rank in one exchange, at most
        `most_tokens`."""
        links, machine = group.links, group.machine
        assert links is not None and machine is not None
        self._group, self._machine = group, machine
        self._outer = LinkedAllToAll(links, num_slots * machine.size, hidden_size, dtype, most)
        self._words = machine.signals.reserve(), machine.signals.reserve()
        most_inside = most * links.size
        peers = _peers(machine, self._words, most_inside, hidden_size * dtype.itemsize)
        self._few = FewTokens(
            machine.rank, num_slots, hidden_size, dtype, peers, most_inside, TOP_K, within=self._outer.few
        )

    @property
    def waits(self) -> dict[int, Callable[[Late], None]]:
        """What waits where a tape stops in an exchange of this lane, by what the tape then says."""
        return {**self._outer.waits, self._few.key: self._wait_late}

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Later[Arrived]:
        """x_TD and the routing must not change until it has been waited for."""
        sent = self._outer.dispatch(x_TD, routing)
        return Later(self._arrive, sent)

    def _arrive(self, sent: Later[Arrived]) -> Arrived:
        outside, few = sent.wait(), self._few
        batch = outside.batch
        assert isinstance(batch, TokenBatch)
        brought = batch.x_TD, batch.slot_TK, batch.weight_TK
        few.put(*brought)
        counts = few.dispatched()
        if counts is None:
            self._wait(False)
            counts = few.counts
        x_ND, slot_NK, weight_NK, y_PD = few.join(*brought, sum(counts))
        memory = TokenMemory(*few.memory)
        inside = TokenBatch(x_ND, slot_NK, weight_NK, few.first_slot, torch.float32, y_PD, memory)
        return Arrived(inside, outside)

    def combine(self, y_PD: Tensor, ticket: object, out_TD: Tensor) -> Later[Tensor]:
        assert isinstance(ticket, Arrived) and isinstance(ticket.batch, TokenBatch) and y_PD.is_contiguous()
        batch, few = ticket.batch, self._few
        assert isinstance(ticket.ticket, Routing) and out_TD.is_contiguous()
        few.give_back(y_PD, batch.slot_TK.shape[1])
        if not few.returned():
            self._wait(True)
        few.sum_within(batch.slot_TK, batch.weight_TK, y_PD)
        return Later(self._outer.gather, y_PD, ticket.ticket, out_TD)

    def _wait_late(self, late: Late) -> None:
        """Until an exchange on a tape can go on. PeerLost."""
        if late.reason == TOO_MANY:
            raise RuntimeError("a rank has sent more tokens than the ranks had agreed on")
        combine = late.reason == LATE_COMBINE
        alive.at(int(Kind.COMBINE if combine else Kind.DISPATCH), late.mark)
        self._wait(combine)

    def _wait(self, combine: bool) -> None:
        """Until the tokens of all ranks of this machine have come, or their results."""
        few, machine = self._few, self._machine
        peers = [peer for peer in range(machine.size) if peer != machine.rank]
        try:
            counts = machine.signals.wait(self._words[combine], peers, few.number)
        except PeerLost as lost:
            # One that has left may have lost another: only the text names it.
            first = self._group.rank - machine.rank
            reason = f"of the ranks of this machine, counted from rank {first}, it {lost}"
            raise self._group.lost(RuntimeError(reason)) from lost
        if not combine:
            counts.insert(machine.rank, few.counts[machine.rank])
            few.note(counts)

    def close(self) -> None:
        """Nothing is held; the group is closed by its owner."""


def _peers(machine: ShmGroup, words: tuple[int, int], most: int, row_bytes: int) -> list[PeerMemory]:
    """Where the ranks of this machine put what they have for each other."""
    heap, signals, own = machine.heap, machine.signals, machine.rank
    token_bytes, back_bytes = most * (row_bytes + TOP_K * CHOICE_BYTES) + 64, most * TOP_K * row_bytes
    tokens, back = heap.reserve(machine.size * token_bytes), heap.reserve(machine.size * back_bytes)
    dispatch, combine = words

    def at(offset: int, num_bytes: int, of: int, sender: int) -> int:
        return heap.window(of, offset + sender * num_bytes, num_bytes).data_ptr()

    return [
        PeerMemory(
            at(tokens, token_bytes, peer, own),
            at(back, back_bytes, peer, own),
            at(tokens, token_bytes, own, peer),
            at(back, back_bytes, own, peer),
            signals.address(peer, dispatch, own),
            signals.address(peer, combine, own),
            signals.address(own, dispatch, peer),
            signals.address(own, combine, peer),
            signals.asleep_address(peer),
        )
        for peer in range(machine.size)
    ]
