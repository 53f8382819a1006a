"""Who hosts which expert, as a value (docs/design.md, D5).

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import force_setattr, replace

_SHARE_TOLERANCE = 1e-3
_HEADER = 6  # the integers that `to_bytes` begins with


class Distance(IntEnum):
    """How far the weights of a rank are from another one: what they share is not brought, but mapped."""

    SAME_STORE = 0
    SAME_MACHINE = 1
    OTHER_MACHINE = 2


class Placement(Struct, frozen=True, eq=False):
    """slot_to_expert: int32 [L, G, S], -1 for an unused slot; share: float32 [L, G, S], the part of its expert's tokens
    that a slot receives (the shares of an expert over all its slots sum to 1; 0 on unused slots).

    alive: which ranks take part; failure_domains: a label per rank (ranks of one node share it), or nothing; stores:
    the same for ranks that map one store of weights (docs/memory.md), or nothing: each has weights of its own.
    The arrays are copied and made read-only. Two placements are compared by `checksum()`.
    Raises ValueError when a shape does not fit, an id is out of range, an expert has no slot on a live rank, a dead
    rank or an unused slot holds a share, a share is negative, the shares of an expert do not sum to 1, or ranks of two
    failure domains have one store.
    """

    epoch: int
    num_experts: int
    slot_to_expert: npt.NDArray[np.int32]
    share: npt.NDArray[np.float32]
    alive: tuple[bool, ...]
    failure_domains: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Copies: a caller that goes on writing to its array must not change a value that was already checked.
        slot_to_expert = np.array(self.slot_to_expert, dtype=np.int32)
        share = np.array(self.share, dtype=np.float32)
        slot_to_expert.flags.writeable = False
        share.flags.writeable = False
        force_setattr(self, "slot_to_expert", slot_to_expert)
        force_setattr(self, "share", share)
        force_setattr(self, "alive", tuple(bool(a) for a in self.alive))
        force_setattr(self, "failure_domains", tuple(int(d) for d in self.failure_domains))
        force_setattr(self, "stores", tuple(int(label) for label in self.stores))
        self._check_shapes()
        self._check_coverage()

    def _check_shapes(self) -> None:
        if self.epoch < 0:
            raise ValueError(f"placement: epoch is {self.epoch}; it must be 0 or more")
        if self.num_experts < 1:
            raise ValueError(f"placement: num_experts is {self.num_experts}; it must be 1 or more")
        if self.slot_to_expert.ndim != 3 or 0 in self.slot_to_expert.shape[1:]:
            raise ValueError(
                f"placement: slot_to_expert has shape {list(self.slot_to_expert.shape)}; "
                "it must be [layers, ranks, slots] with at least one rank and one slot"
            )
        if self.share.shape != self.slot_to_expert.shape:
            raise ValueError(
                f"placement: share has shape {list(self.share.shape)}; "
                f"slot_to_expert has {list(self.slot_to_expert.shape)} and they must be equal"
            )
        for name, values in (("failure_domains", self.failure_domains), ("stores", self.stores), ("alive", self.alive)):
            if len(values) != self.num_ranks and (values or name == "alive"):
                raise ValueError(f"placement: {name} has {len(values)} entries for {self.num_ranks} ranks")
        if self.stores and self.failure_domains:
            for store in set(self.stores):
                labels = {
                    label for label, other in zip(self.failure_domains, self.stores, strict=True) if other == store
                }
                if len(labels) > 1:
                    raise ValueError(f"placement: stores: store {store} is in failure domains {sorted(labels)}")

    def _check_coverage(self) -> None:
        ids, share = self.slot_to_expert, self.share
        if ids.size and (ids.min() < -1 or ids.max() >= self.num_experts):
            raise ValueError(
                f"placement: slot_to_expert holds ids from {ids.min()} to {ids.max()}; "
                f"they must be -1 (unused) or 0 to {self.num_experts - 1}"
            )
        if not (np.isfinite(share).all() and (share >= 0).all()):
            raise ValueError("placement: every share must be a finite number, 0 or more")
        if (share[ids < 0] != 0).any():
            raise ValueError("placement: an unused slot holds a share; it must be 0")
        dead = [rank for rank, alive in enumerate(self.alive) if not alive]
        for rank in dead:
            if share[:, rank].any():
                raise ValueError(f"placement: rank {rank} is not alive but holds a share; it must be 0")
        # All layers in one count, each with numbers of its own for its experts; unused slots have the one behind them.
        shape, end = (self.num_layers, self.num_experts), self.num_layers * self.num_experts
        key_LGS = np.where(ids < 0, end, ids + self.num_experts * np.arange(self.num_layers)[:, None, None])
        live_N = key_LGS[:, np.array(self.alive, dtype=bool)].ravel()
        missing = np.argwhere(np.bincount(live_N, minlength=end + 1)[:end].reshape(shape) == 0)
        if missing.size:
            layer, first = missing[0]
            raise ValueError(
                f"placement: layer {layer}: {(missing[:, 0] == layer).sum()} expert(s) have no slot on a live rank, "
                f"the first is {first}"
            )
        sums_LE = np.bincount(key_LGS.ravel(), weights=share.ravel(), minlength=end + 1)[:end].reshape(shape)
        off = np.argwhere(np.abs(sums_LE - 1) > _SHARE_TOLERANCE)
        if off.size:
            layer, expert = off[0]
            raise ValueError(
                f"placement: layer {layer}: the shares of expert {expert} sum to {sums_LE[layer, expert]:.4f}; they "
                f"must sum to 1 within {_SHARE_TOLERANCE}"
            )

    @property
    def num_layers(self) -> int:
        return int(self.slot_to_expert.shape[0])

    @property
    def num_ranks(self) -> int:
        return int(self.slot_to_expert.shape[1])

    @property
    def slots_per_rank(self) -> int:
        return int(self.slot_to_expert.shape[2])

    @property
    def everywhere(self) -> bool:
        """Every live rank has every expert, in order: only the shares can be better or worse."""
        live = self.slot_to_expert[:, np.array(self.alive, dtype=bool)]
        return self.slots_per_rank == self.num_experts and bool((live == np.arange(self.num_experts)).all())

    def distance(self, rank: int, other: int) -> Distance:
        """Between two ranks. Without failure domains all are on one machine."""
        if rank == other or (self.stores and self.stores[rank] == self.stores[other]):
            return Distance.SAME_STORE
        if not self.failure_domains or self.failure_domains[rank] == self.failure_domains[other]:
            return Distance.SAME_MACHINE
        return Distance.OTHER_MACHINE

    def experts_of(self, layer: int, rank: int) -> tuple[int, ...]:
        """The logical expert in each slot of `rank` (-1 unused)."""
        return tuple(int(e) for e in self.slot_to_expert[layer, rank])

    def slots_of(self, layer: int) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each logical expert its (global slot, share) pairs on live ranks, lowest slot first.

        A global slot is rank * S + the slot within the rank.
        """
        slots: list[list[tuple[int, float]]] = [[] for _ in range(self.num_experts)]
        for rank in range(self.num_ranks):
            if not self.alive[rank]:
                continue
            for slot, expert in enumerate(self.experts_of(layer, rank)):
                if expert >= 0:
                    slots[expert].append((rank * self.slots_per_rank + slot, float(self.share[layer, rank, slot])))
        return tuple(tuple(pairs) for pairs in slots)

    def checksum(self) -> int:
        """A hash of everything but the epoch and the stores, equal on every machine; 0 <= checksum < 2**63, so it fits
        a record."""
        digest = hashlib.blake2b(digest_size=8)
        shape = (self.num_experts, *self.slot_to_expert.shape)
        digest.update(repr((shape, self.alive, self.failure_domains)).encode())
        digest.update(self.slot_to_expert.astype("<i4").tobytes())
        digest.update(self.share.astype("<f4").tobytes())
        return int.from_bytes(digest.digest(), "little") >> 1

    @property
    def num_bytes(self) -> int:
        """Of `to_bytes`: it depends on the numbers of layers, ranks and slots only."""
        return 4 * (_HEADER + 3 * self.num_ranks) + self.slot_to_expert.nbytes + self.share.nbytes

    def to_bytes(self) -> bytes:
        """Little-endian: int32 numbers, who is alive, the failure domains and the stores, int32 ids, float32 shares."""
        none = (0,) * self.num_ranks
        labels = *(self.failure_domains or none), *(self.stores or none)
        labelled = bool(self.failure_domains) + 2 * bool(self.stores)
        numbers = (self.epoch, self.num_experts, *self.slot_to_expert.shape, labelled)
        head = np.array((*numbers, *self.alive, *labels), dtype="<i4")
        return head.tobytes() + self.slot_to_expert.astype("<i4").tobytes() + self.share.astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Placement:
        """The placement that `to_bytes` gave. Raises ValueError when it is not a valid one."""
        words = np.frombuffer(data, dtype="<i4")
        if words.size < _HEADER:
            raise ValueError(f"placement: {len(data)} bytes are no placement; its numbers alone take {4 * _HEADER}")
        epoch, num_experts, num_layers, num_ranks, num_slots, labelled = words[:_HEADER].tolist()
        size = num_layers * num_ranks * num_slots
        if words.size != _HEADER + 3 * num_ranks + 2 * size or min(num_layers, num_ranks, num_slots) < 0:
            raise ValueError(
                f"placement: {len(data)} bytes are not those of {num_layers} layers, {num_ranks} ranks and "
                f"{num_slots} slots of a rank"
            )
        alive_G, domains_G, stores_G, ids, share = np.split(words[_HEADER:], np.cumsum([*[num_ranks] * 3, size]))
        shape = (num_layers, num_ranks, num_slots)
        return cls(
            epoch=epoch,
            num_experts=num_experts,
            slot_to_expert=ids.reshape(shape),
            share=share.view("<f4").reshape(shape),
            alive=tuple(alive_G.tolist()),
            failure_domains=tuple(domains_G.tolist()) if labelled & 1 else (),
            stores=tuple(stores_G.tolist()) if labelled & 2 else (),
        )


