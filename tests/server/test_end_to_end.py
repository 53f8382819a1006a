"""The front and two real expert-parallel ranks of the embedded model, processes each, through the openai client."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import structs
from openai import OpenAI
from ports import free_port

from configs.engine import EngineConfig
from configs.env import child_environment
from configs.server import ServerConfig
from engine.plan import make_plan

STARTUP = 120.0  # seconds; generous, because the machine may be shared
MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a dog."}]


@contextlib.contextmanager
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[subprocess.Popen[bytes]], str]]:
    """The front, the ranks and the address. Processes are started by hand: no supervisor here."""
    port = free_port()
    plan = make_plan(EngineConfig(data_parallel_size=2, served_model_name=("tiny",)))
    plan = structs.replace(plan, weight_store=False)  # the supervisor would hold it
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    (tmp_path / "server.json").write_bytes(msgspec.json.encode(ServerConfig(port=port)))
    common = ["--plan", str(tmp_path / "plan.json"), "--runtime-dir", str(tmp_path), "--parent", str(os.getpid())]
    with (tmp_path / "log").open("wb") as log:

        def start(module: str, *options: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", module, *common, *options]
            return subprocess.Popen(command, stdout=log, stderr=log, env=child_environment(1))

        front = start("server.process", "--server", str(tmp_path / "server.json"))
        ranks = [start("engine.process.rank_process", "--rank", str(rank)) for rank in range(2)]
        everybody = [front, *ranks]
        try:
            deadline = time.monotonic() + STARTUP
            while not (tmp_path / "ready").exists():
                left = [process.args for process in everybody if process.poll() is not None]
                assert not left and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.02)
            yield front, ranks, f"http://127.0.0.1:{port}"
        finally:
            for process in everybody:
                if process.poll() is None:
                    process.kill()
                process.wait()


@pytest.mark.slow
def test_two_ranks_answer_and_leave(tmp_path: Path) -> None:
    with running(tmp_path) as (front, ranks, url):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            assert [model.id for model in api.models.list().data] == ["tiny"]
            whole = api.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, temperature=0.0)
            assert whole.usage is not None and 0 < whole.usage.completion_tokens <= 24
            stream = api.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=24, temperature=0.0, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
            assert "".join(pieces) == whole.choices[0].message.content
            scored = api.completions.create(
                model="tiny", prompt=["Once upon a time", "The dog"], n=2, max_tokens=8, temperature=0.0, logprobs=2,
                echo=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert len(scored.choices) == 4 and scored.choices[0].text == scored.choices[1].text
            assert scored.choices[0].text.startswith("Once upon a time")
            logprobs = scored.choices[0].logprobs
            assert logprobs is not None and logprobs.token_logprobs is not None
            assert all(value <= 0 for value in logprobs.token_logprobs[1:])
        metrics = httpx.get(f"{url}/metrics").text
        assert 'vllm:generation_tokens_total{engine="0"' in metrics and 'engine="1"' in metrics
        front.send_signal(signal.SIGTERM)
        assert front.wait(30.0) == 0, (tmp_path / "log").read_text()
        assert [rank.wait(30.0) for rank in ranks] == [0, 0], (tmp_path / "log").read_text()
