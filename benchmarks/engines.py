"""One engine in a process of its own, driven over pipes: `python benchmarks/engines.py ours|hf --model DIR`.

Reads a JSON line {"prompts": n, "input": tokens, "output": tokens, "seed": s} and answers {"seconds": ...}; the first
line that it writes is {"startup_s": ...}. Parent side: `Engine`. Engines are run in turn, never at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def prompts(case: dict[str, Any], vocabulary: int) -> list[list[int]]:
    """Random ids, another set for each seed, so that no prefix cache helps."""
    rng = random.Random(f"{case['seed']}/{case['prompts']}/{case['input']}")
    return [[rng.randrange(100, vocabulary) for _ in range(case["input"])] for _ in range(case["prompts"])]


class Engine:
    """The parent's end of an engine process."""

    def __init__(
        self,
        kind: str,
        model: str,
        options: list[str],
        python: str = sys.executable,
        script: str = __file__,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """python, script: what runs the engine; environment: added to this process's."""
        command = [python, script, kind, "--model", model, *options]
        pipe = subprocess.PIPE
        env = {**os.environ, **(environment or {})}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        began = time.perf_counter()
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        self._answer()
        self.startup_s = time.perf_counter() - began  # the interpreter and its imports are part of it

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine process ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ours", "hf"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--quantization", choices=["fp8", "int8", "int4", "mxfp4"])
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--sync", action="store_true", help="no asynchronous scheduling")
    arguments = parser.parse_args()
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever libraries print must not get between the answers
    began = time.perf_counter()
    generate, vocabulary, extra = (ours if arguments.kind == "ours" else hf)(arguments)
    print(json.dumps({"startup_s": round(time.perf_counter() - began, 3)}), file=out, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        ids = prompts(case, min(vocabulary, 32000))
        steps = extra()
        began = time.perf_counter()
        produced = generate(ids, case["output"])
        seconds = time.perf_counter() - began
        assert produced == case["prompts"] * case["output"], produced
        answer = {"seconds": seconds, "peak_rss_mb": round(peak_rss_mb()), "steps": extra() - steps}
        print(json.dumps(answer), file=out, flush=True)


def peak_rss_mb() -> float:
    """The most that this process and each of its living children have had, added up."""
    peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) != os.getpid():
                continue
            lines = (stat.parent / "status").read_text().splitlines()
        except OSError:  # it has ended meanwhile
            continue
        peaks += [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return sum(peaks) / 1024


def ours(arguments: argparse.Namespace) -> Any:
    from moesaic import LLM, SamplingParams

    options: dict[str, Any] = {"threads_per_rank": arguments.threads} if arguments.threads else {}
    if arguments.quantization:
        options["quantization"] = arguments.quantization
    if arguments.deterministic:
        options["deterministic"] = True
    if arguments.sync:
        options["async_scheduling"] = False
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        data_parallel_size=arguments.ranks,
        kv_cache_memory_bytes=2 << 30,
        **options,
    )

    def generate(ids: list[list[int]], output: int) -> int:
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        return sum(len(result.outputs[0].token_ids) for result in llm.generate(ids, params))

    return generate, llm.vocab_size, lambda: llm.stats()[0].steps


def hf(arguments: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()

    @torch.inference_mode()
    def generate(ids: list[list[int]], output: int) -> int:
        x = torch.tensor(ids)
        y = model.generate(
            x,
            attention_mask=torch.ones_like(x),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return (y.shape[1] - x.shape[1]) * x.shape[0]

    return generate, model.config.vocab_size, lambda: 0


if __name__ == "__main__":
    main()
