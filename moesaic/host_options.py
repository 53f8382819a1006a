"""The options that say which part of a server this machine is, shared by serve and doctor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from configs.env import launcher_variables
from configs.hosts import DEFAULT_PORT, Hosts, hosts_of, ranks_of, resolve
from engine.process.console import say_text
from launch.launchers.place import Place, find_place

Command = TypeVar("Command", bound=Callable[..., Any])
NAME_SECONDS = 60.0  # for a cluster to tell names of machines that have just come


class Auto(click.ParamType[int]):
    """A number, or auto: -1."""

    name = "auto"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if text != "auto" and not text.isdecimal():
            self.fail(f"{value!r} is neither a number nor auto", param, ctx)
        return -1 if text == "auto" else int(text)


class Counts(click.ParamType[tuple[int, ...]]):
    """A number, or one for each node with commas between them."""

    name = "counts"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no number, nor numbers with commas between them", param, ctx)


OPTIONS = [
    click.option("--nnodes", type=Auto(), metavar="N|auto",
        help="Nodes, each with one process such as this; auto: as LeaderWorkerSet, torchrun, Slurm or MPI says."),
    click.option("--node-rank", type=Auto(), metavar="K|auto",
        help="Which of them this is, from 0 (the head) on; default: auto."),
    click.option("--data-parallel-size-local", "-dpl", type=Counts(), metavar="N[,N...]",
        help="Ranks on this machine; with --nnodes on each node, or as many numbers; default: all that are left."),
    click.option("--data-parallel-address", "-dpa", help="The head's address, when ranks are on several machines."),
    click.option("--data-parallel-rpc-port", "-dpp", type=int, default=DEFAULT_PORT, show_default=True,
        help="First of its ports."),
    click.option("--data-parallel-start-rank", "-dpr", type=int, help="First rank of this machine (with --headless)."),
    click.option("--headless", is_flag=True, help="Only ranks here: the head, another machine, has the front."),
]  # fmt: skip


def host_options(command: Command) -> Command:
    """Adds them; the command takes them as **options and calls `take_hosts(options)`."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def take_hosts(options: dict[str, Any], default_ranks: int, patience: float | None) -> tuple[Hosts | None, Place]:
    """This machine's part, None where all ranks are here, and which node it is. Removes the options' values from
    `options`, and writes the number of ranks there. patience: seconds in which the name of the head, if this is it,
    must be known; None: it is not asked for."""
    nodes, index = options.pop("nnodes"), options.pop("node_rank")
    counts = options.pop("data_parallel_size_local") or ()
    address, port = options.pop("data_parallel_address"), options.pop("data_parallel_rpc_port")
    first, headless = options.pop("data_parallel_start_rank"), options.pop("headless")
    size = options["data_parallel_size"]
    if nodes is None and index is None:
        if len(counts) > 1:
            raise ValueError(f"--data-parallel-size-local has {len(counts)} numbers: that needs --nnodes")
        size = options["data_parallel_size"] = default_ranks if size is None else size
        hosts = hosts_of(size, counts[0] if counts else None, address, port, first, headless)
        return _found(hosts, patience), Place(1, 0, None)
    if headless or first is not None:
        raise ValueError("--headless and --data-parallel-start-rank follow from --nnodes and --node-rank; drop them")
    place = find_place(launcher_variables(), _given(nodes), _given(index), address)
    size, local, first = ranks_of(place.nodes, place.index, counts, size)
    options["data_parallel_size"] = size
    if place.said:
        say_text(f"node {place.index} of {place.nodes} ({', '.join(place.said)}), ranks {first} to {first + local - 1}")
    return _found(hosts_of(size, local, place.head, port, first or None, first > 0), patience), place


def _given(number: int | None) -> int | None:
    return None if number == -1 else number


def _found(hosts: Hosts | None, patience: float | None) -> Hosts | None:
    """Once the head's name is known here, if this is the head; other machines ask for it each time they look for it."""
    deadline = time.monotonic() + min(patience or 0.0, NAME_SECONDS)
    while hosts is not None and not hosts.headless and patience is not None:
        try:
            resolve(hosts.head)
            break
        except ValueError as error:
            if time.monotonic() > deadline:
                raise
            say_text(f"{error}; trying on")
            time.sleep(1.0)
    return hosts
