"""Which ranks are on this machine, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from configs.engine import EngineConfig
from configs.hosts import DEFAULT_PORT, Hosts, Network, as_one, front_endpoint, hosts_of
from configs.machine import Machine
from engine.plan import make_plan

MACHINE = Machine("cpu", 8, 16 << 30, True, True)


def parts(size: int = 4, **given: Any) -> Hosts | None:
    values: dict[str, Any] = {
        "local": None,
        "address": "127.0.0.1",
        "port": DEFAULT_PORT,
        "first": None,
        "headless": False,
    }
    return hosts_of(size, **(values | given))


def test_whose_ranks_are_where() -> None:
    assert parts() is None  # all are here
    head = parts(local=2)
    assert head == Hosts(head="127.0.0.1", port=DEFAULT_PORT, size=4, first=0, local=2) and not head.headless
    second = parts(first=2, headless=True)
    assert second == Hosts(head="127.0.0.1", port=DEFAULT_PORT, size=4, first=2, local=2) and second.headless


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"headless": True}, "--headless needs --data-parallel-start-rank"),
        ({"first": 2}, "--data-parallel-start-rank 2 needs --headless"),
        ({"first": 4, "headless": True}, "--data-parallel-start-rank must be below --data-parallel-size 4, not 4"),
        ({"local": 0}, "--data-parallel-size-local must be 1 to 4, not 0"),
        ({"local": 3, "first": 2, "headless": True}, "must be 1 to 2, not 3: of 4 ranks from rank 2 on"),
        ({"local": 2, "address": None}, "--data-parallel-address is needed: 2 of 4 ranks are here"),
        ({"local": 2, "port": 65530}, "--data-parallel-rpc-port must be 1 to 65527, not 65530"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parts(**given)
    assert said in str(refusal.value)


def test_a_rank_gets_what_its_own_machine_has() -> None:
    hosts = parts(local=1)
    assert hosts is not None
    whole = as_one(MACHINE, hosts)
    assert (whole.cores, whole.free_memory, whole.shared_memory) == (32, 64 << 30, False)
    here = make_plan(EngineConfig(data_parallel_size=4), MACHINE, hosts)
    assert here.all2all_backend == "gloo" and here.data_parallel_size_local == 1
    assert here.reasons["all2all_backend"] == "ranks of several machines"
    with pytest.raises(ValueError, match="all2all_backend 'shm' does not reach other machines"):
        make_plan(EngineConfig(data_parallel_size=4, all2all_backend="shm"), MACHINE, hosts)


def test_a_store_on_each_machine() -> None:
    """With all weights; when asked for, or where ranks can share no memory, they have their own."""
    hosts = parts(local=2)
    here = make_plan(EngineConfig(data_parallel_size=4), MACHINE, hosts)
    assert here.weight_store and here.slots_per_rank == here.num_experts
    assert here.store_bytes == make_plan(EngineConfig(data_parallel_size=4), MACHINE).store_bytes
    assert here.reasons["store_bytes"] == "all weights, once on each machine"
    asked = make_plan(EngineConfig(data_parallel_size=4, num_redundant_experts=0), MACHINE, hosts)
    assert not asked.weight_store and asked.slots_per_rank * 4 == asked.num_experts
    alone = make_plan(EngineConfig(data_parallel_size=4), replace(MACHINE, shared_memory=False), hosts)
    assert not alone.weight_store


def test_addresses() -> None:
    network = Network(
        head="10.0.0.1", port=1000, addresses=("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"), parts=(0, 0, 1, 1)
    )
    assert network.machines == (0, 0, 1, 1)
    assert front_endpoint(network.head, network.port) == "tcp://10.0.0.1:1001" and network.store == ("10.0.0.1", 1003)
    assert network.bell(3) == "tcp://10.0.0.2:1007"
    assert [network.place(rank) for rank in range(4)] == [0, 1, 0, 1]
