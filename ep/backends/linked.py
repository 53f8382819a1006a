"""Expert parallelism of ranks on several machines in steps with few tokens: native calls over connections of their own
(native/exchange.py, ep/transport/links.py), which a graph on a CPU can hold.

What travels is what ep/backends/collective.py sends over a network, and the sums are the same, bit by bit: a token goes
once to each rank that has some of its experts, which weights and sums its rows, and the sender adds up the ranks' rows
in their order.

Legend: T tokens of this rank, D hidden size, K experts per token, N tokens of all ranks, P choices of slots here, G
ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import dbo.alive as alive
from ep.protocol import Arrived, Later, Routing
from ep.recorder import Kind
from ep.transport.group import GlooGroup
from ep.transport.links import Links
from moe_kernels import Layout, TokenBatch, TokenMemory
from native.exchange import LATE_COMBINE, TOO_MANY, FewTokens, Linked, PeerMemory, can_run
from native.links import MAX_BOXES
from native.tape import Late

TOP_K = 16  # choices of a token for which there is place
CHOICE_BYTES = 12  # a slot and a weight
_MOST_BYTES = 1 << 29  # of the rows of all choices of all ranks
_BOXES = 2  # of a lane
_LINE = 64  # bytes


def most_tokens(group: GlooGroup, hidden_size: int, dtype: torch.dtype, num_lanes: int) -> int:
    """Of a rank in one exchange; 0: there can be none."""
    links = group.links
    if links is None or not can_run(dtype, group.size) or links.sockets.num_boxes + _BOXES * num_lanes > MAX_BOXES:
        return 0
    return _MOST_BYTES // (group.size * TOP_K * hidden_size * dtype.itemsize)


class LinkedAllToAll:
    """One lane. Every rank of the group makes its lanes in the same order; a lane's next dispatch is made after the
    last combine has been waited for."""

    layout = Layout.RAGGED

    def __init__(self, links: Links, num_slots: int, hidden_size: int, dtype: torch.dtype, most: int) -> None:
        """most: tokens of a rank in one exchange, at most `most_tokens`."""
        self._links = links
        self._first_slot = links.rank * num_slots
        size, row_bytes = links.size, hidden_size * dtype.itemsize
        token_bytes = most * (row_bytes + TOP_K * CHOICE_BYTES) + 8
        self._memory: list[Tensor] = []  # by rank: what leaves and arrives, and words
        leaving, arriving = (self._by_rank(size, token_bytes) for _ in range(2))
        going, coming = (self._by_rank(size, most * row_bytes) for _ in range(2))
        dispatched, combined = (self._by_rank(size, 8) for _ in range(2))
        self._words = [memory_GB.view(torch.int64)[:, 0] for memory_GB in self._memory[-2:]]
        first = links.sockets.boxes(arriving, token_bytes, dispatched)
        links.sockets.boxes(coming, most * row_bytes, combined)
        peers = [
            PeerMemory(
                leaving[peer], going[peer], arriving[peer], coming[peer], 0, 0, dispatched[peer], combined[peer], 0
            )
            for peer in range(size)
        ]
        self.few = FewTokens(
            links.rank, num_slots, hidden_size, dtype, peers, most, TOP_K, Linked(links.sockets, first)
        )

    def _by_rank(self, size: int, num_bytes: int) -> list[int]:
        """Addresses of zeros, in lines of their own."""
        memory_GB = torch.zeros(size, -(-num_bytes // _LINE) * _LINE, dtype=torch.uint8)
        self._memory.append(memory_GB)
        return [row_B.data_ptr() for row_B in memory_GB]

    @property
    def recorded_tokens(self) -> int:
        """Up to so many tokens of a rank exchanges can be recorded on a tape."""
        return self.few.most

    @property
    def waits(self) -> dict[int, Callable[[Late], None]]:
        """What waits where a tape stops in an exchange of this lane, by what the tape then says."""
        return {self.few.key: self.wait_late}

    def wait_late(self, late: Late) -> None:
        """Until an exchange on a tape can go on. PeerLost."""
        if late.reason == TOO_MANY:
            raise RuntimeError("a rank has sent more tokens than the ranks had agreed on")
        combine = late.reason == LATE_COMBINE
        alive.at(int(Kind.COMBINE if combine else Kind.DISPATCH), late.mark)
        self._wait(combine)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Later[Arrived]:
        """x_TD and the routing must not change until it has been waited for."""
        x_TD = x_TD.contiguous()
        routing = Routing(routing.slot_TK.contiguous(), routing.weight_TK.contiguous())
        assert x_TD.shape[0] <= self.few.most and routing.slot_TK.shape[1] <= TOP_K, "few tokens, of few experts each"
        self.few.put(x_TD, routing.slot_TK, routing.weight_TK)
        return Later(self.arrive, x_TD, routing)

    def _wait(self, combine: bool) -> None:
        """Until all ranks' tokens have come, or their results."""
        few, words_G = self.few, self._words[combine]

        def missing() -> list[int]:
            words = words_G.tolist()
            peers = [peer for peer in range(len(words)) if peer != self._links.rank]
            return [peer for peer in peers if words[peer] - few.number & 1 << 31]  # of their last 32 bits

        self._links.wait(few.returned if combine else lambda: few.dispatched() is not None, missing)

    def arrive(self, x_TD: Tensor, routing: Routing) -> Arrived:
        """The second half of a dispatch."""
        few = self.few
        counts = few.dispatched()
        if counts is None:
            self._wait(False)
            counts = few.counts
        if max(counts) > few.most:
            raise RuntimeError("a rank has sent more tokens than the ranks had agreed on")
        x_ND, slot_NK, weight_NK, y_PD = few.join(x_TD, routing.slot_TK, routing.weight_TK, sum(counts))
        memory = TokenMemory(*few.memory)
        batch = TokenBatch(x_ND, slot_NK, weight_NK, self._first_slot, torch.float32, y_PD, memory)
        return Arrived(batch, routing)

    def combine(self, y_PD: Tensor, ticket: object, out_TD: Tensor) -> Later[Tensor]:
        assert isinstance(ticket, Routing) and y_PD.is_contiguous() and out_TD.is_contiguous()
        self.few.give_back(y_PD, ticket.slot_TK.shape[1])
        return Later(self.gather, y_PD, ticket, out_TD)

    def gather(self, y_PD: Tensor, routing: Routing, out_TD: Tensor) -> Tensor:
        """The second half of a combine."""
        if not self.few.returned():
            self._wait(True)
        self.few.sum(routing.slot_TK, routing.weight_TK, y_PD, out_TD)
        return out_TD

    def close(self) -> None:
        """Nothing is held; the group is closed by its owner."""
