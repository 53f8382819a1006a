"""How decoding scales from one host to several, a rank with one thread on a core of its own on each.

    .venv/bin/python benchmarks/bench_cluster.py --hosts 2 [--ranks 1] --mbit 1000,10000 [--streams 64] [--steps 12] [--rounds 3]

The same streams on one host, and spread over --hosts hosts (network namespaces with a bandwidth limit, benchmarks/hosts.py; needs
root) whose ranks share the experts. Every rank decodes its part of the streams in lockstep with the others: agreement, schedule,
exchanges and sampling are included. Hosts of one machine share its memory and its clock, so "one host" is measured while each of the
others does the same work for itself, without a network. All are loaded at once and take turns, --rounds times. A row per bandwidth,
medians of all steps, in milliseconds:

With more ranks than cores they share the cores, "one host" too. A row's `ranks` are those of all hosts.

    alone_ms                 a step with all streams on one host, the others idle
    one_ms                   the same while the other hosts work too: what scaling is told against
    replicas_ms              a step with a part of the streams on each host, each for itself: servers behind a router
    step_ms, wait_ms         a step of hosts that share the experts (of the slowest rank), and what it waits for exchanges
    scaling, of_ideal        tokens per second over those of one host (one_ms), and that over the number of ranks
    over_replicas            tokens per second over those of replicas
    low, high                of_ideal of the worst and of the best round
    bytes_per_token          of a stream that left a host (all interfaces of its namespace), both directions of an exchange
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench_dbo import ANSWER_SECONDS, MODEL, MODELS, PORT, ROOT, SECONDS, ask, end
from msgspec import structs

PROMPT_TOKENS = 32
WARM_STEPS = 4
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of a host, which exchange through its memory")
    parser.add_argument("--mbit", default="1000,10000", help="megabits per second of a host, separated by commas")
    parser.add_argument("--model", help=f"folder; else {MODEL} is made once, which takes a minute")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
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
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Prints the rows."""
    size, streams = options.hosts * options.ranks, options.streams
    with contextlib.ExitStack() as stack:
        singles = [stack.enter_context(ranks(options, 1, core)) for core in range(size)]
        hosts, many = stack.enter_context(cluster(options))
        on_all = [worker for single in singles for worker in single]
        for mbit in map(float, options.mbit.split(",")):
            hosts.limit(mbit)
            runs: dict[str, list[Row]] = {"alone": [], "one": [], "replicas": [], "many": []}
            for _ in range(options.rounds):
                runs["alone"].append(decode(singles[0], streams))
                runs["one"].append(decode(on_all, streams))
                runs["replicas"].append(decode(on_all, streams // size))
                runs["many"].append(decode(many, streams // size, together=True))
            row: Row = {
                "hosts": options.hosts,
                "ranks": size,
                "mbit": mbit,
                "streams": streams,
                "rows": options.rows,
                "dbo": options.dbo,
            }
            row |= figures(runs, size, streams)
            row = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
            print(json.dumps(row) if options.json else row, flush=True)


def decode(workers: list[subprocess.Popen[str]], streams: int, together: bool = False) -> Row:
    """steps: seconds of each, of the slowest rank where they step together."""
    answers = ask(workers, f"decode {streams}")
    times = [of_rank["steps"] for of_rank in answers]
    count = len(times[0])
    steps = (
        [max(of_step) for of_step in zip(*times, strict=True)]
        if together
        else [one for of_rank in times for one in of_rank]
    )
    wait = max(of_rank["wait"] for of_rank in answers) / count
    tokens = streams * len(workers) * (count + WARM_STEPS)
    return {"steps": steps, "wait": wait, "bytes": sum(of_rank["sent"] for of_rank in answers) / tokens}


def figures(runs: dict[str, list[Row]], size: int, streams: int) -> Row:
    ms = {
        name: 1000 * statistics.median([step for run in found for step in run["steps"]]) for name, found in runs.items()
    }
    rounds = [
        statistics.median(one["steps"]) / statistics.median(many["steps"]) / size
        for one, many in zip(runs["one"], runs["many"], strict=True)
    ]
    return {
        "alone_ms": ms["alone"],
        "one_ms": ms["one"],
        "replicas_ms": ms["replicas"],
        "step_ms": ms["many"],
        "wait_ms": 1000 * statistics.median(run["wait"] for run in runs["many"]),
        "scaling": ms["one"] / ms["many"],
        "of_ideal": ms["one"] / ms["many"] / size,
        "low": min(rounds),
        "high": max(rounds),
        "over_replicas": ms["replicas"] / ms["many"],
        "tokens_per_s": 1000 * streams / ms["many"],
        "bytes_per_token": runs["many"][-1]["bytes"],
    }


@contextlib.contextmanager
def cluster(options: argparse.Namespace) -> Iterator[tuple[Any, list[subprocess.Popen[str]]]]:
    """Hosts with a rank on each."""
    from hosts import Hosts

    size = options.hosts * options.ranks
    with Hosts(options.hosts, 10000) as hosts, ranks(options, size, 0, hosts) as workers:
        yield hosts, workers


@contextlib.contextmanager
def ranks(
    options: argparse.Namespace, size: int, core: int, hosts: Any = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Started, loaded and met. core: of the first; hosts: where they are; None: here."""
    folder = tempfile.mkdtemp(prefix="moe-cluster-")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        plan = Path(folder) / "plan.json"
        plan.write_text(plan_text(options, size))
        part: Row = {"plan": str(plan), "size": size, "steps": options.steps}
        part |= {"addresses": hosts.addresses if hosts else [], "ranks": options.ranks}
        if hosts is not None:
            store = ["-m", "engine.process.store_process", "--host", hosts.addresses[0], "--port", str(PORT)]
            hosts.start(0, [sys.executable, *store], env=environment)  # ends with its host
        workers = []
        for rank in range(size):
            cores = os.cpu_count() or 1
            command = ["taskset", "-c", str((core + rank) % cores), sys.executable, __file__, "--worker"]
            command.append(json.dumps({**part, "rank": rank}))
            pipes: Row = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
            of_host = None if hosts is None else partial(hosts.start, rank // options.ranks)
            workers.append((of_host or subprocess.Popen)(command, **pipes))
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
    return msgspec.json.encode(structs.replace(plan, pin_ranks=False)).decode()


# ---- one rank ----


def work(part: Row) -> None:
    import torch

    bench = RankBench(part)
    print(json.dumps({"ready": True}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            what, *number = line.split()
            if what == "decode":
                print(json.dumps(bench.decode(int(number[0]))), flush=True)


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
        host = rank // part["ranks"]

        def open_groups(stop: Any) -> Groups:
            place = Path(part["plan"]).with_name(f"host-{host}")
            place.mkdir(exist_ok=True)
            store, size = (addresses[0], PORT), part["size"]
            return Groups(*remote_groups(store, addresses[host], rank, size, SECONDS, 0, stop, place))

        self.rank = build_rank(plan, rank, (lambda *_: OpeningThread(open_groups)) if addresses else None)
        deadline = time.monotonic() + SECONDS
        while not self.rank.serving and time.monotonic() < deadline:
            self.rank.step()
            time.sleep(0.001)
        assert self.rank.serving, "the ranks have not met"

    def decode(self, streams: int) -> Row:
        from wait_clock import WaitClock

        from front.messages import AddRequest
        from front.params import SamplingParams

        part = self.part
        num_tokens = part["steps"] + WARM_STEPS + 2
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for number in range(streams):
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
            assert len(outputs) == streams, f"{len(outputs)} streams got on"
        sent = sent_bytes() - before
        if clock is not None:
            clock.end()
        wait = 0.0 if clock is None else clock.seconds
        while not self.rank.idle:
            self.rank.step()
        return {"steps": steps[WARM_STEPS:], "wait": wait, "sent": 0 if part["rank"] % part["ranks"] else sent}


if __name__ == "__main__":
    main()
