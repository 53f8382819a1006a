"""The cases of a2a_cases.py as the backends for GPUs can take them."""

from __future__ import annotations

import torch
from a2a_cases import Case, exchange
from msgspec.structs import replace

from dbo.steps import drain, weave
from ep.table import make_lanes
from ep.transport.group import Group

HIDDEN = 2048  # the least that all of them take
ROOM = 64  # tokens of a rank in one exchange of those that keep room for all
BFLOAT16_ONLY = ("deepep_high_throughput", "deepep_low_latency", "deepep_v2", "flashinfer_nvlink_one_sided", "pplx")


PUTS = "nvshmem_low_latency"  # its kernels run in Triton's interpreter, which takes a while for each program


def fitted(case: Case, name: str) -> Case | None:
    """The case as this backend can take it; None: it cannot."""
    if name not in BFLOAT16_ONLY:
        return None if name == PUTS and "large" in case.name else case
    if "odd width" in case.name or "large" in case.name:  # the size of a message means nothing to the fakes
        return None
    return replace(case, dtype=torch.bfloat16, hidden=HIDDEN)


def case_on(group: Group, name: str, case: Case) -> None:
    lanes = make_lanes(
        name, group, case.num_slots, case.hidden, case.dtype, num_lanes=2, rows=case.rows, max_tokens=max_tokens(name)
    )
    for _ in range(2):
        drain(exchange(lanes[0], case, group.rank, group.size))
    drain(weave(*(exchange(lane, case, group.rank, group.size) for lane in lanes)))
    for lane in lanes:
        lane.close()


def max_tokens(name: str) -> int:
    return 9 if name == PUTS else ROOM if name in BFLOAT16_ONLY else 2048
