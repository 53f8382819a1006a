"""How decoding scales from one host to several, a rank with one thread on a core of its own on each.

    .venv/bin/python benchmarks/bench_cluster.py --hosts 2 --mbit 1000,10000 [--streams 64] [--steps 24] [--rows plain] [--json]

The same streams on one host, and spread over --hosts hosts (network namespaces with a bandwidth limit, benchmarks/hosts.py; needs
root) whose ranks share the experts. Every rank decodes its part of the streams in lockstep with the others: agreement, schedule,
exchanges and sampling are included. A row per bandwidth, medians of the steps:

    one_ms, step_ms          a step on one host, and on all (of the slowest rank)
    exchange_ms              of it, what the slowest rank waited for exchanges (0 where the transport hides all)
    scaling, of_ideal        tokens per second over those of one host, and that over the number of hosts
    bytes_per_token          of a stream that left a host (all interfaces of its namespace), both directions of an exchange
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_dbo import ANSWER_SECONDS, MODEL, MODELS, PORT, ROOT, SECONDS, ask, end

PROMPT_TOKENS = 32
WARM_STEPS = 4
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", default="1000,10000", help="megabits per second of a host, separated by commas")
    parser.add_argument("--model", help=f"folder; else {MODEL} is made once, which takes a minute")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rows", choices=("plain", "fp8"), default="plain", help="how rows travel to their experts")
    parser.add_argument("--dbo", choices=("off", "on"), default="off")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(json.loads(options.worker))
        return
    if options.model is None:
        make = [sys.executable, str(Path(__file__).with_name("make_models.py")), "--out", str(MODELS), "--only", MODEL]
        subprocess.run(make, check=True, stdout=sys.stderr, timeout=ANSWER_SECONDS)
        options.model = str(MODELS / MODEL)
    one = measure(options, 1, None)
    for mbit in map(float, options.mbit.split(",")):
        many = measure(options, options.hosts, mbit)
        scaling = one["step_ms"] / many["step_ms"]
        row = {
            "hosts": options.hosts,
            "mbit": mbit,
            "streams": options.streams,
            "rows": options.rows,
            "dbo": options.dbo,
        }
        row |= {"one_ms": one["step_ms"], **many, "scaling": scaling, "of_ideal": scaling / options.hosts}
        row = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
        print(json.dumps(row) if options.json else row, flush=True)


def measure(options: argparse.Namespace, size: int, mbit: float | None) -> Row:
    with ranks(options, size, mbit) as workers:
        answers = ask(workers, "decode")
    steps = [max(of_rank["steps"][index] for of_rank in answers) for index in range(options.steps)]
    tokens = options.streams * (options.steps + WARM_STEPS)
    return {
        "step_ms": 1000 * statistics.median(steps),
        "wait_ms": 1000 * max(of_rank["wait"] for of_rank in answers) / options.steps,
        "bytes_per_token": sum(of_rank["sent"] for of_rank in answers) / tokens,
        "tokens_per_s": options.streams / statistics.median(steps),
    }


@contextlib.contextmanager
def ranks(options: argparse.Namespace, size: int, mbit: float | None) -> Iterator[list[subprocess.Popen[str]]]:
    """Started, loaded and met."""
    from hosts import Hosts

    folder = tempfile.mkdtemp(prefix="moe-cluster-")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = stack.enter_context(Hosts(size, mbit)) if size > 1 else None
        plan = Path(folder) / "plan.json"
        plan.write_text(plan_text(options, size))
        part: Row = {"plan": str(plan), "size": size, "streams": options.streams // size, "steps": options.steps}
        part |= {"addresses": hosts.addresses if hosts else []}
        if hosts is not None:
            store = ["-m", "engine.process.store_process", "--host", hosts.addresses[0], "--port", str(PORT)]
            hosts.start(0, [sys.executable, *store], env=environment)  # ends with its host
        workers = []
        for rank in range(size):
            command = ["taskset", "-c", str(rank % (os.cpu_count() or 1)), sys.executable, __file__, "--worker"]
            command.append(json.dumps({**part, "rank": rank}))
            pipes: Row = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
            workers.append(subprocess.Popen(command, **pipes) if hosts is None else hosts.start(rank, command, **pipes))
            stack.callback(end, workers[-1])
        ask(workers, "ready")
        yield workers


def plan_text(options: argparse.Namespace, size: int) -> str:
    import msgspec

    from configs.engine import EngineConfig
    from engine.plan import make_plan

    length = PROMPT_TOKENS + options.steps + WARM_STEPS + 8
    plan = make_plan(
        EngineConfig(
            model=options.model, data_parallel_size=size, all2all_backend="gloo" if size > 1 else "auto",
            threads_per_rank=1, num_redundant_experts=0, max_model_len=length, max_num_seqs=options.streams,
            max_num_batched_tokens=options.streams * PROMPT_TOKENS, num_kv_blocks=options.streams * (length // 16 + 2),
            enable_prefix_caching=False, async_scheduling=False, exchange_timeout=SECONDS, enable_dbo=options.dbo,
            dispatch_dtype="fp8" if options.rows == "fp8" else "bf16", speculative_config={"method": "none"},
            dbo_decode_token_threshold=8 if options.dbo == "on" else None, prefill_cadence="off",
        )
    )  # fmt: skip
    return msgspec.json.encode(dataclasses.replace(plan, pin_ranks=False)).decode()


# ---- one rank ----


def work(part: Row) -> None:
    import torch

    bench = RankBench(part)
    print(json.dumps({"ready": True}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            if line.strip() == "decode":
                print(json.dumps(bench.decode()), flush=True)


def sent_bytes() -> int:
    """That have left this host, by whatever interface but the loopback."""
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(numbers.split()[8]) for name, numbers in rows if name.strip() != "lo")


class RankBench:
    def __init__(self, part: Row) -> None:
        import msgspec

        from configs.engine import Plan
        from engine.build import build_rank
        from engine.process.malloc import tune_malloc
        from engine.team import Groups, OpeningThread
        from ep.transport.remote import remote_groups

        tune_malloc()
        self.part = part
        plan = msgspec.json.decode(Path(part["plan"]).read_bytes(), type=Plan)
        rank, addresses = part["rank"], part["addresses"]

        def open_groups(stop: Any) -> Groups:
            return Groups(*remote_groups((addresses[0], PORT), addresses[rank], rank, part["size"], SECONDS, 0, stop))

        self.rank = build_rank(plan, rank, (lambda *_: OpeningThread(open_groups)) if addresses else None)
        deadline = time.monotonic() + SECONDS
        while not self.rank.serving and time.monotonic() < deadline:
            self.rank.step()
            time.sleep(0.001)
        assert self.rank.serving, "the ranks have not met"

    def decode(self) -> Row:
        from wait_clock import WaitClock

        from front.messages import AddRequest, SamplingParams

        part = self.part
        num_tokens = part["steps"] + WARM_STEPS + 2
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for number in range(part["streams"]):
            ids = [(7919 * (number + 31 * part["rank"]) + 13 * i * i) % 1000 + 10 for i in range(PROMPT_TOKENS)]
            self.rank.submit(
                AddRequest(request_id=number, token_ids=ids, prompt_len=PROMPT_TOKENS, params=params, seed=0)
            )
        self.rank.step()  # the prompts
        clock = WaitClock(self.rank._team.experts_group) if part["size"] > 1 else None
        before = sent_bytes()
        steps = []
        for step in range(WARM_STEPS + part["steps"]):
            if step == WARM_STEPS and clock is not None:
                clock.begin(False)
            began = time.perf_counter()
            outputs = self.rank.step()
            steps.append(time.perf_counter() - began)
            assert len(outputs) == part["streams"], f"{len(outputs)} streams got on"
        sent = sent_bytes() - before
        wait = 0.0 if clock is None else clock.seconds
        if clock is not None:
            clock.end()
        while not self.rank.idle:
            self.rank.step()
        return {"steps": steps[WARM_STEPS:], "wait": wait, "sent": sent if part["size"] > 1 else 0}


if __name__ == "__main__":
    main()
