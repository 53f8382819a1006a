"""`moesaic.LLM` of one rank in a process of its own: as scripts call it that have not imported torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.tiny import CHECKPOINT
from moesaic import LLM

HEAD = """
import gc, os, pathlib, signal, sys, threading, time
from moesaic import LLM, SamplingParams

def children():  # of all threads
    return {pid for path in pathlib.Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}

def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def tokens(llm):
    return llm.generate("Once upon a time", SamplingParams(max_tokens=12, temperature=0.0))[0].outputs[0].token_ids
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HEAD + script], capture_output=True, text=True, timeout=120)


def test_a_script_that_is_plain() -> None:
    """Without `if __name__ == "__main__"`. A rank that is killed is started again, and nothing is left of one that is
    no longer wanted, whether it was closed or not."""
    done = run("""
llm = LLM()
assert len(children()) == 1 and "torch" not in sys.modules, children()
expected = tokens(llm)
(first,) = children()
os.kill(int(first), signal.SIGKILL)
assert tokens(llm) == expected and first not in children()
del llm
gc.collect()
assert not children()
print("done")
""")
    assert done.stdout == "done\n", done.stderr


def test_threads_come_and_go() -> None:
    """The thread that made it has ended. A rank that is started again does not end with the thread that found its
    process lost either."""
    done = run("""
def in_thread(function):
    made = []
    thread = threading.Thread(target=lambda: made.append(function()))
    thread.start()
    thread.join()
    return made[0]

llm = in_thread(LLM)
expected = tokens(llm)
(first,) = children()
os.kill(int(first), signal.SIGKILL)
assert in_thread(lambda: tokens(llm)) == expected
wait_for(lambda: children() and first not in children())
(second,) = children()
assert tokens(llm) == expected and children() == {second}
print("done")
""")
    assert done.stdout == "done\n", done.stderr


def test_bad_input_is_a_value_error(tmp_path: Path) -> None:
    """Also what the rank alone finds."""
    model = shutil.copytree(CHECKPOINT, tmp_path / "model")
    (weights,) = model.glob("*.safetensors")
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes().replace(b"model.layers.1.self_attn.q_", b"model.layers.1.self_attn.no"))
    done = run(f"""
for model in ("/no/such/model", {str(model)!r}):
    try:
        LLM(model)
    except ValueError as error:
        print(error)
    assert not children()
""")
    assert "/no/such/model" in done.stdout and "missing key model.layers.1.self_attn" in done.stdout, done


def test_in_this_process_where_torch_is() -> None:
    before = children()
    with LLM() as llm:
        assert llm.vocab_size and children() == before
    with pytest.raises(ValueError, match="in_process is for one rank, not for data_parallel_size 2"):
        LLM(data_parallel_size=2, in_process=True)


def children() -> str:
    return Path("/proc/thread-self/children").read_text()
