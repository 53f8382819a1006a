"""Classes of logits processors by their names, `module:Class` or `module.Class`. No torch here: what they import is
their own business.

Run as a program it finds out whether a rank's process, which is started in the same way, would have them:
`python -m engine.sampling.processor_names NAME...` says why not on stdout, in one line.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from engine.process.child import child_command

MAX_PROCESSORS = 16
IMPORT_SECONDS = 120.0  # for all of them, torch among what they import


def processor_class(name: str) -> Any:
    """ValueError names the class and says why it cannot be had."""
    module, _, path = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        if not module or not path:
            raise ValueError("it must be module:Class or module.Class")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        if not isinstance(found, type) or not callable(getattr(found, "new_req_logits_processor", None)):
            raise TypeError("it must be a class with a method new_req_logits_processor")
    except (Exception, SystemExit) as error:
        raise ValueError(f"logits_processors {name!r:.200}: {described(error)}") from None
    return found


def described(error: BaseException) -> str:
    """In one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def check_processors(names: Sequence[str], here: bool) -> None:
    """ValueError for the first that the ranks could not import. here: the rank runs in this process; else a process is
    started as theirs are, so that neither the front nor its parent runs code of others."""
    if len(names) > MAX_PROCESSORS:
        raise ValueError(f"logits_processors must be at most {MAX_PROCESSORS} classes, not {len(names)}")
    if here:
        for name in names:
            processor_class(name)
        return
    command = child_command("engine.sampling.processor_names", names)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="replace", timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(f"logits_processors: not imported within {IMPORT_SECONDS:g} s") from None
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:] or [
            f"logits_processors: their import ended with {done.returncode}"
        ]
        raise ValueError(last[0])


def main(words: Sequence[str]) -> int:
    """words: names, then --parent and its process id."""
    try:
        for name in words[: words.index("--parent")]:
            processor_class(name)
    except ValueError as error:
        print(error, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
