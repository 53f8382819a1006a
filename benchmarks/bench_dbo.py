"""What splitting a step hides: prefill steps of ranks on hosts with a limited network, split and not, in one run.

    .venv/bin/python benchmarks/bench_dbo.py --hosts 2 --mbit 200,400,800,1600 [--json]
    .venv/bin/python benchmarks/bench_dbo.py --hosts 1 [--json]
    .venv/bin/python benchmarks/bench_dbo.py --hosts 2 --mbit 400 --trace-dir DIR   (and timelines of off and on)

One rank per host (network namespaces, benchmarks/hosts.py; needs root), each with one thread on a core of its own. --hosts 1:
two ranks of this machine over shared memory, no limit. Every rank computes the same step, --prompts prompts of together --tokens
tokens, with enable_dbo off, on and auto in turns; a figure is the median of --rounds steps, in milliseconds:

    off_ms, on_ms, auto_ms   the step
    compute_ms               the unsplit step less what it waits for others in its exchanges
    exchange_ms              the exchanges of the unsplit step alone, one after another, nothing else (shm: what it waits)
    ideal_ms                 the longer of the two
    auto_parts               in how many parts auto computes the step

The ranks are started anew for every bandwidth: auto measures when they meet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

ROOT = Path(__file__).resolve().parent.parent
MODEL = "qwen3moe-small"  # of benchmarks/make_models.py
MODELS = ROOT / ".venv" / "bench-models"
PORT = 29700
SECONDS = 120.0  # the bound of every wait between ranks
ANSWER_SECONDS = 900.0  # and of waiting for what a rank was asked for: many steps
MODES = ("off", "on", "auto")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", default="200,400,800,1600", help="megabits per second of a host, separated by commas")
    parser.add_argument("--model", help=f"folder; else {MODEL} is made once, which takes a minute")
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank's step")
    parser.add_argument("--prompts", type=int, default=4, help="of a rank's step")
    parser.add_argument("--parts", type=int, default=2, help="in how many on and auto split a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument("--json", action="store_true", help="nothing but one JSON line per bandwidth")
    parser.add_argument(
        "--trace-dir", type=Path, help="leave off-MBIT.json and on-MBIT.json there: timelines of five steps"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(json.loads(options.worker))
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    if options.model is None:
        make = [sys.executable, str(Path(__file__).with_name("make_models.py")), "--out", str(MODELS), "--only", MODEL]
        subprocess.run(make, check=True, stdout=sys.stderr, timeout=ANSWER_SECONDS)
        options.model = str(MODELS / MODEL)
    limits = [float(word) for word in options.mbit.split(",")] if options.hosts > 1 else [None]
    if not options.json:
        print(
            f"{'mbit':>6} {'compute':>8} {'exchange':>9} {'off':>8} {'on':>8} {'auto':>8} {'ideal':>8} {'off/ideal':>9} {'on/ideal':>9} {'auto/off':>9}"
        )
    for mbit in limits:
        try:
            row = measure(options, mbit)
        except ValueError as error:  # no hosts can be made here, or no such model
            print(f"bench_dbo: {error}", file=sys.stderr)
            sys.exit(2)
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        times = " ".join(f"{row[name]:8.1f}" for name in ("off_ms", "on_ms", "auto_ms", "ideal_ms"))
        ratios = [row["off_ms"] / row["ideal_ms"], row["on_ms"] / row["ideal_ms"], row["auto_ms"] / row["off_ms"]]
        shown = " ".join(f"{ratio:9.2f}" for ratio in ratios)
        print(f"{mbit or 0:6.0f} {row['compute_ms']:8.1f} {row['exchange_ms']:9.1f} {times} {shown}", flush=True)


# ---- the side that starts the ranks and asks them ----


def measure(options: argparse.Namespace, mbit: float | None) -> Row:
    with ranks(options, mbit) as workers:
        ask(workers, "off")  # the first steps also fill caches and let rooms grow
        ask(workers, "on")
        answers: dict[str, list[list[Row]]] = {mode: [] for mode in (*MODES, "exchange")}
        for _ in range(options.rounds):
            for mode in (*MODES, "exchange"):
                answers[mode].append(ask(workers, mode))
        if options.trace_dir is not None:
            for mode in ("off", "on"):
                write_timeline(options.trace_dir / f"{mode}-{mbit or 0:.0f}.json", ask(workers, f"trace {mode}"))
    figures = {mode: statistics.median(slowest(answer, "ms") for answer in answers[mode]) for mode in answers}
    compute = statistics.median(slowest(answer, "compute_ms") for answer in answers["off"])
    waits = statistics.median(slowest(answer, "wait_ms") for answer in answers["off"])
    exchange = figures["exchange"] or waits
    row = {"hosts": options.hosts, "mbit": mbit, "tokens": options.tokens, "parts": options.parts}
    row |= {"compute_ms": compute, "exchange_ms": exchange}
    row |= {f"{mode}_ms": figures[mode] for mode in MODES} | {"ideal_ms": max(compute, exchange)}
    row["auto_parts"] = max(answer[0]["parts"] for answer in answers["auto"])
    row["cpu_off_ms"], row["cpu_on_ms"] = (
        statistics.median(slowest(answer, "cpu_ms") for answer in answers[mode]) for mode in ("off", "on")
    )
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}


def write_timeline(path: Path, answers: Sequence[Row]) -> None:
    import msgspec

    from front.messages import ProfilePart
    from front.profiling import Profile
    from front.trace_file import write_trace

    parts = [msgspec.convert(answer["part"], ProfilePart) for answer in answers]
    write_trace(Profile(path, parts, [], 0.0))


def slowest(answers: Sequence[Row], name: str) -> float:
    return max(float(answer[name]) for answer in answers)


def ask(workers: Sequence[subprocess.Popen[str]], what: str) -> list[Row]:
    """All do it together; the answer of each."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(what + "\n")
        worker.stdin.flush()
    answers = []
    for rank, worker in enumerate(workers):
        assert worker.stdout is not None
        if not select.select([worker.stdout], [], [], ANSWER_SECONDS)[0]:
            raise RuntimeError(f"rank {rank} has not answered within {ANSWER_SECONDS:.0f} s")
        line = worker.stdout.readline()
        if not line:
            raise RuntimeError(f"rank {rank} has ended ({worker.wait(SECONDS)})")
        answers.append(json.loads(line))
    return answers


