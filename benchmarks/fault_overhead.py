"""What surviving costs while nothing fails, as percent of a step's time. Used by bench_faults.py; alone:

    python -m benchmarks.fault_overhead [--rounds 6] [--sequences 8] [--ranks 2]

Real rank processes (embedded model, float32) decode the same load over and over. Every 32 steps all of them change over, in the
order A B B A, between two ways of taking a step; the model, the scheduler, the shared memory and the sockets are the same.

A, as served: `Rank.steps` with the agreement's whole record (epoch, step, checksum, newest epoch heard of), its readiness to drop a
step and to change membership, a heartbeat, the loop of engine/process/rank_loop.py; the front keeps the log of the
tokens released and asks after recoveries, and a RankMonitor looks after the processes every 0.1 s.
B, bare: schedule, gather two integers (tokens, has work), run the step, update; no heartbeat, no log, no monitor.

In both: the look at the abort word and at the peers' ends, which a rank takes only when it has waited for more than a
millisecond already.

What the two differ in is a rank's own work around the forward pass and around the wait of the agreement, so that is what is compared:
its processor time per step (the median of a block, and the median over all pairs of neighbouring blocks). `per_step_pct` is the
difference in percent of the processor time of a whole bare step, which is less than what passes on a clock. Heartbeat and
monitor run beside the steps, and count as their processor time in percent of the time that passed. overhead_pct is the sum of
the three. wall_pct compares the clock's time per step (an eighth of the steps of a block is faster) in the same way, with its quartiles;
it is the same figure on an idle machine, and noise on a busy one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK_STEPS = 32
FIRST_STEP = 48  # of a round that is measured: by then all sequences are decoding
NUM_BLOCKS = 12  # of a round
LOOK_SECONDS = 0.1
ROUND_SECONDS = 300.0
RESULT_SECONDS = 20.0
MODE_FILE = "mode"  # in the runtime directory: b"A" or b"B"


def served_way(step: int, number: int) -> bool:
    """Which way step `step` of round `number` goes: A B B A A B B A ..., the next round B A A B ..."""
    block = (step - FIRST_STEP) // BLOCK_STEPS
    if step < FIRST_STEP or block >= NUM_BLOCKS:
        return True
    return ((block + 1) // 2 + number) % 2 == 0


# ---- a rank's process ----


class Meter:
    """Adds up processor time of this thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def steps(self, real: Any, *arguments: Any) -> Any:
        """A generator's, over all its turns."""
        inner = real(*arguments)
        while True:
            began = time.thread_time()
            try:
                next(inner)
            except StopIteration as done:
                return done.value
            finally:
                self.seconds += time.thread_time() - began
            yield

    def gather(self, real: Any, values: Any) -> Any:
        """Of a Pending's wait."""
        return _Metered(self, real(values))


class _Metered:
    def __init__(self, meter: Meter, pending: Any) -> None:
        self.meter, self.pending = meter, pending

    def wait(self) -> Any:
        began = time.thread_time()
        try:
            return self.pending.wait()
        finally:
            self.meter.seconds += time.thread_time() - began


