"""A server on several machines: which ranks are where, and how they reach each other. Without torch.

One machine is the head: it has the front (HTTP), the first ranks, and the ports below. The others are headless: they
have ranks and nothing else. On the head, at --data-parallel-rpc-port and the ports after it:

    + 0  the supervisors of the other machines (launch/control.py)
    + 1  front to ranks, + 2 ranks to front (front/wire.py)
    + 3  the store where ranks meet, epoch after epoch (engine/process/store_process.py)

and on each machine + 4 + R: the doorbell of its rank R. Exchanges between ranks take any free port.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from msgspec import Struct, structs

from configs.machine import Machine

DEFAULT_PORT = 29550
_FRONT, _STORE, _BELLS = 1, 3, 4


class Hosts(Struct, frozen=True, kw_only=True):
    """The part of this machine: `local` of `size` ranks, from `first` on. head: its address or name; port: the first of
    its ports."""

    head: str
    port: int
    size: int
    first: int
    local: int

    @property
    def headless(self) -> bool:
        return self.first > 0

    @property
    def store_port(self) -> int:
        return self.port + _STORE

    def bell_port(self, rank: int) -> int:
        return self.port + _BELLS + rank


class Network(Struct, frozen=True, kw_only=True):
    """addresses: for each rank that of its machine; parts: which of the server's parts it is in, each of which has a
    supervisor, and a store of weights if there is to be one. Sent to the ranks as JSON."""

    head: str
    port: int
    addresses: tuple[str, ...]
    parts: tuple[int, ...]

    @property
    def store(self) -> tuple[str, int]:
        return self.head, self.port + _STORE

    def bell(self, rank: int) -> str:
        return endpoint(self.addresses[rank], self.port + _BELLS + rank)

    @property
    def machines(self) -> tuple[int, ...]:
        """For each rank the number of its machine, from 0."""
        numbers = {address: number for number, address in enumerate(dict.fromkeys(self.addresses))}
        return tuple(numbers[address] for address in self.addresses)

    def place(self, rank: int) -> int:
        """The how manyth rank of its machine it is, from 0."""
        return self.addresses[:rank].count(self.addresses[rank])


def endpoint(address: str, port: int) -> str:
    """As ZeroMQ has it; address: IPv4 or IPv6."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def front_endpoint(head: str, port: int) -> str:
    return endpoint(head, port + _FRONT)


def resolve(address: str) -> str:
    """The IPv4 address of a name, or else its IPv6 address. ValueError when it has none."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a machine"
        raise ValueError(f"--data-parallel-address {address}: {reason}") from None
    ordered = sorted(str(place[0]) for family, _, _, _, place in found if family == socket.AF_INET)
    return ordered[0] if ordered else str(found[0][4][0])


def family_of(address: str) -> socket.AddressFamily:
    """address: as `resolve` gives it."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def ranks_of(nodes: int, index: int, counts: tuple[int, ...], size: int | None) -> tuple[int, int, int]:
    """How many ranks there are on all nodes, how many of them on node `index`, and which of those is the first.

    counts: ranks of each node, or one number for all of them; (): size, if given, is divided among them, or each has
    one. ValueError names the option."""
    if not counts:
        if size is not None and size % nodes:
            raise ValueError(
                f"--data-parallel-size {size} cannot be divided among {nodes} nodes: say --data-parallel-size-local as "
                f"{nodes} numbers with commas between them"
            )
        counts = (1 if size is None else size // nodes,)
    if len(counts) not in (1, nodes):
        raise ValueError(f"--data-parallel-size-local has {len(counts)} numbers for {nodes} nodes")
    if min(counts) < 1:
        raise ValueError(f"--data-parallel-size-local must be at least 1, not {min(counts)}")
    each = counts * nodes if len(counts) == 1 else counts
    if size is not None and size != sum(each):
        raise ValueError(f"--data-parallel-size is {size}, but {nodes} nodes have {sum(each)} ranks")
    return sum(each), each[index], sum(each[:index])


def hosts_of(
    size: int, local: int | None, address: str | None, port: int, first: int | None, headless: bool
) -> Hosts | None:
    """The command line's values; None: everything is on this machine. ValueError names the option."""
    if size < 1:
        raise ValueError(f"--data-parallel-size must be at least 1, not {size}")
    if headless and not first:
        raise ValueError("--headless needs --data-parallel-start-rank: the first rank of this machine (1 or more)")
    if first and not headless:
        raise ValueError(f"--data-parallel-start-rank {first} needs --headless: the head has the ranks from 0 on")
    first = first or 0
    if first >= size:
        raise ValueError(f"--data-parallel-start-rank must be below --data-parallel-size {size}, not {first}")
    if local is None:
        local = size - first
    if not 1 <= local <= size - first:
        where = f" from rank {first} on" if first else ""
        raise ValueError(f"--data-parallel-size-local must be 1 to {size - first}, not {local}: of {size} ranks{where}")
    if not headless and local == size:
        return None
    if address is None:
        raise ValueError(f"--data-parallel-address is needed: {local} of {size} ranks are here; the head's address")
    if not 1 <= port <= 65535 - _BELLS - size:
        raise ValueError(f"--data-parallel-rpc-port must be 1 to {65535 - _BELLS - size}, not {port}")
    return Hosts(head=address, port=port, size=size, first=first, local=local)


def as_one(machine: Machine, hosts: Hosts) -> Machine:
    """The machine that all would be together if the others are like this one: what is decided for a rank is then right
    for those that are here. They share no memory beyond a machine's own."""
    return structs.replace(
        machine,
        cores=machine.cores * hosts.size // hosts.local,
        free_memory=machine.free_memory * hosts.size // hosts.local,
        shared_memory=False,
        machines=-(-hosts.size // hosts.local) if machine.shared_memory else 1,
    )


def overlap(first: int, local: int, others: Sequence[tuple[int, int]]) -> bool:
    """Whether ranks first to first + local - 1 are among the others' (first, local)."""
    return any(first < other + number and other < first + local for other, number in others)
