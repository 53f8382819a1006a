"""The all-to-all backends by name (ep/requirements.py has their limits). What is optional is imported by the backend's
own file when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace

from ep.backends.collective import CollectiveAllToAll
from ep.backends.deepep import DeepEpBuffer
from ep.backends.deepep_ht import HighThroughput
from ep.backends.deepep_ll import LowLatency, confirm
from ep.backends.deepep_v2 import Elastic, ElasticBuffers
from ep.backends.dispatchers import PairedLane, StepState
from ep.backends.flashinfer import OneSided
from ep.backends.hierarchical import HierarchicalAllToAll
from ep.backends.linked import LinkedAllToAll, most_tokens
from ep.backends.local import LocalAllToAll
from ep.backends.mailbox import Mailbox
from ep.backends.nccl import NcclAllToAll
from ep.backends.nvshmem import nvshmem_lanes
from ep.backends.nvshmem_ll import NvshmemLowLatency, PutKernels
from ep.backends.nvshmem_ll import confirm as confirm_puts
from ep.backends.pplx import Pplx
from ep.backends.shm import ShmAllToAll
from ep.protocol import AllToAll
from ep.requirements import FEW_TOKENS, NAMES, PADDED, Situation, family, missing, refusal, split_pair
from ep.rows import make_rows
from ep.transport.device_group import DeviceGroup, device_group
from ep.transport.group import GlooGroup, Group, LocalGroup, MailboxGroup, join_gloo
from ep.transport.loopback import join_store, serve_store, store_of
from ep.transport.parcels import CollectiveParcels, LocalParcels, MailboxParcels, Parcels, ShmParcels
from ep.transport.shm_futex import unsupported
from ep.transport.shm_group import ShmGroup, shm_group
from ep.transport.shm_rendezvous import Watch, rendezvous
from moe_kernels import Layout

AUTO = ("local", "shm", "gloo")  # "auto" takes the first that can serve, where there is no GPU
MANY_TOKENS = 2048  # of a rank in one exchange, unless said otherwise


def explain(size: int, situation: Situation | None = None) -> dict[str, str]:
    """For each backend "ok", or why it cannot serve `size` ranks in processes of their own. situation: what else is
    known; None: the ranks are on this machine, without a GPU."""
    known = situation or Situation(size, shared_memory=unsupported() or "")
    return {name: refusal(name, known) or missing(name, known) or "ok" for name in NAMES}


def choose(name: str, size: int) -> str:
    """The backend for `size` ranks on the CPUs of this machine: `name` itself, or with "auto" the first that can.

    Raises ValueError when there is no such backend, or it cannot serve so many ranks.
    """
    known = Situation(size, shared_memory=unsupported() or "", one_process=True)
    if name == "auto":
        return next(backend for backend in AUTO if not refusal(backend, known))
    _check_names(name)
    reason = refusal(name, known)
    if reason:
        raise ValueError(f"all2all backend {name!r}: {reason}")
    return name


def make_lanes(
    name: str,
    group: Group,
    num_slots: int,
    hidden_size: int,
    dtype: torch.dtype,
    num_lanes: int = 1,
    layout: Layout = Layout.RAGGED,
    rows: str = "plain",
    max_tokens: int = MANY_TOKENS,
    few_tokens: int = FEW_TOKENS,
    state: StepState | None = None,
) -> Sequence[AllToAll]:
    """One all-to-all per lane of overlap. Every rank of the group calls this in the same order.

    num_slots: expert slots of each rank; dtype: of hidden states and results. layout: of the experts' rows (PADDED: shm
    and mailbox). rows: "plain", or "fp8": rows travel to the experts in half the bytes (ep/rows.py; one rank alone
    sends nothing, but rounds them as it would). name: with "auto" the backend that the group belongs to (size 1: local,
    whatever the name; ShmGroup: shm; GlooGroup: gloo; MailboxGroup: mailbox; DeviceGroup: nccl), or "a+b": a for steps
    with many tokens, b for those in which no rank has more than few_tokens. max_tokens: of a rank in one exchange.
    state: of the steps of this rank; a pair needs it. Raises ValueError as `choose`, and for another backend's group.
    """
    if isinstance(group, LocalGroup):
        form = None if rows == "plain" else make_rows(rows, hidden_size, dtype)
        return [LocalAllToAll(num_slots, form) for _ in range(num_lanes)]
    chosen = _of_group(group) if name == "auto" else name
    _check_names(chosen)
    few = min(few_tokens, max_tokens)
    one = _Order(group, num_slots, hidden_size, dtype, num_lanes, layout, rows, max_tokens, few, state)
    large, small = split_pair(chosen)
    if large == small:
        return _lanes(large, one)
    if state is None:
        raise ValueError(f"all2all backend {chosen!r}: a pair needs to be told the size of every step")
    many_lanes = _lanes(large, one, others_need=few if small == "deepep_low_latency" else 0)
    state.record(0, {})  # only steps that all ranks exchange by the other one can be on a tape
    few_lanes = _lanes(small, replace(one, max_tokens=few))
    pairs = zip(many_lanes, few_lanes, strict=True)
    return [PairedLane(state, of_many, of_few, few) for of_many, of_few in pairs]


class _Order(Struct, frozen=True):
    """make_lanes' arguments."""

    group: Group
    num_slots: int
    hidden_size: int
    dtype: torch.dtype
    num_lanes: int
    layout: Layout
    rows: str
    max_tokens: int
    few_tokens: int
    state: StepState | None