class MeasuredRank:
    """The loop of engine/process/rank_loop.py, or the bare one."""

    def __init__(self, rank: Any, socket: Any, rank_id: int, directory: Path, places: Any) -> None:
        self.rank, self.socket, self.rank_id, self.directory = rank, socket, rank_id, directory
        self.places = places
        self.mode = os.open(directory / MODE_FILE, os.O_WRONLY | os.O_CREAT) if rank_id == 0 else -1
        self.heartbeat: Any = None
        self.served_seconds = 0.0
        self.served_since = time.monotonic()
        self.served = True
        self.blocks: list[
            tuple[bool, float, float, float]
        ] = []  # way; of a step: clock, processor, the latter of its own
        self.times: list[tuple[float, float, float]] = []
        self.meter = Meter()  # of the forward pass and of the agreement's wait
        rank._runner.steps = functools.partial(self.meter.steps, rank._runner.steps)
        self.round = 0
        self.base = self.bare_steps = 0
        self.was_idle = True

    def run(self) -> None:
        from front.wire import sleep_until_called

        rank, agreement = self.rank, lambda: self.rank._team.agreement._step
        self._start_heartbeat()
        self.socket.send(rank.ready)
        while not rank.done:
            step = agreement() - self.base + self.bare_steps
            served = served_way(step, self.round)
            if step == 1:
                self._meter_agreement()
            if served != self.served:
                self._change(served)
            self.meter.seconds = 0.0
            began, cpu = time.perf_counter(), time.thread_time()
            if served:
                pause = self._served_step()
            else:
                self._bare_step()
                pause = 0.0
            if FIRST_STEP <= step < FIRST_STEP + BLOCK_STEPS * NUM_BLOCKS:
                cpu = time.thread_time() - cpu
                self._note(step, (time.perf_counter() - began, cpu, cpu - self.meter.seconds))
            if rank.idle and step:
                self.base, self.bare_steps = agreement(), 0
                self.round += 1
                draft = self.directory / f"draft-{self.rank_id}"
                draft.write_text(json.dumps(self.result()))
                draft.replace(self.directory / f"blocks-{self.rank_id}.json")
            if pause > 0:
                sleep_until_called(self.socket, rank._bell, pause)
        rank.close()

    def result(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks,
            "served_seconds": self.served_seconds,
        }

    def _served_step(self) -> float:
        from dbo.alive import mark
        from front.messages import Membership, Outputs

        mark()
        rank, socket = self.rank, self.socket
        for message in socket.poll(0):
            if isinstance(message, Membership):
                raise RuntimeError("a rank was lost during the measurement")
            rank.submit(message)
        outputs = rank.step()
        joined = rank.take_joined()
        if joined is not None:
            socket.send(joined)
        if outputs or rank.idle != self.was_idle:
            socket.send(Outputs(self.rank_id, outputs, rank.stats, time.monotonic()))
        self.was_idle = rank.idle
        return float(rank.pause(10.0))

    def _bare_step(self) -> None:
        import torch

        from dbo.steps import drain
        from front.messages import Outputs

        rank = self.rank
        scheduler = rank._scheduler
        for message in self.socket.poll(0):
            rank.submit(message)
        with torch.inference_mode():
            schedule = scheduler.schedule()
            gathered = rank._team._groups.agreement.all_gather_ints([schedule.num_tokens, int(rank.has_work)])
            said = gathered.wait()
            outputs = []
            if any(num_tokens for num_tokens, _ in said):
                result = drain(rank._runner.launch(schedule).steps())
                if schedule.rows:
                    outputs = scheduler.update(schedule, result.token_ids, result.logprobs, result.prompt_logprobs)
        self.bare_steps += 1
        if outputs:
            self.socket.send(Outputs(self.rank_id, outputs, scheduler.stats(), time.monotonic()))

    def _meter_agreement(self) -> None:
        group = self.rank._team._groups.agreement
        if not isinstance(group.all_gather_ints, functools.partial):
            group.all_gather_ints = functools.partial(self.meter.gather, group.all_gather_ints)

    def _note(self, step: int, seconds: tuple[float, float, float]) -> None:
        at = (step - FIRST_STEP) % BLOCK_STEPS
        if at:  # the ranks change over in the first step of a block
            self.times.append(seconds)
        if at == BLOCK_STEPS - 1:
            wall, cpu, own = (sorted(times) for times in zip(*self.times, strict=True))
            self.blocks.append((self.served, wall[len(wall) // 8], statistics.median(cpu), statistics.median(own)))
            self.times = []

    def _change(self, served: bool) -> None:
        self.served = served
        if self.mode >= 0:
            os.pwrite(self.mode, b"A" if served else b"B", 0)
        if served:
            self._start_heartbeat()
        else:
            self.served_seconds += time.monotonic() - self.served_since
            self.heartbeat.close()

    def _start_heartbeat(self) -> None:
        from engine.process.heartbeat import LoopBeat

        self.served_since = time.monotonic()
        self.heartbeat = LoopBeat(self.places.file(f"beat-{self.rank_id}"))


def rank_main() -> None:
    import msgspec

    from configs.engine import Plan
    from engine.build import build_rank
    from engine.process.malloc import tune_malloc
    from engine.process.orphan import die_with_parent
    from engine.process.places import Places
    from engine.process.rank_loop import _meet_in
    from front.wire import RankSocket, ZmqDoorbell

    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--memory", type=Path, required=True)
    parser.add_argument("--parent", type=int)
    options = parser.parse_args()
    die_with_parent(options.parent)
    tune_malloc()
    directory = options.runtime_dir
    places = Places(directory, options.memory)
    socket = RankSocket(places.socket("front.ipc"), options.rank)
    plan = msgspec.json.decode(options.plan.read_bytes(), type=Plan)
    endpoints = [places.socket(f"bell-{rank}.ipc") for rank in range(plan.data_parallel_size)]
    bell = ZmqDoorbell(endpoints, options.rank)
    rank = build_rank(plan, options.rank, _meet_in(plan, options.rank, places.meetings), bell)
    MeasuredRank(rank, socket, options.rank, directory, places).run()
    socket.close()
    os._exit(0)


# ---- the front and the supervisor, in one process ----


class _NoLog(list[int]):
    """A token log that keeps nothing."""

    def extend(self, values: object) -> None:
        """Nothing."""


def measure(rounds: int, sequences: int, ranks: int) -> dict[str, Any]:
    """sequences: of each rank."""
    from configs.engine import EngineConfig
    from engine.plan import make_plan
    from front.front import Front
    from front.messages import RankLost, Shutdown
    from front.text.tokenizer import Tokenizer
    from front.wire import ZmqRanks
    from launch.monitor import RankMonitor
    from launch.processes import Children, RuntimeDir

    config = EngineConfig(
        data_parallel_size=ranks, dtype="float32", async_scheduling=False, enable_prefix_caching=False
    )
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)  # where ranks find this file
    plan = make_plan(config)
    tokenizer = Tokenizer(plan.model_path)
    runtime = RuntimeDir(Path(tempfile.gettempdir()))
    with Children() as children:
        wire = ZmqRanks(runtime.front, ranks)
        monitor = RankMonitor(children, plan, runtime, 60.0, "benchmarks.fault_overhead")
        monitor.start()
        front = Front(ranks, tokenizer, num_experts=plan.num_experts, slots_per_rank=plan.slots_per_rank)
        while not front.members.started:
            for message in wire.receive(1.0):
                front.on_message(message)
            if any(isinstance(one, RankLost) for one in monitor.look(children.exited(0.0))):
                raise RuntimeError("a rank did not start")
        mode = os.open(runtime.path / MODE_FILE, os.O_RDONLY | os.O_CREAT)
        monitor_seconds = 0.0
        for number in range(rounds + 1):
            monitor_seconds += _drive(front, wire, monitor, children, mode, number, ranks * sequences)
            paths = [runtime.path / f"blocks-{rank}.json" for rank in range(ranks)]
            results = [_result(path, (number + 1) * NUM_BLOCKS) for path in paths]
        for rank in range(ranks):
            wire.send(rank, Shutdown())
        children.end(5.0)
        wire.close()
    runtime.close()
    return summary(results, monitor_seconds)


def _drive(front: Any, wire: Any, monitor: Any, children: Any, mode: int, number: int, count: int) -> float:
    """One round: `count` sequences from their prompts to their ends. Processor seconds that the monitor took."""
    from front.messages import Outputs
    from front.outputs import Prompt
    from front.params import SamplingParams

    length = FIRST_STEP + BLOCK_STEPS * NUM_BLOCKS + 32
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, seed=0)
    for index in range(count):
        prompt = Prompt(request_id=f"{number}-{index}", token_ids=[5 + index, 7, 11, 13], params=params)
        for rank, message in front.add(prompt):
            wire.send(rank, message)
    deadline, looked, monitor_seconds, served = time.monotonic() + ROUND_SECONDS, 0.0, 0.0, True
    while front.num_requests:
        assert time.monotonic() < deadline, "a round takes too long"
        for message in wire.receive(LOOK_SECONDS):
            work = front.on_message(message)
            assert isinstance(message, Outputs) and not work.messages, message
        if served != (os.pread(mode, 1, 0) != b"B"):
            served = not served
            for sequence in front._sequences.values():
                sequence.token_ids = list(sequence.token_ids) if served else _NoLog(sequence.token_ids)
        if served and time.monotonic() - looked > LOOK_SECONDS:
            looked, began = time.monotonic(), time.thread_time()
            lost = monitor.look(children.exited(0.0))
            monitor_seconds += time.thread_time() - began
            assert not lost, lost
    front.take_finished()
    return monitor_seconds


def _result(path: Path, num_blocks: int) -> dict[str, Any]:
    """Written when the ranks fall asleep after a round; only then the next one may begin, and steps are counted anew."""
    deadline = time.monotonic() + RESULT_SECONDS
    while time.monotonic() < deadline:
        if path.exists() and len((result := json.loads(path.read_text()))["blocks"]) >= num_blocks:
            return dict(result)
        time.sleep(0.1)
    raise RuntimeError(f"{path} does not have {num_blocks} blocks")


def summary(results: list[dict[str, Any]], monitor_seconds: float) -> dict[str, Any]:
    """Blocks come in pairs, next to each other, one of each way."""
    wall, own, bare_cpu, served_own, passed = [], [], [], [], 0.0
    for result in results:
        blocks = result["blocks"][NUM_BLOCKS:]  # the first round warms up
        for first, second in zip(blocks[::2], blocks[1::2], strict=True):
            assert first[0] != second[0]
            served, bare = (first, second) if first[0] else (second, first)
            wall.append(served[1] / bare[1])
            own.append(served[3] - bare[3])
            bare_cpu.append(bare[2])
            served_own.append(served[3])
    passed = results[0]["served_seconds"]
    step = statistics.median(bare_cpu)
    per_step = 100 * statistics.median(own) / step
    monitor = 100 * monitor_seconds / passed
    return {
        "overhead_pct": round(per_step + monitor, 2),
        "per_step_pct": round(per_step, 2),
        "monitor_pct": round(monitor, 3),
        "own_us": round(1e6 * statistics.median(served_own), 1),
        "own_more_us": round(1e6 * statistics.median(own), 1),
        "step_cpu_us": round(1e6 * step),
        "wall_pct": round(100 * (statistics.median(wall) - 1), 2),
        "wall_pct_quartiles": [round(100 * (at - 1), 2) for at in statistics.quantiles(wall, n=4)[::2]],
        "pairs": len(wall),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=8, help="of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.rounds, arguments.sequences, arguments.ranks)))


if __name__ == "__main__":
    rank_main() if "--runtime-dir" in sys.argv else main()
