"""Clients that people use, from the registries, against a server with the embedded model: a round trip with a tool and
one with a JSON schema each. Each lives in a directory of its own (make clients)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ports import free_port

from configs.env import child_environment

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv" / "clients"
SCRIPTS = Path(__file__).parent / "scripts"
STARTUP = 180.0  # seconds; generous, because the machine may be shared
PATIENCE = 300.0

pytestmark = [pytest.mark.clients, pytest.mark.slow]
PACKAGES = {"agents": "openai-agents", "langchain": "langchain-openai", "pydantic_ai": "pydantic-ai-slim"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "moesaic", "serve", "--data-parallel-size", "1", "--port", str(port)]
    command += ["--served-model-name", "tiny"]
    address = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=child_environment(1), cwd=ROOT)
        try:
            deadline = time.monotonic() + STARTUP
            while True:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{address}/ready").status_code == 200:
                        break
                time.sleep(0.05)
            yield address
        finally:
            process.terminate()
            process.wait(60.0)


@pytest.mark.parametrize(
    "client", ["openai", "anthropic", "agents", "instructor", "litellm", "langchain", "pydantic_ai"]
)
def test_a_client(url: str, client: str) -> None:
    packages = CLIENTS / PACKAGES.get(client, client)
    if not packages.exists():
        pytest.skip(f"needs {packages.name}, which is installed by: make clients")
    run([str(CLIENTS / "bin" / "python"), str(SCRIPTS / f"client_{client}.py"), url, "tiny"], PYTHONPATH=str(packages))


def test_node(url: str, tmp_path: Path) -> None:
    node, modules = shutil.which("node"), CLIENTS / "node" / "node_modules"
    if node is None or not modules.exists():
        pytest.skip("needs node and its openai package: make clients")
    (tmp_path / "node_modules").symlink_to(modules)
    script = tmp_path / "client.mjs"
    script.write_text((SCRIPTS / "client_node.mjs").read_text())
    run([node, "--preserve-symlinks", str(script), url, "tiny"])


def run(command: list[str], **more: str) -> None:
    environment = {**os.environ, "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True", **more}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
