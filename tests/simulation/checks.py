"""What must hold, looked at from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from front.sampling_params import seeds
from tests.simulation.front_side import Client
from tests.simulation.processes import RankProcess
from tests.simulation.standin import Expected, Facts, continuation
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


def expected_of(client: Client, facts: Facts) -> list[Expected]:
    """By choice."""
    prompt = client.request.prompt
    own = seeds(prompt.params.seed, prompt.params.n)
    return [continuation(prompt.token_ids, prompt.params, seed, facts) for seed in own]


def no_wrong_token(clients: Sequence[Client], facts: Facts) -> None:
    """Missing and repeated tokens show as wrong ones, or at the end."""
    for client in clients:
        client.expected = client.expected or expected_of(client, facts)
        for index, (tokens, expected) in enumerate(zip(client.tokens, client.expected, strict=True)):
            name = f"request {client.request.prompt.request_id}, choice {index}"
            if tokens != expected.token_ids[: len(tokens)]:
                raise Violation(f"{name} has tokens {tokens}, without faults they are {expected.token_ids}")
            reason = client.reasons[index]
            if reason is None or reason == "abort":
                continue
            if tokens != expected.token_ids or reason != expected.finish_reason:
                raise Violation(
                    f"{name} ended with {reason} after {tokens}, without faults with {expected.finish_reason} after "
                    f"{expected.token_ids}"
                )
            if client.texts[index] != expected.text:
                raise Violation(f"{name} has text {client.texts[index]!r}, without faults it is {expected.text!r}")


def at_the_end(simulation: Simulation) -> None:
    """Nothing is lost, left over, or known by some only."""
    no_wrong_token(simulation.front.clients, simulation.schedule.facts)
    for client in simulation.front.clients:
        name = f"request {client.request.prompt.request_id}"
        if client.failed:
            raise Violation(f"{name} failed: {client.failed}")
        if "abort" in client.reasons and not client.aborted:
            raise Violation(f"{name} was aborted by nobody")
        if "error" in client.reasons:
            raise Violation(f"{name} ended with an error")
    if simulation.house.ended:
        raise Violation(simulation.house.ended[0])
    _front_is_clean(simulation)
    _ranks_are_clean(simulation)
    _ranks_agree(simulation)


def _living(simulation: Simulation) -> list[RankProcess]:
    return [process for process in simulation.house if process is not None]


def _front_is_clean(simulation: Simulation) -> None:
    front = simulation.front.llm.front
    if front.num_requests or front._held or front._sequences or any(front.router.loads):
        raise Violation(
            f"the front keeps {front.num_requests} requests, {len(front._held)} held, {len(front._sequences)} sequences, "
            f"loads {front.router.loads}"
        )


def _ranks_are_clean(simulation: Simulation) -> None:
    for process in _living(simulation):
        scheduler = process.scheduler
        assert scheduler is not None
        kv = scheduler.kv
        if kv.num_free_blocks != kv.num_blocks:
            raise Violation(f"rank {process.rank_id} has {kv.num_blocks - kv.num_free_blocks} blocks that nobody uses")
        if scheduler.has_unfinished or scheduler._in_flight:
            raise Violation(f"rank {process.rank_id} still has requests")
        scheduler.rows.check(0)


def _ranks_agree(simulation: Simulation) -> None:
    if simulation.schedule.plan.num_experts == 0:
        return
    epochs, checksums = {}, {}
    for process in _living(simulation):
        rank, team, model = process.rank_id, process.team, process.model
        assert team is not None and model is not None
        placement = team._placement
        assert placement is not None
        epochs[rank], checksums[rank] = team.epoch, placement.checksum()
        for layer, held in enumerate(model.held):
            said = placement.experts_of(layer, rank)
            if any(expert not in (-1, here) for expert, here in zip(said, held, strict=True)):
                raise Violation(f"rank {rank} holds experts {held} in layer {layer}, the placement says {said}")
    if set(epochs.values()) != {simulation.front.llm.members.epoch}:
        raise Violation(f"epochs {epochs}, the front's is {simulation.front.llm.members.epoch}")
    if len(set(checksums.values())) != 1:
        raise Violation(f"the ranks have placements {checksums}")
