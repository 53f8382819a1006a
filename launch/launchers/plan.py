"""What is to be launched, and the words of `moesaic serve` for it, which every launcher writes in its own form."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from msgspec import Struct

CONTAINER = ("moesaic",)  # how the program is called in an image
NAME = "moesaic"


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """ranks: of each node; gpus: of each node, 0 for CPUs; program: how it is called on a node; options: more words of
    `moesaic serve`; drain: seconds that running requests have; addresses: of the nodes, where they are known."""

    model: str | None
    nodes: int
    ranks: tuple[int, ...]
    gpus: int = 0
    name: str = NAME
    program: tuple[str, ...] = CONTAINER
    options: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    rpc_port: int = 29550
    drain: int = 30
    startup: int = 2700
    image: str = "moesaic:latest"
    memory: str = ""  # of a node, for containers; "": not limited
    cpus: int = 0
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """ValueError names the option and its limit."""
        if not 1 <= self.nodes <= 62:
            raise ValueError(f"--nodes must be 1 to 62, not {self.nodes}")
        if len(self.ranks) != self.nodes or min(self.ranks) < 1:
            raise ValueError(f"--ranks-per-node must be 1 or more, for all nodes or for each of {self.nodes}")
        if self.gpus and max(self.ranks) > self.gpus:
            raise ValueError(f"--ranks-per-node {max(self.ranks)} exceeds --gpus-per-node {self.gpus}")
        if self.addresses and len(self.addresses) != self.nodes:
            raise ValueError(f"--hosts has {len(self.addresses)} names for {self.nodes} nodes")

    @property
    def counts(self) -> str:
        """For --data-parallel-size-local."""
        return str(self.ranks[0]) if len(set(self.ranks)) == 1 else ",".join(map(str, self.ranks))

    def words(self, index: int | str | None = None, head: str | None = None) -> list[str]:
        """Of `moesaic serve`, equal on all nodes but for what is given here. index, head: None where the node finds
        them itself."""
        nodes = "auto" if index is None else str(self.nodes)
        rank = [] if index is None else ["--node-rank", str(index)]
        address = [] if head is None else ["--data-parallel-address", head]
        return [
            *([] if self.model is None else [self.model]),
            *("--nnodes", nodes, *rank, *address),
            *("--data-parallel-size-local", self.counts, "--data-parallel-rpc-port", str(self.rpc_port)),
            *("--host", self.host, "--port", str(self.port)),
            *("--shutdown-timeout", str(self.drain), "--startup-timeout", str(self.startup)),
            *self.options,
        ]

    def command(self, verb: str, index: int | str | None = None, head: str | None = None) -> list[str]:
        return [*self.program, verb, *self.words(index, head)]


def shell(words: Sequence[str], indent: str = "    ") -> str:
    """The words as bash reads them, an option with its value on each line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return f" \\\n{indent}".join(" ".join(line) for line in lines)
