"""The all-to-all backends by name. What is heavy or optional is imported by the backend's own file when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ep.collective import CollectiveAllToAll
from ep.group import GlooGroup, Group, LocalGroup, MailboxGroup, gloo_group
from ep.local import LocalAllToAll
from ep.mailbox import Mailbox
from ep.parcels import CollectiveParcels, LocalParcels, MailboxParcels, Parcels, ShmParcels
from ep.protocol import AllToAll
from ep.rows import make_rows
from ep.shm import ShmAllToAll
from ep.shm_futex import unsupported
from ep.shm_group import ShmGroup, shm_group
from ep.shm_meeting import Watch, await_sign_ins, sign_in
from moe_kernels import Layout

NAMES = ("local", "shm", "gloo", "mailbox")  # "auto" takes the first that can serve


def explain(size: int) -> dict[str, str]:
    """For each backend "ok", or why it cannot serve `size` ranks in processes of their own."""
    alone = "one rank has nobody to exchange with"
    return {
        "local": "ok" if size == 1 else f"serves one rank; there are {size}",
        "shm": unsupported() or "ok" if size > 1 else alone,
        "gloo": "ok" if size > 1 else alone,
        "mailbox": "ranks inside one process, for tests",
    }


def choose(name: str, size: int) -> str:
    """The backend for `size` ranks: `name` itself, or with "auto" the first that can.

    Raises ValueError when there is no such backend, or it cannot serve so many ranks.
    """
    verdicts = explain(size)
    if name == "auto":
        return next(backend for backend in NAMES if verdicts[backend] == "ok")
    if name not in verdicts:
        raise ValueError(f"all2all backend {name!r} is unknown; it must be auto, {', '.join(NAMES)}")
    if name != "mailbox" and verdicts[name] != "ok":
        raise ValueError(f"all2all backend {name!r}: {verdicts[name]}")
    return name


def make_lanes(
    name: str,
    group: Group,
    num_slots: int,
    hidden_size: int,
    dtype: torch.dtype,
    num_lanes: int = 1,
    layout: Layout = Layout.RAGGED,
    rows: str = "plain",
) -> Sequence[AllToAll]:
    """One all-to-all per lane of overlap. Every rank of the group calls this in the same order.

    num_slots: expert slots of each rank; dtype: of hidden states and results. layout: of the experts' rows (PADDED: shm and
    mailbox). rows: "plain", or "fp8": rows travel to the experts in half the bytes (ep/rows.py; one rank alone sends
    nothing, and leaves them as they are). name: with "auto" the backend that the group belongs to
    (size 1: local; ShmGroup: shm; GlooGroup: gloo; MailboxGroup: mailbox). Raises ValueError as `choose`, and for another
    backend's group.
    """
    chosen = choose(_of_group(group) if name == "auto" else name, group.size)
    if layout is Layout.PADDED and chosen not in ("shm", "mailbox"):
        raise ValueError(f"all2all backend {chosen!r} gives experts ragged rows only; padded ones: shm, mailbox")
    if chosen == "local":
        return [LocalAllToAll(num_slots) for _ in range(num_lanes)]
    if chosen == "shm" and isinstance(group, ShmGroup):
        heap, signals = group.heap, group.signals
        return [ShmAllToAll(heap, signals, num_slots, hidden_size, dtype, layout, rows=rows) for _ in range(num_lanes)]
    if chosen == "gloo" and isinstance(group, GlooGroup):
        return [CollectiveAllToAll(group, num_slots, hidden_size, dtype, rows) for _ in range(num_lanes)]
    if chosen == "mailbox" and isinstance(group, MailboxGroup):
        form = make_rows(rows, hidden_size, dtype)
        return [Mailbox(group.world, group.rank, num_slots, lane, layout, form) for lane in range(num_lanes)]
    raise ValueError(f"all2all backend {chosen!r} cannot use a {type(group).__name__}")


def make_parcels(group: Group, room_bytes: int) -> Parcels:
    """What carries bytes between the ranks of the group. Every rank calls this in the same order, with equal room_bytes:
    what one rank receives at most in one exchange."""
    if isinstance(group, MailboxGroup):
        return MailboxParcels(group.world, group.rank)
    if isinstance(group, ShmGroup):
        return ShmParcels(group.heap, group.signals, room_bytes)
    return CollectiveParcels(group) if isinstance(group, GlooGroup) else LocalParcels()


def _of_group(group: Group) -> str:
    if isinstance(group, MailboxGroup):
        return "mailbox"
    if isinstance(group, ShmGroup):
        return "shm"
    return "gloo" if isinstance(group, GlooGroup) else "local"


def make_groups(
    backend: str,
    folder: Path,
    rank: int,
    size: int,
    timeout: float,
    epoch: int = 0,
    stop: Callable[[], bool] | None = None,
) -> tuple[Group, Group]:
    """The two groups of a rank: where the ranks agree, and where tokens travel to experts (make_lanes wants that one).

    Two, because the next step is agreed on while the last one's tokens still travel. backend: "shm" or "gloo"; with
    size 1 any name gives LocalGroups. rank: 0 to size - 1, that is among the living. folder: exists, on this machine;
    epoch: new for every membership. timeout: seconds, the bound of every wait of the groups, joining included.
    stop: asked every few milliseconds while others have not come yet; True (this membership is out of date) ends that.
    Raises PeerLost when others do not come, have ended, or `stop` said so; ValueError for numbers out of range.
    """
    if size == 1:
        return LocalGroup(), LocalGroup()
    if backend == "shm":
        return _shm_groups(folder, rank, size, timeout, epoch, stop)
    if backend == "gloo":
        return _gloo_groups(folder, rank, size, timeout, epoch, stop)
    raise ValueError(f"all2all backend {backend!r} does not join processes; it must be shm or gloo")


def _shm_groups(
    folder: Path, rank: int, size: int, timeout: float, epoch: int, stop: Callable[[], bool] | None
) -> tuple[Group, Group]:
    agreement = shm_group(folder, rank, size, timeout, "agreement", epoch, stop)
    try:
        # Who ended in between will not sign in again.
        return agreement, shm_group(
            folder, rank, size, timeout, "experts", epoch, lambda: agreement.anybody_ended() or bool(stop and stop())
        )
    except BaseException:
        agreement.close()
        raise


def _gloo_groups(
    folder: Path, rank: int, size: int, timeout: float, epoch: int, stop: Callable[[], bool] | None
) -> tuple[Group, Group]:
    # gloo waits for a process that has ended, so the ranks first meet without it.
    watch = Watch()
    path = sign_in(folder, f"gloo-{epoch}", rank)
    try:
        await_sign_ins(folder, f"gloo-{epoch}", rank, size, timeout, watch, stop)
        store = str(folder / f"store-{epoch}")
        agreement, experts = (gloo_group(store, rank, size, timeout, name, epoch) for name in ("agreement", "experts"))
    finally:
        watch.close()
        path.unlink(missing_ok=True)
    return agreement, experts