@contextlib.contextmanager
def ranks(options: argparse.Namespace, mbit: float | None) -> Iterator[list[subprocess.Popen[str]]]:
    """Started, loaded and met."""
    from hosts import Hosts

    folder = tempfile.mkdtemp(prefix="moe-dbo-")
    size = max(2, options.hosts)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(options.threads)}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = stack.enter_context(Hosts(options.hosts, mbit)) if options.hosts > 1 else None
        plan = str(Path(folder) / "plan.json")
        Path(plan).write_text(plan_text(options, size))
        part = {"plan": plan, "folder": folder, "size": size, "tokens": options.tokens, "prompts": options.prompts}
        part |= {"head": hosts.addresses[0] if hosts else "", "addresses": hosts.addresses if hosts else []}
        if hosts is not None:
            store = [
                sys.executable,
                "-m",
                "engine.process.store_process",
                "--host",
                hosts.addresses[0],
                "--port",
                str(PORT),
            ]
            hosts.start(0, store, env=environment)  # ends with its host
        workers = []
        for rank in range(size):
            own = range(rank * options.threads, (rank + 1) * options.threads)
            cores = [core % (os.cpu_count() or 1) for core in own]
            command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, __file__, "--worker"]
            command.append(json.dumps({**part, "rank": rank}))
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            if hosts is None:
                worker = subprocess.Popen(command, env=environment, **pipes)
            else:
                worker = hosts.start(rank, command, env=environment, **pipes)
            stack.callback(end, worker)
            workers.append(worker)
        ask(workers, "ready")
        yield workers


