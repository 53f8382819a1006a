"""Modules that are imported when something is first taken of them (engine/process/deferred.py), and those of torch that
ranks do without (engine/process/torch_ahead.py). Each program has a process of its own, as its imports stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TORCH = """
import sys
from engine.process.deferred import load_deferred
from engine.process.torch_ahead import OF_OTHERS, defer_modules, deferred_modules, load_libraries
defer_modules()
load_libraries()
import torch
from engine.process.rank_process import import_loop
import_loop("Qwen3MoeForCausalLM")
import inspect
inspect.getmodule(torch.Tensor.add, "?")  # looks through all modules
met = [name for name in deferred_modules() if name in sys.modules]
assert len(met) > 25 or met == [*deferred_modules()]
assert not [name for name in met if type(sys.modules[name]).__name__ != "_Deferred"]
there = {name for name in OF_OTHERS if type(sys.modules[name]).__name__ != "_Deferred"}
assert there == {"numpy", "numpy._core", "zmq"}, there
assert torch.empty(2, 3, device="meta").view(3, 2).shape == (3, 2)
weight = torch.nn.Parameter(torch.ones(2, 3))
assert torch.nn.functional.linear(torch.nn.functional.pad(torch.ones(1, 2), (0, 1)), weight).tolist() == [[2, 2]]
assert len(torch.nn.ModuleList([torch.nn.Module()])) == 1
assert [type(sys.modules[name]).__name__ for name in met] == ["_Deferred"] * len(met)
"""
LATER = """
assert type(sys.modules["torch.distributed"]).__name__ == "_Deferred"
assert torch.distributed.PrefixStore("name", torch.distributed.HashStore()) is not None
assert [type(sys.modules[name]).__name__ for name in met] == ["_Deferred"] * len(met)
module = torch.nn.Linear(3, 2)
assert module(torch.ones(1, 3)).shape == (1, 2) and type(sys.modules["torch.nn"]) is type(sys)
assert module(torch.ones(1, 3)).sum().backward() is None and module.weight.grad is not None
deferred = sys.modules["torch._meta_registrations"]
assert callable(deferred.register_meta)
assert type(deferred) is type(sys) and torch._meta_registrations is deferred and "torch._prims" in sys.modules
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
assert torch.vmap(lambda x: 2 * x)(torch.ones(2)).tolist() == [2, 2]
assert torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, [torch.ones(2)]).tolist() == [2, 2]
with torch._subclasses.FakeTensorMode():
    assert (torch.ones(2, 3) @ torch.ones(3, 4)).shape == (2, 4)
assert torch.distributions.Normal(0.0, 1.0).mean == 0 and torch.optim.SGD(module.parameters()) is not None
assert torch.export.export(module, (torch.ones(1, 3),)) is not None
try:
    deferred.nothing
except AttributeError:
    load_deferred()
    assert not [name for name in deferred_modules() if type(sys.modules.get(name)).__name__ == "_Deferred"]
    print("good")
"""
EACH = """
import os
for name in met:  # whichever is asked for first
    child = os.fork()
    if not child:
        try:
            sys.modules[name].any
        except AttributeError:
            load_deferred()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, name
print("good")
"""


def run(program: str, *folders: Path) -> None:
    """It prints "good"."""
    program = "\n".join([f"import sys; sys.path.insert(0, {str(folder)!r})" for folder in folders]) + "\n" + program
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "good", done.stderr


def test_what_a_rank_imports_leaves_them_out_and_they_are_there_when_asked_for() -> None:
    run(TORCH + LATER)


def test_what_needs_no_torch_comes_beside_its_libraries_behind_others() -> None:
    """All of it: a name that cannot be imported there would keep those behind it away, and nobody would be told."""
    run(
        """
import os, sys, threading
from engine.process.torch_ahead import MODULES, defer_modules, import_beside
defer_modules()
before, threads = os.getpriority(os.PRIO_PROCESS, 0), []
import_beside(lambda: threads.append((os.getpriority(os.PRIO_PROCESS, 0), threading.get_native_id())))
assert threads[0][0] == min(before + 10, 19) and os.getpriority(os.PRIO_PROCESS, 0) == before  # the thread's alone
assert threads[0][1] != threading.get_native_id() and "torch" not in sys.modules
assert not [name for name in MODULES if name not in sys.modules]
import numpy, torch
assert torch.from_numpy(numpy.ones(2)).sum().item() == 2 and numpy.linalg.inv(numpy.eye(1)).tolist() == [[1]]
print("good")
"""
    )


@pytest.mark.slow
def test_any_of_them_may_be_the_first_that_is_asked_for() -> None:
    run(TORCH + EACH)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """`thing` with a module `thing.part`; both say when they are imported."""
    folder = tmp_path / "thing"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "said = []\nsaid.append('thing')\nnumber = 7\ndef twice(x): return 2 * x\nfrom thing import own\n"
    )
    (folder / "own.py").write_text("import thing\nthing.said.append('own')\n")
    (folder / "part.py").write_text("import thing\nthing.said.append('part')\nvalue = thing.number + 1\n")
    (folder / "inner").mkdir()
    (folder / "inner" / "__init__.py").write_text("from thing import number, said\nsaid.append('inner')\n")
    return tmp_path


def test_a_module_of_a_deferred_package_imports_the_package(package: Path) -> None:
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing"]))
import thing
assert "number" not in vars(thing)
import thing.part
assert thing.said == ["thing", "own", "part"] and thing.part.value == 8
print("good")
""",
        package,
    )


