"""What the tests of balancing share: settings that move much, questions to the leading rank, and a look into the slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import hf_tiny
import msgspec
import torch

from configs.eplb import EplbConfig
from engine.rank import Rank
from engine.rebalance.follower import Balance
from eplb.placement import Placement
from front.messages import BalanceCommand, BalanceReply, BalanceReport, BalanceStatus, RankToFront

RESTLESS = EplbConfig(window_size=8, memory_steps=4, reweight_interval=2, move_interval=4, min_gain=0.0)


def answer(rank: Rank, kind: Any, path: str | None = None) -> BalanceReply:
    """Of a rank whose worker thinks at once."""
    rank.submit(BalanceCommand(command_id=7, kind=kind, path=path))
    replies = [news for news in rank.take_events() if isinstance(news, BalanceReply)]
    assert len(replies) == 1 and replies[0].command_id == 7
    return replies[0]


def ask(rank: Rank, kind: Any, path: str | None = None) -> Any:
    reply = answer(rank, kind, path)
    assert reply.error == ""
    return msgspec.json.decode(reply.body)


def status(rank: Rank) -> BalanceStatus:
    return msgspec.json.decode(answer(rank, "status").body, type=BalanceStatus)


def reports(news: Iterable[RankToFront]) -> list[BalanceStatus]:
    return [one.status for one in news if isinstance(one, BalanceReport)]


def balance_of(rank: Rank) -> Balance:
    return next(one for one in rank._companions.members if isinstance(one, Balance))


def placement_of(rank: Rank) -> Placement:
    placement = rank._team.placement
    assert placement is not None
    return placement


def check_slots(path: Path, ranks: Sequence[Rank]) -> None:
    """All ranks have the same placement, and every slot of each holds the checkpoint's bytes of its expert."""
    whole = hf_tiny.load_ours(path)
    (checksum,) = {placement_of(rank).checksum() for rank in ranks}
    for rank in ranks:
        placement, model = placement_of(rank), rank._team._model
        assert model.parallel.placement is placement
        for layer in range(placement.num_layers):
            for slot, expert in enumerate(placement.experts_of(layer, rank.ready.rank)):
                if expert >= 0:
                    ours, theirs = model.expert_storage(layer, slot), whole.expert_storage(layer, expert)
                    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (layer, slot, expert)
    assert checksum
