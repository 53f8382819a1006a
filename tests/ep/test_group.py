"""Groups: the gather of integers, starting up, and the table of backends."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from a2a_cases import Case
from gloo_groups import gloo_group

from ep.protocol import PeerLost
from ep.rows import make_rows
from ep.table import NAMES, choose, explain, make_lanes
from ep.transport.group import GlooGroup, LocalGroup, MailboxGroup, MailboxWorld
from moe_kernels import TokenBatch


def test_one_rank_alone(tmp_path: Path) -> None:
    group = gloo_group(str(tmp_path / "meet"), 0, 1, 1.0, "alone")
    assert isinstance(group, LocalGroup) and (group.rank, group.size) == (0, 1)
    assert group.all_gather_ints([3, -1]).wait() == [[3, -1]]
    group.close()


def test_one_rank_alone_rounds_rows_as_if_they_travelled() -> None:
    x_TD, routing = Case("alone", (5,), hidden=256, dtype=torch.bfloat16).inputs(0, 1)
    (lane,) = make_lanes("auto", LocalGroup(), 4, 256, torch.bfloat16, rows="fp8")
    batch = lane.dispatch(x_TD, routing).wait().batch
    assert isinstance(batch, TokenBatch)
    form = make_rows("fp8", 256, torch.bfloat16)
    assert torch.equal(batch.x_TD, form.tokens(form.pack(x_TD))) and not torch.equal(batch.x_TD, x_TD)


def test_mailbox_gather() -> None:
    groups = [MailboxGroup(MailboxWorld(3), 0)]
    groups += [MailboxGroup(groups[0].world, rank) for rank in (1, 2)]
    for step in range(2):
        pending = [group.all_gather_ints([group.rank, step]) for group in groups]
        assert [p.wait() for p in pending] == [[[0, step], [1, step], [2, step]]] * 3
    early = groups[1].all_gather_ints([1])
    with pytest.raises(AssertionError, match=r"rank\(s\) \[0, 2\] have not posted"):
        early.wait()
    with pytest.raises(ValueError, match="rank is 3; it must be 0 to 2"):
        MailboxGroup(groups[0].world, 3)
    with pytest.raises(ValueError, match="num_ranks is 0"):
        MailboxWorld(0)


def test_who_has_left_the_mailboxes_is_named() -> None:
    world = MailboxWorld(3)
    groups = [MailboxGroup(world, rank) for rank in range(3)]
    whole = [group.all_gather_ints([group.rank]) for group in groups]
    groups[1].close()
    assert whole[0].wait() == [[0], [1], [2]], "it had brought its part"
    cut = [groups[rank].all_gather_ints([rank]) for rank in (0, 2)]
    for pending in cut:
        with pytest.raises(PeerLost, match="lost rank") as lost:
            pending.wait()
        assert lost.value.ranks == (1,)


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank\(s\) \[0, 2\]: rank 1 waited 0.3 s") as lost:
        gloo_group(str(tmp_path / "meet"), 1, 3, 0.3, "world")
    assert lost.value.ranks == (0, 2)
    assert time.monotonic() - begin < 20


def test_a_store_nobody_serves_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(PeerLost, match=r"rank 1 cannot meet the others in world/0: .*127.0.0.1"):
        gloo_group(f"127.0.0.1:{port}", 1, 2, 0.5, "world")


def pair(store: str, epoch: int) -> dict[int, GlooGroup]:
    """Two ranks, joined in threads."""
    groups: dict[int, GlooGroup] = {}

    def meet(rank: int) -> None:
        group = gloo_group(store, rank, 2, 20.0, "world", epoch)
        assert isinstance(group, GlooGroup)
        groups[rank] = group

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return groups


@pytest.mark.parametrize("over", ["file", "tcp"])
def test_meeting_again_in_a_new_epoch(over: str, tmp_path: Path) -> None:
    for epoch in (0, 1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            store = str(tmp_path / "meet") if over == "file" else f"127.0.0.1:{free.getsockname()[1]}"
        groups = pair(store, epoch)
        pending = [groups[rank].all_gather_ints([10 + rank]) for rank in range(2)]
        assert [p.wait() for p in pending] == [[[10], [11]]] * 2
        # One leaves: the other, who waits for it, must not wait for its timeout.
        waiting = groups[1].all_gather_ints([1])
        groups[0].close()
        groups[0].close()
        begin = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 1: .*by peer"):
            waiting.wait()
        assert time.monotonic() - begin < 10
        for group in groups.values():
            with pytest.raises(PeerLost, match="has left its group"):
                group.all_gather_ints([0])


def test_closing_drops_what_is_under_way(tmp_path: Path) -> None:
    groups = pair(str(tmp_path / "meet"), 0)
    under_way = groups[0].all_gather_ints([0])
    groups[1].close()
    with pytest.raises(PeerLost):
        groups[0].all_gather_ints([1]).wait()
    with pytest.raises(PeerLost, match="rank 0 left its group during an exchange"):
        under_way.wait()


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_numbers_out_of_range(rank: int, size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank} of {size}"):
        gloo_group(str(tmp_path / "meet"), rank, size, 1.0, "world")
    with pytest.raises(ValueError, match="timeout is 0"):
        gloo_group(str(tmp_path / "meet"), 0, 1, 0, "world")


def test_choosing_a_backend() -> None:
    assert choose("auto", 1) == "local" and choose("auto", 4) == "shm" and choose("mailbox", 4) == "mailbox"
    assert set(explain(1)) == set(explain(2)) == set(NAMES)
    assert explain(1)["local"] == "ok" and explain(1)["gloo"] != "ok" and explain(1)["shm"] != "ok"
    assert explain(2)["gloo"] == explain(2)["shm"] == "ok" and "2" in explain(2)["local"]
    with pytest.raises(ValueError, match="'deepep' is unknown; it must be auto, local, shm, shm_padded, gloo, mailbox"):
        choose("deepep", 2)
    with pytest.raises(ValueError, match="'local': serves one rank; there are 2"):
        choose("local", 2)


def test_a_backend_refuses_another_kind_of_group() -> None:
    group = MailboxGroup(MailboxWorld(2), 0)
    with pytest.raises(ValueError, match="'gloo' cannot use a MailboxGroup"):
        make_lanes("gloo", group, 4, 8, torch.float32)
    assert len(make_lanes("mailbox", group, 4, 8, torch.float32, num_lanes=3)) == 3
