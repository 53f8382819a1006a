"""engine/process/orphan.py: a child does not outlive its parent, however that ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

CHILD = "import os, time; from engine.process.orphan import die_with_parent; die_with_parent({parent}); print(os.getpid(), flush=True); time.sleep(60)"
PARENT = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}.format(parent=os.getpid())])
time.sleep(60)
"""


def test_a_killed_parent_takes_its_child_along() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    assert not select.select([child], [], [], 0)[0]
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert select.select([child], [], [], 10.0)[0], "the child is still there"
    os.close(child)


def test_a_parent_that_has_already_gone_is_noticed() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD.format(parent=1)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and not done.stderr and not done.stdout
