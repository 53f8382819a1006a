"""The all-to-all backends by name. What is heavy or optional is imported by the backend's own file when it is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep.collective import CollectiveAllToAll
from ep.group import GlooGroup, Group, MailboxGroup
from ep.local import LocalAllToAll
from ep.mailbox import Mailbox
from ep.protocol import AllToAll

NAMES = ("local", "gloo", "mailbox")


def explain(size: int) -> dict[str, str]:
    """For each backend "ok", or why it cannot serve `size` ranks in processes of their own."""
    return {
        "local": "ok" if size == 1 else f"serves one rank; there are {size}",
        "gloo": "ok" if size > 1 else "one rank has nobody to exchange with",
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
    name: str, group: Group, num_slots: int, hidden_size: int, dtype: torch.dtype, num_lanes: int = 1
) -> Sequence[AllToAll]:
    """One all-to-all per lane of overlap. Every rank of the group calls this in the same order.

    num_slots: expert slots of each rank; dtype: of the rows. Raises ValueError as `choose`, and for a group that is not
    the backend's own (local: any of size 1; gloo: GlooGroup; mailbox: MailboxGroup).
    """
    chosen = choose(name, group.size)
    if chosen == "local":
        return [LocalAllToAll(num_slots) for _ in range(num_lanes)]
    if chosen == "gloo" and isinstance(group, GlooGroup):
        return [CollectiveAllToAll(group, num_slots, hidden_size, dtype) for _ in range(num_lanes)]
    if chosen == "mailbox" and isinstance(group, MailboxGroup):
        return [Mailbox(group.world, group.rank, num_slots, lane) for lane in range(num_lanes)]
    raise ValueError(f"all2all backend {chosen!r} cannot use a {type(group).__name__}")