def _lanes(name: str, order: _Order, others_need: int = 0) -> Sequence[AllToAll]:
    """others_need: the few tokens for which a low-latency backend shares this one's buffer."""
    group, sizes, lanes = order.group, (order.num_slots, order.hidden_size, order.dtype), range(order.num_lanes)
    padded = order.layout is Layout.PADDED or name in PADDED
    if padded and name not in ("mailbox", "shm", *PADDED):
        raise ValueError(f"all2all backend {name!r} gives experts ragged rows only; padded ones: shm, mailbox")
    layout = Layout.PADDED if padded else Layout.RAGGED
    if name in ("shm", "shm_padded") and isinstance(group, ShmGroup):
        made = [ShmAllToAll(group.heap, group.signals, *sizes, layout, rows=order.rows) for _ in lanes]
        tokens = min(lane.recorded_tokens for lane in made)
        if order.state is not None and tokens:
            order.state.record(min(tokens, order.max_tokens), {lane.key: lane.wait_late for lane in made})
        return made
    if name == "gloo" and isinstance(group, GlooGroup):
        return _over_network(group, order)
    if name == "mailbox" and isinstance(group, MailboxGroup):
        form = make_rows(order.rows, order.hidden_size, order.dtype)
        return [Mailbox(group.world, group.rank, order.num_slots, lane, layout, form) for lane in lanes]
    if family(name) == "device" and isinstance(group, DeviceGroup):
        return _on_devices(name, group, order, others_need)
    raise ValueError(f"all2all backend {name!r} cannot use a {type(group).__name__}")


def _over_network(group: GlooGroup, order: _Order) -> Sequence[AllToAll]:
    """Where ranks are linked they exchange few tokens over links, if those travel as they are."""
    sizes, state, links = (order.num_slots, order.hidden_size, order.dtype), order.state, group.links
    many = [CollectiveAllToAll(group, *sizes, order.rows) for _ in range(order.num_lanes)]
    most = min(most_tokens(group, order.hidden_size, order.dtype, order.num_lanes), order.few_tokens)
    if links is None or state is None or not most or order.rows != "plain":
        return many
    few: list[LinkedAllToAll | HierarchicalAllToAll] = [
        LinkedAllToAll(links, *sizes, most) if group.machine is None else HierarchicalAllToAll(group, *sizes, most)
        for _ in many
    ]
    state.record(most, {key: wait for lane in few for key, wait in lane.waits.items()})
    return [PairedLane(state, of_many, of_few, most) for of_many, of_few in zip(many, few, strict=True)]


def _on_devices(name: str, group: DeviceGroup, order: _Order, others_need: int) -> Sequence[AllToAll]:
    num_slots, hidden_size, dtype = sizes = (order.num_slots, order.hidden_size, order.dtype)
    fp8, max_tokens, state, lanes = order.rows == "fp8", order.max_tokens, order.state, range(order.num_lanes)
    reason = refusal(
        name,
        Situation(
            group.size,
            "cuda",
            dtype=str(dtype).removeprefix("torch."),
            hidden_size=hidden_size,
            max_tokens=max_tokens,
            rows=order.rows,
            num_ubatches=order.num_lanes,
        ),
    )
    if reason:
        raise ValueError(f"all2all backend {name!r}: {reason}")
    if state is not None:
        group.once("confirm", lambda: state.watch(after=group.mark))
    if name in ("deepep_high_throughput", "deepep_low_latency"):
        throughput = name == "deepep_high_throughput"
        few = others_need if throughput else max_tokens
        shared = group.once("deepep", lambda: DeepEpBuffer(group, hidden_size, num_slots, throughput, few))
        if throughput:
            return [HighThroughput(shared, fp8) for _ in lanes]
        if state is not None:
            state.watch(lambda: shared.clean() if state.largest <= max_tokens else None, confirm(shared, group))
        return [LowLatency(shared, fp8) for _ in lanes]
    if name == "deepep_v2":
        elastic = ElasticBuffers(group, num_slots, hidden_size, max_tokens, fp8, order.few_tokens, state)
        return [Elastic(elastic) for _ in lanes]
    if name == "flashinfer_nvlink_one_sided":
        return [OneSided(group, *sizes, max_tokens, fp8, lane, order.few_tokens, state) for lane in lanes]
    if name == "pplx":
        return [Pplx(group, *sizes, max_tokens, fp8) for _ in lanes]
    if name == "nvshmem":
        return nvshmem_lanes(group, *sizes, order.num_lanes, order.rows)
    if name == "nvshmem_low_latency":
        puts = group.once("puts", lambda: PutKernels(group))
        if state is not None:
            state.watch(after=confirm_puts(puts))
        return [NvshmemLowLatency(puts, *sizes, max_tokens, fp8) for _ in lanes]
    return [NcclAllToAll(group, *sizes, order.rows) for _ in lanes]


