"""The options that say where experts may go: ranks, slots, nodes, copies; shared by the verbs that plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from msgspec import Struct

from eplb.balance import Floats
from eplb.placement import slots_needed
from eplb.planner import Coverage, Method, PlannedPlacement, plan
from moesaic.eplb.common import Infeasible, taking
from moesaic.eplb.described import Described


class Layout(Struct, frozen=True):
    """Where experts may go. slots: per rank and layer; domains: the failure domain of each rank."""

    num_ranks: int
    slots: int
    domains: tuple[int, ...]
    coverage: Coverage
    min_copies: int
    method: Method

    def plan(self, load_LE: Floats, slots: int | Sequence[int], **more: Any) -> PlannedPlacement:
        """A full plan for these loads; more: as eplb.planner.plan."""
        return plan(
            load_LE,
            self.num_ranks,
            slots,
            failure_domains=self.domains,
            method=self.method,
            coverage=self.coverage,
            min_copies=self.min_copies,
            **more,
        )

    @property
    def words(self) -> dict[str, Any]:
        return {
            "ranks": self.num_ranks,
            "slots": self.slots,
            "nodes": len(set(self.domains)),
            "objective": "load" if self.coverage == "load" else "coverage",
            "coverage": self.min_copies,
            "flat": self.method == "flat",
        }


class LayoutOptions(Struct, frozen=True):
    """What was said on the command line; `layout` fills in the rest."""

    ranks: int | None
    slots: int | None
    redundant: int | None
    nodes: int | None
    domains: str | None
    objective: str
    min_copies: int
    flat: bool

    def layout(self, num_experts: int, known_ranks: int, described: Described, known_slots: int = 0) -> Layout:
        """known_ranks, known_slots: from the trace or a placement, 0 when they do not say. Without --slots and
        --redundant, one slot more than the experts need. Infeasible (exit 6) when the experts do not fit; ValueError
        for wrong domains."""
        ranks = self.ranks or known_ranks
        if not ranks:
            raise click.UsageError("--ranks is needed: the trace does not say how many there are")
        if self.slots is not None and self.redundant is not None:
            raise click.UsageError("--slots and --redundant say the same thing; give one")
        needed = self.needed_slots(num_experts, ranks)
        if self.slots is not None:
            slots = self.slots
        elif self.redundant is not None:
            slots = slots_needed(num_experts, ranks, self.redundant)
        else:
            slots = known_slots or needed + 1
        if slots < needed:
            raise Infeasible(
                f"{slots} slots a rank cannot hold {self.min_copies} cop{'y' if self.min_copies == 1 else 'ies'} of "
                f"{num_experts} experts on {ranks} ranks; the smallest feasible S is {needed}"
            )
        return Layout(
            ranks,
            slots,
            self._domains(ranks, described),
            "load" if self.objective == "load" else "spread",
            self.min_copies,
            "flat" if self.flat else "auto",
        )

    def needed_slots(self, num_experts: int, ranks: int) -> int:
        """The smallest feasible S. Infeasible when no S is: an expert cannot have more copies than there are ranks."""
        if self.min_copies > ranks:
            raise Infeasible(
                f"{ranks} rank(s) cannot hold {self.min_copies} copies of an expert on different ranks, whatever S is"
            )
        return -(-num_experts * self.min_copies // ranks)

    def _domains(self, ranks: int, described: Described) -> tuple[int, ...]:
        if self.domains is not None:
            try:
                labels = tuple(int(part) for part in self.domains.split(","))
            except ValueError:
                raise click.UsageError(f"--domains is {self.domains!r}; it must be numbers, comma-separated") from None
            if len(labels) != ranks:
                raise ValueError(f"--domains has {len(labels)} entries for {ranks} ranks")
            return labels
        if self.nodes is not None:
            if self.nodes > ranks or ranks % self.nodes:
                raise ValueError(f"--nodes is {self.nodes}; {ranks} ranks cannot be shared out equally")
            return tuple(rank // (ranks // self.nodes) for rank in range(ranks))
        return tuple(rank // described.ranks_per_node for rank in range(ranks))


# Where experts may go.
layout_options = taking(
    "asked",
    LayoutOptions,
    click.option("--ranks", type=click.IntRange(1), help="Default: what the trace or the current placement says."),
    click.option("--slots", type=click.IntRange(1), help="Slots of a rank in each layer."),
    click.option("--redundant", type=click.IntRange(0), help="Replicas of a layer, in place of --slots."),
    click.option("--nodes", type=click.IntRange(1), help="Nodes of equally many ranks. Default: --gpus-per-node (8)."),
    click.option("--domains", help="Failure domain of each rank: 0,0,1,1, in place of --nodes."),
    click.option("--objective", type=click.Choice(["coverage", "load"]), default="coverage", show_default=True,
                 help="What spare slots serve first: a second copy elsewhere, or the load."),
    click.option("--coverage", "min_copies", type=click.IntRange(1), default=1, show_default=True,
                 help="Copies that every expert must have, on different ranks."),
    click.option("--flat", is_flag=True, help="Equal shares, for engines that know no others."),
)  # fmt: skip
