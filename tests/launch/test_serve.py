"""`moesaic serve` as a user meets it: two expert-parallel ranks, real HTTP, real signals, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from moesaic_here import run_here
from openai import OpenAI
from ports import free_port
from served import Server, command_line, descendants, served, starting, until

from models.tiny import CHECKPOINT

PROMPT = "Once upon a time"


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat_through_the_openai_client_then_drain(tmp_path: Path) -> None:
    """Two ranks answer; SIGTERM lets a running stream finish and ends everything with exit code 0."""
    with served(tmp_path, "--data-parallel-size", "2") as server:
        assert set(server.children()) == {"rank 0", "rank 1", "front"}
        with client(server) as api:
            model = api.models.list().data[0].id
            messages = [{"role": "user", "content": "Tell me a story about a dog."}]
            answer = api.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0.0)
            assert answer.usage is not None and answer.usage.completion_tokens > 0
            text = answer.choices[0].message.content
            pieces = []
            stream = api.chat.completions.create(
                model=model, messages=messages, max_tokens=40, temperature=0.0, stream=True
            )
            for chunk in stream:
                pieces += [choice.delta.content or "" for choice in chunk.choices]
            assert "".join(pieces) == text
            running = api.completions.create(
                model=model,
                prompt=PROMPT,
                max_tokens=200,
                temperature=0.0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            first = next(iter(running))
            assert first.choices
            server.process.send_signal(signal.SIGTERM)
            rest = list(running)
            assert rest[-1].choices[0].finish_reason == "length"
        assert server.wait(30) == 0


def test_a_rank_that_dies_at_the_start_ends_the_server(tmp_path: Path) -> None:
    """Killed before the server is ready: nothing to go on with, so it says what happened and leaves nothing behind."""
    with starting(tmp_path, "--data-parallel-size", "2") as server:
        children = until(lambda: {**server.children()} if len(server.children()) == 3 else None, 20, "all have started")
        os.kill(children["rank 1"], signal.SIGKILL)
        assert server.wait(30) == 3
        log = (tmp_path / "server.log").read_text()
        assert "rank 1 ended before the server was ready: killed by SIGKILL" in log
        nothing_is_left(server, children)


def nothing_is_left(server: Server, children: dict[str, int]) -> None:
    for pid in children.values():
        until(lambda pid=pid: not command_line(pid), 10, "no orphan is left")
    assert not list(server.runtime_root.iterdir()), "the runtime directory was not removed"


def test_a_killed_supervisor_leaves_no_orphan(tmp_path: Path) -> None:
    with served(tmp_path, "--data-parallel-size", "2") as server:
        children = descendants(server.process.pid)
        assert len(children) >= 3
        server.process.kill()
        for pid in children:
            until(lambda pid=pid: not command_line(pid), 10, f"process {pid} has left")


def kv_used(server: Server) -> float:
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith("vllm:kv_cache_usage_perc{")]
    return sum(float(line.split()[-1]) for line in lines)


def running(server: Server) -> float:
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith("vllm:num_requests_running{")]
    return sum(float(line.split()[-1]) for line in lines)


def resident_megabytes(server: Server) -> float:
    total = 0
    for pid in server.children().values():
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1])
    return total / 1024


@pytest.mark.slow
def test_two_hundred_streams(tmp_path: Path) -> None:
    """200 concurrent streams, 50 of them left early: the rest complete, every block comes back, memory returns to its level."""
    arguments = ("--data-parallel-size", "2", "--no-enable-prefix-caching", "--max-num-seqs", "256")
    with served(tmp_path, *arguments) as server, client(server) as api:
        model = api.models.list().data[0].id
        finished: list[str] = []
        failed: list[str] = []

        def one(index: int, leave: bool) -> None:
            try:
                stream = api.completions.create(
                    model=model,
                    prompt=f"{PROMPT} {index}",
                    max_tokens=48,
                    temperature=1.0,
                    seed=index,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                reason = None
                for chunk in stream:
                    reason = chunk.choices[0].finish_reason
                    if leave:
                        stream.close()
                        return
                finished.append(str(reason))
            except Exception as error:
                failed.append(repr(error))

        def wave() -> None:
            threads = [threading.Thread(target=one, args=(index, index % 4 == 3)) for index in range(200)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)

        wave()
        until(lambda: running(server) == 0 and kv_used(server) == 0, 20, "every block is free again")
        level = resident_megabytes(server)
        wave()
        until(lambda: running(server) == 0 and kv_used(server) == 0, 20, "every block is free again")
        assert not failed, failed[:3]
        assert finished == ["length"] * 300
        assert resident_megabytes(server) < level * 1.1 + 20


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    """What cannot be served is refused before any process starts, with the file or field named."""

    def refused(*arguments: str, run: Callable[..., subprocess.CompletedProcess[str]] = run_here) -> str:
        done = run("serve", *arguments)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr.strip().splitlines()[-1]

    def in_a_process(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moesaic", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert "no-such-folder" in refused("no-such-folder", run=in_a_process)
    assert "max_model_len" in refused("--max-model-len", "1000000")
    assert "all2all_backend" in refused("--all2all-backend", "carrier-pigeon")
    assert "kv_cache_memory_bytes 900000000000 in each of 2 rank(s)" in refused("--kv-cache-memory-bytes", "900G")
    assert "data_parallel_size must be at most 62, not 100" in refused("-dp", "100")
    assert "--data-parallel-size must be at least 1, not 0" in refused("-dp", "0")
    assert "moe_backend 'abacus' is unknown" in refused("--moe-backend", "abacus")
    assert "attention_backend 'flashmla' needs a GPU" in refused("--attention-backend", "flashmla")
    folder = tmp_path / "model"
    folder.mkdir()
    assert "config.json" in refused(str(folder))
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["UnheardOfForCausalLM"], "model_type": "unheard"})
    )
    assert "UnheardOfForCausalLM" in refused(str(folder))


def test_a_checkpoint_that_cannot_be_loaded_names_the_key(tmp_path: Path) -> None:
    """Seen only by a rank, when it loads: still one line that says what, and no traceback."""
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_routed_experts": 20}))
    command = [sys.executable, "-m", "moesaic", "serve", str(folder), "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "gate.weight: expected shape [20, 192], got [16, 192]" in done.stderr