def slots_needed(num_experts: int, num_ranks: int, num_redundant: int = 0) -> int:
    """Slots that each rank must have to hold every expert once and `num_redundant` replicas: ceil((E + redundant) / G).

    Raises ValueError when a number is out of range.
    """
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}; it must be 1 or more")
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; it must be 1 or more")
    if num_redundant < 0:
        raise ValueError(f"num_redundant is {num_redundant}; it must be 0 or more")
    return -(-(num_experts + num_redundant) // num_ranks)


def linear_placement(
    num_layers: int,
    num_experts: int,
    num_ranks: int,
    slots_per_rank: int | None = None,
    failure_domains: Sequence[int] = (),
    stores: Sequence[int] = (),
) -> Placement:
    """Rank 0 has the first experts, rank 1 the next ones and so on, the same in every layer; all ranks alive, epoch 0.

    With slots_per_rank = E every rank has every expert, and slot s has expert s.

    Where E is no multiple of G, the first E % G ranks have one expert more. slots_per_rank None: ceil(E / G) slots, and
    the slots left over stay unused (-1). Given: the slots left over hold replicas: always of the expert that has fewest
    slots, not yet on that rank and not yet in its failure domain where that can be. They are spares, with share 0: as
    long as the loads are not known, a second copy at work would only be more weights to read in every step.
    Raises ValueError when the experts do not fit the slots, or a number is out of range.
    """
    fewest = slots_needed(num_experts, num_ranks)
    slots = fewest if slots_per_rank is None else slots_per_rank
    if slots < fewest:
        raise ValueError(
            f"slots_per_rank is {slots}; {num_experts} experts on {num_ranks} ranks need at least {fewest} slots a rank"
        )
    if num_layers < 0:
        raise ValueError(f"num_layers is {num_layers}; it must be 0 or more")
    ids = np.full((num_ranks, slots), -1, dtype=np.int32)
    for rank, experts in enumerate(np.array_split(np.arange(num_experts, dtype=np.int32), num_ranks)):
        ids[rank, : experts.size] = experts
    if slots_per_rank == num_experts:
        ids[:] = np.arange(num_experts)
    elif slots_per_rank is not None:
        _fill_with_replicas(ids, num_experts, tuple(failure_domains) or tuple(range(num_ranks)))
    share = owner_shares(ids[None], num_experts)[0]
    return Placement(
        epoch=0,
        num_experts=num_experts,
        slot_to_expert=np.broadcast_to(ids, (num_layers, *ids.shape)),
        share=np.broadcast_to(share, (num_layers, *share.shape)),
        alive=(True,) * num_ranks,
        failure_domains=tuple(failure_domains),
        stores=tuple(stores),
    )


def at_hand_everywhere(placement: Placement) -> Placement:
    """The same shares of work where every rank has every expert: slot s has expert s."""
    layers, ranks, _ = placement.slot_to_expert.shape
    share_LGE = np.zeros((layers, ranks, placement.num_experts), dtype=np.float32)
    layer_N, rank_N, slot_N = np.nonzero(placement.slot_to_expert >= 0)
    expert_N = placement.slot_to_expert[layer_N, rank_N, slot_N]
    np.add.at(share_LGE, (layer_N, rank_N, expert_N), placement.share[layer_N, rank_N, slot_N])
    ids = np.where(np.array(placement.alive)[:, None], np.arange(placement.num_experts, dtype=np.int32), -1)
    return replace(placement, slot_to_expert=np.broadcast_to(ids, share_LGE.shape), share=share_LGE)


def owner_shares(slot_to_expert: npt.NDArray[np.int32], num_experts: int) -> npt.NDArray[np.float32]:
    """float32 [L, G, S]: 1 for one slot of each expert, 0 for its others.

    Experts with fewest copies choose first; each takes its slot on the rank that owns fewest so far, the first of
    equals.
    """
    layers, num_ranks, slots = slot_to_expert.shape
    if layers > 1 and (slot_to_expert == slot_to_expert[:1]).all():
        return np.repeat(owner_shares(slot_to_expert[:1], num_experts), layers, axis=0)
    # The places of each expert, in order, and behind them the one after the last, as often as fills the row.
    ids_LP, end = slot_to_expert.reshape(layers, num_ranks * slots), num_ranks * slots
    layer_U, place_U = np.nonzero(ids_LP >= 0)
    key_U = layer_U * num_experts + ids_LP[layer_U, place_U]
    order_U = np.argsort(key_U, kind="stable")
    key_U, place_U = key_U[order_U], place_U[order_U]
    copies_N = np.bincount(key_U, minlength=layers * num_experts)
    place_NC = np.full((layers * num_experts, copies_N.max(initial=1)), end)
    place_NC[key_U, np.arange(len(key_U)) - (np.cumsum(copies_N) - copies_N)[key_U]] = place_U

    copies_LE, layer_L1 = copies_N.reshape(layers, num_experts), np.arange(layers)[:, None]
    place_LEC = place_NC.reshape(*copies_LE.shape, place_NC.shape[1])
    place_LEC = place_LEC[layer_L1, copies_LE.argsort(axis=1, kind="stable")]  # in the order of choosing
    owned = np.zeros((layers, num_ranks + 1), dtype=np.int64)
    owned[:, num_ranks] = num_experts + 1  # only an expert without a slot chooses what is behind the last rank
    owned = owned.ravel()
    owner_LEC = layer_L1[:, :, None] * (num_ranks + 1) + place_LEC // slots
    choice_LE = np.zeros(copies_LE.shape, dtype=np.int64)
    for turn in range(num_experts):
        owner_LC = owner_LEC[:, turn]
        choice_LE[:, turn] = choice_L = owned.take(owner_LC).argmin(1)
        owned[owner_LC[layer_L1[:, 0], choice_L]] += 1
    share_LP = np.zeros((layers, end + 1), dtype=np.float32)
    share_LP[layer_L1, place_LEC[layer_L1, np.arange(num_experts), choice_LE]] = 1.0
    return share_LP[:, :end].reshape(slot_to_expert.shape)


def _fill_with_replicas(ids: npt.NDArray[np.int32], num_experts: int, domains: tuple[int, ...]) -> None:
    """Write a replica into every unused slot of ids [G, S], one rank after another so that all ranks fill evenly."""
    num_ranks, slots = ids.shape
    if len(domains) != num_ranks:
        raise ValueError(f"failure_domains has {len(domains)} entries for {num_ranks} ranks")
    counts = np.bincount(ids[ids >= 0], minlength=num_experts)
    labels = np.array(domains)
    for slot in range(slots):
        for rank in range(num_ranks):
            if ids[rank, slot] >= 0:
                continue
            here = np.isin(np.arange(num_experts), ids[rank])
            near = np.isin(np.arange(num_experts), ids[labels == domains[rank]])
            expert = int(np.lexsort((np.arange(num_experts), near, counts, here))[0])
            ids[rank, slot] = expert
            counts[expert] += 1