def test_one_that_the_package_imports_is_imported_once(package: Path) -> None:
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing"]))
import thing
from thing.own import thing as same
import sys
assert thing.said == ["thing", "own"] and same is thing and thing.own is sys.modules["thing.own"]
assert thing.own.__spec__.origin.endswith("own.py")
print("good")
""",
        package,
    )


def test_deferred_modules_of_a_deferred_package_wait_with_it(package: Path) -> None:
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing", "thing.inner"]))
import thing.inner
assert "number" not in vars(thing) and "number" not in vars(thing.inner)
assert thing.inner.number == 7 and thing.said == ["thing", "own", "inner"]
print("good")
""",
        package,
    )


def test_a_function_that_is_only_taken_imports_nothing(package: Path) -> None:
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing"], {"thing": ["twice"]}))
from thing import twice
import thing
assert "number" not in vars(thing) and twice.__name__ == "twice"
assert twice(3) == 6 and thing.number == 7 and twice(4) == 8 and thing.twice is not twice
print("good")
""",
        package,
    )


def test_all_names_at_once_are_all_names(package: Path) -> None:
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing"]))
from thing import *
assert number == 7
print("good")
""",
        package,
    )


def test_without_an_order_one_is_imported_alone(package: Path) -> None:
    (package / "other.py").write_text("import thing\nvalue = 1\ndef half(x): return x // 2\n")
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing"]))
defer(Deferral(["other", "thing.part"], {"other": ["half"]}, in_order=False))
import thing
import thing.part
from other import half
import other
assert half(4) == 2 and half(6) == 3 and other.value == 1
assert "number" not in vars(thing) and "value" not in vars(thing.part)
assert thing.part.value == 8 and thing.said == ["thing", "own", "part"]
print("good")
""",
        package,
    )


def test_a_module_that_needs_nothing_of_its_package_comes_without_it(package: Path) -> None:
    (package / "thing" / "lone.py").write_text("value = 3\n")
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing"], alone=("thing.lo",)))
from thing.lone import value
import thing
assert value == 3 and "number" not in vars(thing)
import thing.part
assert thing.said == ["thing", "own", "part"] and thing.lone.value == 3
print("good")
""",
        package,
    )


def test_what_is_told_a_module_is_kept_until_it_is_there(package: Path) -> None:
    (package / "told.py").write_text("heard = []\ndef tell(*words): heard.append(words)\n")
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["told"], kept={"told": ["tell"]}))
import told
tell = told.tell
assert tell(1, 2) is None and told.tell(3) is None and "heard" not in vars(told)
assert told.heard == [(1, 2), (3,)]
tell(4)
told.tell(5)
assert told.heard == [(1, 2), (3,), (4,), (5,)]
print("good")
""",
        package,
    )


def test_answers_hold_before_and_after_a_module_is_there(package: Path) -> None:
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing"], answers={"thing": {"twice": 0}}))
import thing
assert thing.twice() == 0 and "number" not in vars(thing)
assert thing.number == 7 and thing.twice() == 0
print("good")
""",
        package,
    )


def test_what_a_module_has_from_another_is_taken_there(package: Path) -> None:
    (package / "other.py").write_text("from thing.own import same\nnumber = 8\n")
    (package / "thing" / "own.py").write_text("same = 5\n")
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["other", "thing"], passed_on={"other": {"same": "thing.own"}}, alone=("thing.own",)))
import other
import thing
assert other.same == 5 and "number" not in vars(other) and "number" not in vars(thing)
assert vars(other)["same"] == 5  # not looked for again
assert other.number == 8 and other.same == 5
print("good")
""",
        package,
    )


def test_a_deferred_module_is_an_attribute_of_its_deferred_package(package: Path) -> None:
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing", "thing.inner"]))
import thing
inner = thing.inner
assert "number" not in vars(thing) and "number" not in vars(inner)
assert inner.number == 7 and thing.inner is inner and thing.said == ["thing", "own", "inner"]
print("good")
""",
        package,
    )


def test_what_a_module_asks_for_while_it_is_imported_comes_as_without_deferring(package: Path) -> None:
    (package / "first.py").write_text("raise AssertionError('nobody asks for it')\n")
    (package / "thing" / "part.py").write_text("from thing import twice\nvalue = twice(4)\n")
    (package / "thing" / "__init__.py").write_text("def twice(x): return 2 * x\nfrom thing.part import value\n")
    run(
        """
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing", "thing.part", "first"]))
import thing
import first
import thing.part
assert thing.value == 8
print("good")
""",
        package,
    )


def test_threads_import_it_once(package: Path) -> None:
    run(
        """
import threading
from engine.process.deferred import Deferral, defer
defer(Deferral(["thing"]))
import thing
together, seen = threading.Barrier(8), []
def ask():
    together.wait()
    seen.append(thing.number)
threads = [threading.Thread(target=ask) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert seen == [7] * 8 and thing.said == ["thing", "own"]
print("good")
""",
        package,
    )