def _check_names(name: str) -> None:
    for part in split_pair(name):
        if part not in NAMES:
            raise ValueError(f"all2all backend {part!r} is unknown; it must be auto, {', '.join(NAMES)}, or two as a+b")


def make_parcels(group: Group, room_bytes: int) -> Parcels:
    """What carries bytes between the ranks of the group. Every rank calls this in the same order, with equal
    room_bytes: what one rank receives at most in one exchange."""
    if isinstance(group, MailboxGroup):
        return MailboxParcels(group.world, group.rank)
    if isinstance(group, ShmGroup):
        return ShmParcels(group.heap, group.signals, room_bytes)
    if isinstance(group, DeviceGroup):
        return make_parcels(group.control, room_bytes)
    return CollectiveParcels(group) if isinstance(group, GlooGroup) else LocalParcels()


def _of_group(group: Group) -> str:
    if isinstance(group, MailboxGroup):
        return "mailbox"
    if isinstance(group, ShmGroup):
        return "shm"
    if isinstance(group, DeviceGroup):
        return "nccl"
    return "gloo" if isinstance(group, GlooGroup) else "local"


def make_groups(
    backend: str,
    place: Path,
    rank: int,
    size: int,
    timeout: float,
    epoch: int = 0,
    stop: Callable[[], bool] | None = None,
) -> tuple[Group, Group]:
    """The two groups of a rank: where the ranks agree, and where tokens travel to experts (make_lanes wants that one).

    Two, because the next step is agreed on while the last one's tokens still travel. backend: one that joins processes,
    or a pair; with size 1 any name gives LocalGroups. rank: 0 to size - 1, that is among the live ones. place: a
    directory or a file that exists, on this machine (ep/transport/shm_rendezvous.py). epoch: new for every membership.
    timeout: seconds, the bound of every wait of the groups, joining included. stop: asked every few milliseconds while
    others have not come yet; True (this membership is out of date) ends that. Raises PeerLost when others do not come,
    have ended, or `stop` said so; ValueError for numbers out of range.
    """
    if size == 1:
        return LocalGroup(), LocalGroup()
    _check_names(backend)
    kind = family(split_pair(backend)[0])
    join = _shm_groups if kind == "shm" or (kind == "device" and not unsupported()) else _gloo_groups
    if kind in ("shm", "gloo"):
        return join(place, rank, size, timeout, epoch, stop)
    if kind == "device":
        agreement, hosts = join(place, rank, size, timeout, epoch, stop)
        store = store_of(agreement, f"device/{epoch}", timeout)
        return agreement, device_group(hosts, store, timeout, torch.device("cuda"))
    raise ValueError(f"all2all backend {backend!r} does not join processes; it must be shm or gloo, or one for GPUs")


def _shm_groups(
    place: Path, rank: int, size: int, timeout: float, epoch: int, stop: Callable[[], bool] | None
) -> tuple[Group, Group]:
    agreement = shm_group(place, rank, size, timeout, "agreement", epoch, stop)
    try:
        # Who ended in between will not sign in again.
        return agreement, shm_group(
            place, rank, size, timeout, "experts", epoch, lambda: agreement.anybody_ended() or bool(stop and stop())
        )
    except BaseException:
        agreement.close()
        raise


def _gloo_groups(
    place: Path, rank: int, size: int, timeout: float, epoch: int, stop: Callable[[], bool] | None
) -> tuple[Group, Group]:
    # gloo waits for a process that has ended, so the ranks first meet without it.
    served = serve_store(timeout) if rank == 0 else None
    watch = Watch()
    with rendezvous(place, "gloo", rank, size, epoch) as all_ranks:
        try:
            all_ranks.sign_in(port=-1 if served is None else served.port)
            found = all_ranks.await_all(timeout, watch, stop)
            common = join_store(found[0].port, timeout) if served is None else served
            store = dist.PrefixStore(str(epoch), common)  # type: ignore[attr-defined]

            def gone() -> bool:
                return bool(watch.ended()) or (stop is not None and stop())

            agreement = join_gloo(store, rank, size, timeout, "agreement", epoch, stop=gone)
            try:
                return agreement, join_gloo(store, rank, size, timeout, "experts", epoch, stop=gone)
            except BaseException:
                agreement.close()
                raise
        finally:
            watch.close()
