"""What happens in one schedule, drawn from its seed: the server, its load, and the faults."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from configs.engine import Plan
from front.outputs import Prompt
from front.params import SamplingParams
from tests.simulation.standin import VOCABULARY, Facts, letter
from tests.simulation.transport import Delays

BLOCK_SIZE = 4
MAX_LENGTH = 64
EXCHANGE_TIMEOUT = 8.0
PHASES = ("starts", "loaded", "meets", "opened", "reads", "joined")
DISK = ("away", "changed", "stall")  # faults of the disk; a rank is lost soon after each


class Fault(Struct, frozen=True):
    """kind: kill, stop (until it is killed), hang (its loop, until it is killed), aloof (likewise, while its heartbeat goes on), busy
    (its loop makes no mark for so long, and it is well), cut (what it sends in exchanges of the epoch is lost), pause (stopped,
    and goes on), slow, crash (it dies several times while it loads
    again), all (every rank is killed within `seconds`), away (the weights cannot be read), changed (other weights lie there), stall
    (reads do not end), front (the front does not read), supervisor (it does not look); resize is none, but what an operator asks for: that
    `times` ranks serve.

    When: `delay` seconds after the server was ready; or after fault `after`; or after the `count`-th time that `phase`
    happened to any rank. victim -1: any rank; -2: the rank that the phase happened to.
    """

    kind: str
    victim: int
    delay: float
    seconds: float = 0.0
    times: int = 1
    after: int = -1
    phase: str = ""
    count: int = 1
    early: bool = False  # the phases before the server was ready count (a rank lost there ends the server)

    def __str__(self) -> str:
        who = {-1: "any rank", -2: "the rank of the phase"}.get(self.victim, f"rank {self.victim}")
        when = f"{self.delay:.4f} s after "
        if self.phase:
            when += f"{self.phase!r} no. {self.count}"
        else:
            when += "the server is ready" if self.after < 0 else f"fault {self.after}"
        long = f" for {self.seconds:.2f} s" if self.seconds else ""
        again = f", {self.times} times" if self.times > 1 else ""
        if self.kind == "resize":
            who, again = f"to {self.times}", ""
        return f"{self.kind} {who}{long}{again}, {when}"


class Request(Struct):
    prompt: Prompt
    arrival: float  # after the server was ready
    abort: float | None = None  # after its arrival


class Schedule(Struct):
    seed: int
    plan: Plan
    facts: Facts
    delays: Delays
    requests: list[Request]
    faults: list[Fault] = field(default_factory=list)

    def describe(self) -> str:
        plan = self.plan
        lines = [
            f"{plan.data_parallel_size} ranks, {plan.num_experts} experts in {plan.slots_per_rank} slots each, "
            f"{self.facts.num_layers} layers, {plan.num_kv_blocks} blocks, async {plan.async_scheduling}, "
            f"prefixes {plan.enable_prefix_caching}, late messages {self.delays.late_chance:.2f}"
        ]
        for item in self.requests:
            params = item.prompt.params
            lines.append(
                f"request {item.prompt.request_id} at {item.arrival:.3f}: {len(item.prompt.token_ids)} tokens, "
                f"{params.n} x {params.max_tokens}"
                + ("" if item.abort is None else f", aborted after {item.abort:.3f} s")
            )
        lines += [f"fault {index}: {fault}" for index, fault in enumerate(self.faults)]
        return "\n".join(lines)


def _checkpoint() -> str:
    """A directory that reads as a checkpoint, of one number. Made once, and removed with the process."""
    directory = tempfile.TemporaryDirectory(prefix="moesaic-simulation-")
    header = b'{"nothing":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (Path(directory.name) / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    _KEPT.append(directory)
    return directory.name


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
CHECKPOINT = _checkpoint()


def draw(seed: int) -> Schedule:
    chance = random.Random(seed)
    num_ranks = chance.choice((2, 3, 3, 4, 4))
    num_experts = chance.choice((0, 4, 6, 6, 8))
    facts = Facts(chance.choice((1, 1, 2)), num_experts)
    faults = _faults(chance, num_ranks)
    hangs = random.Random(f"hangs {seed}")
    if hangs.random() < 0.4:
        faults.append(_hang(hangs, num_ranks, len(faults)))
    return Schedule(
        seed=seed,
        plan=_plan(chance, num_ranks, num_experts),
        facts=facts,
        delays=_delays(chance),
        requests=_requests(
            chance,
            [fault.delay for fault in faults if not fault.phase and fault.after < 0],
            random.Random(f"ends {seed}"),
        ),
        faults=faults,
    )


def _plan(chance: random.Random, num_ranks: int, num_experts: int) -> Plan:
    spare = chance.choice((0, 1, 1, 1, num_ranks - 1))  # how many ranks may be lost
    values: dict[str, Any] = {
        "model_path": CHECKPOINT,
        "served_model_names": (),
        "architecture": "",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": chance.choice((2, 4, 8)),
        "max_num_batched_tokens": chance.choice((8, 16, 64)),
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": chance.choice((16, 24, 64)),
        "enable_prefix_caching": chance.random() < 0.8,
        "enable_chunked_prefill": True,
        "scheduling_policy": "fcfs",
        "async_scheduling": chance.random() < 0.5,
        "data_parallel_size": num_ranks,
        "all2all_backend": "mailbox",
        "num_experts": num_experts,
        "slots_per_rank": -(-num_experts // (num_ranks - spare)) if num_experts else 0,
        "threads_per_rank": 1,
        "mla_prefill": "auto",
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": 20,
        "exchange_timeout": EXCHANGE_TIMEOUT,
    }
    return Plan(**values)


def _delays(chance: random.Random) -> Delays:
    delays = Delays()
    if chance.random() < 0.4:
        delays.late_chance = chance.choice((0.02, 0.1, 0.3))
    if chance.random() < 0.2:
        delays.message = (0.0, 0.03)
    if chance.random() < 0.2:
        delays.exchange = (0.0, 0.005)
    if chance.random() < 0.2:
        delays.load = (0.1, 0.15)
    if chance.random() < 0.3:
        delays.read = (0.001, 0.3)
    return delays


def _requests(chance: random.Random, fault_times: list[float], ends: random.Random) -> list[Request]:
    """Many come a moment before a fault. ends: draws those that end early, but not too early."""
    shared = [chance.randrange(1, VOCABULARY) for _ in range(12)]
    requests = []
    for number in range(chance.randint(3, 8)):
        length = chance.randint(1, 12)
        token_ids = [chance.randrange(1, VOCABULARY) for _ in range(length)]
        if chance.random() < 0.4:
            token_ids = shared[:8] + token_ids[:4]
        params = SamplingParams(
            n=2 if chance.random() < 0.15 else 1,
            max_tokens=chance.randint(1, 20),
            temperature=chance.choice((0.0, 0.9)),
            seed=chance.randrange(1 << 40),
            ignore_eos=chance.random() < 0.7,
            stop=(letter(chance.randrange(26)) + letter(chance.randrange(26)),) if chance.random() < 0.2 else (),
            stop_token_ids=(chance.randrange(1, VOCABULARY),) if chance.random() < 0.15 else (),
        )
        if ends.random() < 0.3:
            assert params.max_tokens is not None
            stops = tuple(ends.sample(range(1, VOCABULARY), 8))
            longer = params.max_tokens + 4
            params = msgspec.structs.replace(
                params, stop_token_ids=stops, min_tokens=ends.randint(1, longer), max_tokens=longer
            )
        arrival = chance.uniform(0.0, 0.3) if chance.random() < 0.7 else chance.uniform(0.0, 2.5)
        if fault_times and chance.random() < 0.5:
            arrival = max(0.0, chance.choice(fault_times) - chance.uniform(0.0, 0.06))
        abort = chance.uniform(0.0, 0.3) if chance.random() < 0.08 else None
        prompt = Prompt(request_id=f"r{number}", token_ids=token_ids, params=params)
        requests.append(Request(prompt, arrival, abort))
    return requests


def _hang(chance: random.Random, num_ranks: int, index: int) -> Fault:
    """A rank whose loop gets on no more, or one that seems so."""
    kind = chance.choice(("hang", "hang", "hang", "busy", "busy", "cut", "cut", "aloof", "aloof"))
    fault: dict[str, Any] = {"kind": kind, "victim": chance.choice((-1, chance.randrange(num_ranks)))}
    if kind == "busy":
        fault["seconds"] = chance.uniform(1.0, 5.0)
    if index and chance.random() < 0.3:
        return Fault(**fault, after=index - 1, delay=chance.uniform(0.0, 0.2))
    if index and chance.random() < 0.3:
        return Fault(**fault, phase="joined", count=chance.randint(1, num_ranks), delay=chance.uniform(0.0, 0.05))
    return Fault(**fault, delay=chance.uniform(0.0, 0.2))


def _faults(chance: random.Random, num_ranks: int) -> list[Fault]:
    faults: list[Fault] = []
    kinds = ("kill",) * 6 + ("stop", "pause", "slow", "crash", "front", "supervisor", "resize", "resize", "all", *DISK)
    for index in range(chance.choice((0, 1, 1, 2, 2, 3, 4, 5))):
        kind = chance.choice(kinds)
        seconds = {"pause": (0.01, 1.9), "slow": (0.05, 1.0), "front": (0.01, 1.5), "supervisor": (0.1, 3.0)}
        seconds |= {"all": (0.0, 0.05), "away": (0.05, 30.0), "changed": (0.05, 30.0), "stall": (0.05, 8.0)}
        low, high = seconds.get(kind, (0.0, 0.0))
        fault: dict[str, Any] = {
            "kind": kind,
            "victim": chance.choice((-1, chance.randrange(num_ranks))),
            "seconds": chance.uniform(low, high),
            "times": {"crash": chance.randint(1, 4), "resize": chance.randint(1, num_ranks + 1)}.get(kind, 1),
        }
        how = chance.random()
        if index and how < 0.35:
            fault["after"] = index - 1
            fault["delay"] = chance.choice(
                (0.05, chance.uniform(0.0, 0.01), chance.uniform(0.0, 0.1), chance.uniform(0.0, 2.0))
            )
        elif index and how < 0.65:
            fault["phase"] = chance.choice(PHASES)
            fault["count"] = chance.randint(1, num_ranks + 3)
            fault["delay"] = chance.choice((0.0, chance.uniform(0.0, 0.002), chance.uniform(0.0, 0.05)))
            fault["victim"] = chance.choice((-1, -2, -2, fault["victim"]))
        elif how > 0.98:  # before the server is ready: it then ends with an error
            fault["phase"] = chance.choice(("starts", "loaded", "opened"))
            fault["early"] = True
            fault["count"] = chance.randint(1, num_ranks)
            fault["delay"] = chance.uniform(0.0, 0.02)
        else:
            fault["delay"] = chance.uniform(0.0, 0.4) if chance.random() < 0.8 else chance.uniform(0.0, 3.0)
        faults.append(Fault(**fault))
    for index, one in enumerate(list(faults)):
        if one.kind in DISK:
            faults.append(Fault("kill", -1, chance.uniform(0.0, 0.2), after=index))
    return faults