def end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def plan_text(options: argparse.Namespace, size: int) -> str:
    import msgspec

    from configs.engine import EngineConfig
    from engine.plan import make_plan

    plan = make_plan(
        EngineConfig(
            model=options.model,
            data_parallel_size=size,
            all2all_backend="shm" if options.hosts == 1 else "gloo",
            threads_per_rank=options.threads,
            num_redundant_experts=0,
            max_model_len=options.tokens + 16,
            max_num_seqs=max(8, options.prompts),
            max_num_batched_tokens=options.tokens,
            num_kv_blocks=(options.tokens // 16 + 2) * 4,
            enable_prefix_caching=False,
            async_scheduling=False,
            enable_dbo="auto",
            ubatch_size=options.parts,
            exchange_timeout=SECONDS,
        )
    )
    assert plan.dbo is not None
    forgetful = structs.replace(plan.dbo, memory="")  # auto measures anew
    return msgspec.json.encode(structs.replace(plan, pin_ranks=False, dbo=forgetful)).decode()


# ---- one rank ----


def work(part: Row) -> None:
    import logging

    import torch

    if part["rank"] == 0:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")  # what auto has found
    bench = RankBench(part)
    print(json.dumps({"ready": True}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            what = line.strip()
            if what == "ready":
                continue
            if what.startswith("trace "):
                print(json.dumps(bench.trace(what.removeprefix("trace "))), flush=True)
                continue
            print(json.dumps(bench.exchange() if what == "exchange" else bench.step(what)), flush=True)


class RankBench:
    def __init__(self, part: Row) -> None:
        import msgspec
        from wait_clock import WaitClock

        from configs.engine import Plan
        from dbo.threshold import NEVER, Crossover, Threshold
        from engine.build import build_rank
        from engine.process.malloc import tune_malloc
        from engine.team import Groups, OpeningThread
        from ep.table import make_groups
        from ep.transport.remote import remote_groups

        tune_malloc()
        self.part = part
        plan = msgspec.json.decode(Path(part["plan"]).read_bytes(), type=Plan)
        self.vocab = 1000
        rank = part["rank"]

        def open_groups(stop: Any) -> Groups:
            if part["addresses"]:
                store = (part["head"], PORT)
                return Groups(*remote_groups(store, part["addresses"][rank], rank, part["size"], SECONDS, 0, stop))
            return Groups(*make_groups("shm", Path(part["folder"]), rank, part["size"], SECONDS, 0, stop))

        self.rank = build_rank(plan, rank, lambda epoch, rank, size: OpeningThread(open_groups))
        deadline = time.monotonic() + SECONDS
        while not self.rank._team.working and time.monotonic() < deadline:
            self.rank.step()
            time.sleep(0.001)
        assert self.rank._team.working, "the ranks have not met"
        assert self.rank._overlap is not None
        self.overlap = self.rank._overlap
        self.gates = {
            "off": Threshold(1, Crossover(NEVER, NEVER)),
            "on": Threshold(plan.dbo.num_ubatches if plan.dbo else 1, Crossover(1, 1)),
            "auto": self.overlap._threshold,
        }
        self.serial = 0
        self.barrier = self.rank._team._groups.agreement  # type: ignore[union-attr]
        self.clock = WaitClock(self.rank._team._groups.experts)  # type: ignore[union-attr]
        self.parts = 1
        launch = self.rank._runner.launch

        def noting(schedule: Any, hooks: Any = (), num_ubatches: int = 1) -> Any:
            self.parts = num_ubatches
            return launch(schedule, hooks, num_ubatches)

        self.rank._runner.launch = noting  # type: ignore[method-assign]

    def step(self, mode: str) -> Row:
        from front.messages import AddRequest
        from front.params import SamplingParams

        self.overlap._threshold = self.gates[mode]
        each = self.part["tokens"] // self.part["prompts"]
        for _ in range(self.part["prompts"]):
            self.serial += 1
            ids = [(7919 * self.serial + 31 * self.part["rank"] + 13 * i * i) % self.vocab + 10 for i in range(each)]
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            self.rank.submit(AddRequest(request_id=self.serial, token_ids=ids, prompt_len=each, params=params, seed=0))
        self.clock.begin(mode == "off")
        self.barrier.all_gather_ints([0]).wait()
        began, cpu = time.perf_counter(), time.process_time()
        outputs = self.rank.step()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        parts = self.parts
        assert len(outputs) == self.part["prompts"], f"{len(outputs)} prompts computed in the step"
        self.clock.end()
        while not self.rank.idle:
            self.rank.step()
        waited = self.clock.seconds
        return {
            "ms": seconds * 1e3,
            "wait_ms": waited * 1e3,
            "compute_ms": (seconds - waited) * 1e3,
            "cpu_ms": cpu * 1e3,
            "parts": parts,
        }

    def trace(self, mode: str) -> Row:
        """A few steps, and what was recorded of them."""
        import msgspec

        from front.messages import ProfileCommand

        self.rank.submit(ProfileCommand(profile_id=1, kind="start", capacity=1 << 16))
        for _ in range(5):
            self.step(mode)
        self.rank.submit(ProfileCommand(profile_id=1, kind="stop"))
        (part,) = self.rank.take_events()
        return {"part": msgspec.to_builtins(part)}

    def exchange(self) -> Row:
        """The exchanges of the last unsplit step, one after another."""
        return {"ms": self.clock.replay(self.barrier) * 1e3}


if __name__ == "__main__":
    main()
