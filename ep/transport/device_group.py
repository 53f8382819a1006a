"""The group of ranks that each own a GPU. Small things go from host to host; what moves tokens is made on top of it by
the backends (DeepEP, NCCL, ...), each in its own file."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ep.device import await_true, mark_device
from ep.protocol import PeerLost, Pending
from ep.transport.comm import Comm
from ep.transport.group import Group, Transport
from ep.transport.joining import connect
from ep.transport.shm_group import ShmGroup

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class DeviceGroup:
    """device: where the tokens of this rank are. With a CPU, gloo stands in for NCCL: so the same code is tested
    there."""

    def __init__(
        self, control: Group, device: torch.device, timeout: float, store: Callable[[], Store] | None = None
    ) -> None:
        """control: between the hosts. store: where the ranks can meet once more; None: no backend asks for collectives.
        timeout: seconds, the bound of every wait."""
        self.rank = control.rank
        self.size = control.size
        self.device = device
        self.timeout = timeout
        self.comm = Comm(control)
        self.control = control
        self._store = store
        self._transport: Transport | None = None
        self._process_group: dist.ProcessGroup | None = None
        self._made: dict[str, Any] = {}
        self._at_end: list[Callable[[], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._closed = False
        self._leaving = control.signals.reserve() if isinstance(control, ShmGroup) else -1

    def all_gather_ints(self, values: Sequence[int]) -> Pending[list[list[int]]]:
        return self.control.all_gather_ints(values)

    def transport(self) -> Transport:
        """Collectives on the tensors of the device, made when first asked for; by all ranks at once. Raises
        PeerLost."""
        if self._transport is None:
            self._transport = cast(Transport, self._backend("tokens"))
        return self._transport

    def process_group(self) -> dist.ProcessGroup:
        """torch's own kind of group, for tensors of host and device; known to its holder only."""
        if self._process_group is None:
            gloo = dist.ProcessGroup.BackendType.GLOO
            nccl = dist.ProcessGroup.BackendType.NCCL
            group = dist.ProcessGroup(self._meeting("group"), self.rank, self.size)
            on_host = self._backend("host", torch.device("cpu"))
            group._register_backend(torch.device("cpu"), gloo, on_host)
            if self.device.type == "cuda":
                group._register_backend(torch.device("cuda"), nccl, self._backend("device"))
            self._process_group = group
            # NCCL makes its communicator with the first collective; asked for its address before, it gives none.
            try:
                group.allreduce([torch.zeros(1, device=self.device)]).wait()
            except RuntimeError as error:
                raise PeerLost((), f"rank {self.rank} could not join: {str(error).splitlines()[0]}") from error
            self.confirm()
        return self._process_group

    def confirm(self) -> None:
        """Return when the device has done what was asked of it so far. Raises PeerLost: it did not within the
        timeout."""
        await_true(mark_device(self.device), self.timeout, self.closed, self.left, lambda: ())

    def mark(self) -> Callable[[], None]:
        """What is queued on the device so far. The same wait, for that alone, whatever is queued behind it by then;
        another thread may be queueing it, so this one does not keep the interpreter."""
        done = mark_device(self.device)
        return lambda: await_true(done, self.timeout, self.closed, self.left, lambda: (), spin=0.0)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What there is one of in a group: made by the first who asks, on all ranks at the same time."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def closed(self) -> bool:
        """Whether this rank has left the group."""
        return self._closed

    def left(self) -> bool:
        """Whether another has, or has ended: a wait for what a peer's GPU does cannot learn of it in another way."""
        control = self.control
        if not isinstance(control, ShmGroup):
            return False
        leaves = control.signals.anybody_reached(self._leaving, 1)
        return leaves or control.anybody_left() or control.anybody_ended()

    def check(self) -> None:
        """An exchange is about to begin. Raises PeerLost: a rank has left."""
        if self._closed or self.left():
            raise PeerLost((), f"rank {self.rank} has left its group, or another has")

    def at_end(self, act: Callable[[], None]) -> None:
        """How to give back what all ranks hold together. It is done when all leave together, not when one is lost: such
        acts wait for the others, and memory of a process is freed with it."""
        self._at_end.append(act)

    def at_close(self, act: Callable[[], None]) -> None:
        """How to end what this rank's own device may be waiting for. It is done first, on whichever thread leaves, and
        waits for no rank."""
        self._at_close.append(act)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for act in self._at_close:
            act()
        self._at_close.clear()
        transport, self._transport, self._process_group = self._transport, None, None
        if transport is not None and self.device.type == "cuda":
            cast(Any, transport).abort()  # NCCL's kernels would wait for the others without a bound
        del transport  # gloo's connections close: ranks that wait for this one learn of it
        if isinstance(self.control, ShmGroup):
            with contextlib.suppress(PeerLost):
                for peer in range(self.size):
                    if peer != self.rank:
                        self.control.signals.send(peer, self._leaving, 1)
        if self._at_end:
            with contextlib.suppress(PeerLost):
                self.comm.barrier()
                for act in reversed(self._at_end):
                    act()
        self._at_end.clear()
        self._made.clear()
        self.control.close()

    def _meeting(self, name: str) -> Store:
        assert self._store is not None, "this group was made without a store"
        return dist.PrefixStore(name, self._store())  # type: ignore[attr-defined]

    def _backend(self, name: str, device: torch.device | None = None) -> Any:
        if (device or self.device).type != "cuda":
            what = f"the devices' group {name!r}"
            return connect(self._meeting(name), self.rank, self.size, self.timeout, what, threads=2, stop=self.left)
        from_torch: Any = dist.ProcessGroupNCCL
        options = from_torch.Options()
        # `confirm` is the bound; NCCL's own would end the process
        options._timeout = 10 * datetime.timedelta(seconds=self.timeout)
        try:
            return from_torch(self._meeting(name), self.rank, self.size, options)
        except RuntimeError as error:
            raise PeerLost((), f"rank {self.rank} could not join: {str(error).splitlines()[0]}") from error


def device_group(control: Group, store: Callable[[], Store], timeout: float, device: torch.device) -> Group:
    """The ranks of `control`, each with a device of its own. store: where they meet for collectives. timeout: seconds,
    the bound of every wait. One rank needs no other and keeps its LocalGroup."""
    return control if control.size == 1 else DeviceGroup(control, device, timeout, store)
