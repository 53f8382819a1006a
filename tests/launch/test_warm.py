"""No rank says that it is ready before it is warm: requests of every kind import nothing, whether it started with the others, came back
or was added."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from served import Server, served, until
from streams import mode

# Python runs this first in every process of the server that is not forked from another, and each writes down what it
# imports.
SITECUSTOMIZE = """
import os, sys
def _note(event, arguments):
    if event == "import":
        log = os.open(os.environ["IMPORTS"] + f"/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, f"{arguments[0]}\\n".encode())
        os.close(log)
sys.addaudithook(_note)
"""
GRAMMARS = ("llguidance", "tokenizers")
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 7, "min_p": 0.01},
    {"temperature": 0.9, "seed": 5, "logprobs": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {"7": 2.0}, "repetition_penalty": 1.1, "min_tokens": 4, "n": 2},
    {"temperature": 0.0, "prompt_logprobs": 2, "bad_words": ["tree"], "stop": ["\n\n"]},
]


def ask_everything(server: Server) -> None:
    for kind in KINDS:
        for number in range(4):  # until each rank has had one of them
            body = {"prompt": f"{number} foxes", "max_tokens": 6, **kind}
            assert server.post("/v1/completions", body)["choices"]


def imported(folder: Path, server: Server) -> dict[str, list[str]]:
    """By rank, what its process has imported so far, since it was forked if it was. Not what reads the vocabulary that
    grammars need, which a rank does when it has no work."""
    ranks = {name: folder / str(pid) for name, pid in server.children().items() if name.startswith("rank")}
    modules = {name: path.read_text().split() if path.exists() else [] for name, path in ranks.items()}
    return {name: [one for one in names if one.split(".")[0] not in GRAMMARS] for name, names in modules.items()}


@pytest.mark.attacks
@pytest.mark.slow
def test_nothing_is_imported_by_a_rank_that_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (tmp_path / "imports").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("IMPORTS", str(tmp_path / "imports"))
    with served(tmp_path, "-dp", "2", "--admin-api-key", "key") as server:

        def check(num_ranks: int) -> None:
            before = imported(tmp_path / "imports", server)
            ask_everything(server)
            after = imported(tmp_path / "imports", server)
            assert len(before) == num_ranks
            more = {name: modules[len(before[name]) :] for name, modules in after.items()}
            assert more == {name: [] for name in before}

        check(2)
        os.kill(server.children()["rank 1"], signal.SIGKILL)
        until(lambda: mode(server) == "degraded", 10, "the loss is known")
        until(lambda: mode(server) == "full", 60, "the rank is back")
        check(2)
        server.post("/admin/ranks", {"count": 3}, key="key")
        until(lambda: server.get("/ready")["ranks"] == ["up"] * 3, 60, "the new rank serves")
        check(3)
