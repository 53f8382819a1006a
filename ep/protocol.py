"""What moves tokens between ranks: one protocol (docs/design.md, D2).

Legend: T tokens of this rank, K experts per token, R rows arrived, S slots of a rank, C rows per slot, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, ParamSpec, Protocol, TypeVar

from msgspec import Struct
from torch import Tensor

from moe_kernels.layout import ExpertBatch, Layout, TokenBatch

T_co = TypeVar("T_co", covariant=True)
V = TypeVar("V")
P = ParamSpec("P")


class PeerLost(RuntimeError):
    """An exchange cannot complete because peers are gone. `ranks`, of the group, names those known to be (may be
    empty)."""

    def __init__(self, ranks: tuple[int, ...], reason: str) -> None:
        super().__init__(f"lost rank(s) {list(ranks) if ranks else 'unknown'}: {reason}")
        self.ranks = ranks
        self.reason = reason


class Pending(Protocol[T_co]):
    """A value whose bytes are in flight. `wait()` is the only asynchronous word; it is called at most once."""

    def wait(self) -> T_co: ...


class Ready(Generic[V]):
    """A Pending that has already arrived."""

    __slots__ = ("_value",)

    def __init__(self, value: V) -> None:
        self._value = value

    def wait(self) -> V:
        return self._value


class Later(Generic[V]):
    """A Pending whose `wait` is the second half of what was begun: finish(*args)."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[P, V], *args: P.args, **kwargs: P.kwargs) -> None:
        self._finish = partial(finish, *args, **kwargs)

    def wait(self) -> V:
        return self._finish()


class Routing(Struct, frozen=True):
    """Where each token goes. slot_TK: int64 [T, K] slot in the group (rank of the group * S + local slot), distinct
    within a row; weight_TK: float32 [T, K]."""

    slot_TK: Tensor
    weight_TK: Tensor


class Arrived(Struct, frozen=True):
    """What dispatch brought: rows for the local experts, or tokens whose rows they take themselves; and the ticket that
    combine takes back."""

    batch: ExpertBatch | TokenBatch
    ticket: object


class AllToAll(Protocol):
    """Moves rows to their experts and results back. Nothing is remembered between calls except buffers.

    Every rank of the group calls dispatch and combine equally often and in the same order (zero tokens are fine).
    `combine` multiplies by the routing weights and sums, unless the experts have done both already (TokenBatch), and
    writes float32-accumulated results in x's dtype to out_TD. Both raise PeerLost out of `wait()` (or at once) when a
    peer is gone; no wait is without a bound.
    """

    @property
    def layout(self) -> Layout: ...

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]: ...

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]: ...

    def close(self) -> None: ...
