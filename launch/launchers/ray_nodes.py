"""A server on the nodes of a Ray cluster: `python -m launch.launchers.ray_nodes --nodes 2 --gpus 8 -- WORDS OF serve`.

A placement group has one bundle for each node (STRICT_SPREAD), and each bundle one actor, which keeps the process of
its node running (launch/launchers/agent.py). An actor that is lost with its node is placed anew as soon as Ray has a
node for its bundle; the others serve on meanwhile, which Ray's own restart of whole groups would not let them. SIGTERM
or SIGINT to this process drains the server.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from types import FrameType
from typing import Any

from msgspec import Struct

from engine.process.console import guard_console, say_text
from launch.launchers.agent import Agent

LOOK_SECONDS = 0.25
ANSWER_SECONDS = 30.0  # for an actor that has just been placed
EXIT_BAD_INPUT, EXIT_NOT_PLACED = 2, 3


class NodeActor:
    """Runs on one node, inside of Ray's worker process: one thread waits in `run`, another one answers."""

    def __init__(self, drain: float) -> None:
        self._drain = drain
        self._agent: Agent | None = None

    def address(self) -> str:
        return str(_ray().util.get_node_ip_address())

    def run(self, words: list[str]) -> int:
        """The exit code of `moesaic serve`, once it has ended for good."""
        self._agent = Agent(words, drain=self._drain)
        return self._agent.run()

    def stop(self) -> None:
        if self._agent is not None:
            self._agent.stop()


def _ray() -> Any:
    """ValueError with the line that installs it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ValueError(f"Ray cannot be imported ({error}): pip install 'moesaic[ray]'") from None


class _Node(Struct):
    actor: Any
    task: Any = None  # of `run`; None: it has not been started
    code: int | None = None  # once it has ended by itself


class Driver:
    """Places actors, and places lost ones anew, until the head's process has ended."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._ray = _ray()
        self._told = False
        self._head = ""
        self._nodes: list[_Node] = []
        self._group: Any = None

    def run(self) -> int:
        self._ray.init(address=self._options.address, log_to_driver=True)
        for number in (signal.SIGTERM, signal.SIGINT):  # init has put its own there, which end this process at once
            signal.signal(number, self._on_signal)
        try:
            if not self._place():
                return EXIT_NOT_PLACED
            return self._watch()
        finally:
            importlib.import_module("ray.util").remove_placement_group(self._group)
            self._ray.shutdown()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def _place(self) -> bool:
        options = self._options
        bundle = {"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}
        bundles = [bundle] * options.nodes
        self._group = importlib.import_module("ray.util").placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(options.timeout):
            have = {name: count for name, count in self._ray.cluster_resources().items() if name in ("CPU", "GPU")}
            say_text(
                f"{options.nodes} nodes with {bundle} each were not there within {options.timeout:g} s; "
                f"the cluster has {have} on {sum(node['Alive'] for node in self._ray.nodes())} node(s)"
            )
            return False
        self._nodes = [_Node(self._actor(index)) for index in range(options.nodes)]
        self._meet(self._ray.get(self._nodes[0].actor.address.remote(), timeout=ANSWER_SECONDS))
        return True

    def _actor(self, index: int) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        where = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        made = self._ray.remote(NodeActor).options(
            num_cpus=self._options.cpus,
            num_gpus=self._options.gpus,
            max_concurrency=4,
            scheduling_strategy=where,
        )
        return made.remote(self._options.drain)

    def _meet(self, head: str) -> None:
        """Start whatever does not run, under the head's address; all that run under another one end first."""
        moved = head != self._head and bool(self._head)
        self._head = head
        for index, node in enumerate(self._nodes):
            if moved and index and node.task is not None:
                node.actor.stop.remote()  # it is started again when it has ended
            elif node.task is None:
                self._start(index)

    def _start(self, index: int) -> None:
        node = self._nodes[index]
        place = ["--nnodes", str(len(self._nodes)), "--node-rank", str(index), "--data-parallel-address", self._head]
        node.code, node.task = None, node.actor.run.remote([*self._options.words, *place])

    def _watch(self) -> int:
        stopped, head_address = False, None
        while True:
            if self._told and not stopped:
                stopped = True
                for node in self._nodes:
                    node.actor.stop.remote()
            tasks = {node.task: index for index, node in enumerate(self._nodes) if node.task is not None}
            waits = [*tasks, *([head_address] if head_address is not None else [])]
            done = self._ray.wait(waits, timeout=LOOK_SECONDS)[0] if waits else []
            for task in done:
                if task is head_address:
                    head_address = None
                    self._meet(self._ray.get(task))
                elif self._ended(tasks[task], task, stopped) and tasks[task] == 0:
                    head_address = self._nodes[0].actor.address.remote()
            if all(node.code is not None for node in self._nodes) or self._nodes[0].code in (0, EXIT_BAD_INPUT):
                return self._finish()

    def _finish(self) -> int:
        """The head has told the others that it is over. The first exit code that is not 0."""
        tasks = [node.task for node in self._nodes if node.task is not None]
        if tasks:
            self._ray.wait(tasks, num_returns=len(tasks), timeout=ANSWER_SECONDS)
        return next((node.code for node in self._nodes if node.code), 0)

    def _ended(self, index: int, task: Any, stopped: bool) -> bool:
        """Whether its actor was lost, and another one is placed in its stead."""
        node = self._nodes[index]
        node.task = None
        try:
            node.code = int(self._ray.get(task))
            say_text(f"node {index} ended with exit code {node.code}")
            if not stopped and index and node.code == 0 and self._nodes[0].code is None:
                self._start(index)
            return False
        except self._ray.exceptions.RayError as error:
            say_text(f"node {index} is lost: {type(error).__name__}")
        if stopped:
            node.code = 0 if index else 1
            return False
        node.actor = self._actor(index)
        if index:
            self._start(index)
        return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="launch.launchers.ray_nodes", description=__doc__)
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=float, default=0, help="of each node")
    parser.add_argument("--cpus", type=float, default=1, help="of each node")
    parser.add_argument("--drain", type=float, default=30, help="seconds that the end may take")
    parser.add_argument("--timeout", type=float, default=300, help="seconds until the nodes must be there")
    parser.add_argument("words", nargs="+", help="-- WORDS of moesaic serve, without its place")
    options = parser.parse_args()
    guard_console()
    try:
        sys.exit(Driver(options).run())
    except ValueError as error:
        say_text(str(error))
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
