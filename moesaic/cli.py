"""`moesaic`: each command's module is imported only when that command runs, so that --help answers at once."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from types import FrameType

import click

from configs.env import forget_no_columns
from engine.process.console import drain_console, say_line, say_text
from moesaic.lazy import LazyGroup

COMMANDS = {
    "serve": ("moesaic.serve", "Serve a model over HTTP (OpenAI-compatible)."),
    "node": ("moesaic.node", "Keep `serve` running on one node of a launch."),
    "launch": ("moesaic.launch", "Start a server on several nodes by Slurm, Kubernetes, Ray, torchrun, ssh, ..."),
    "doctor": ("moesaic.doctor", "Find what is wrong with a machine, or between those of a launch."),
    "generate": ("moesaic.generate", "Continue prompts on this machine and print the text."),
    "chat": ("moesaic.chat", "Talk to a running server in the terminal."),
    "ranks": ("moesaic.ranks", "Show the ranks of a running server; grow or shrink it."),
    "bench": ("moesaic.bench", "Measure throughput, latency, or a running server."),
    "eplb": ("moesaic.eplb", "See, plan, replay and check where experts live."),
    "explain": ("moesaic.explain", "Print the plan for a model, with the reason for every choice."),
}


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # for what is printed


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moesaic")
def cli() -> None:
    """Moesaic: an inference engine for mixture-of-experts language models."""


def main() -> None:
    """Bad input is one line on stderr and exit code 2; a traceback means a bug. A signal, one line and 128 and its
    number."""
    stopped_by = signal.SIGINT

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_by
        stopped_by = signal.Signals(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    forget_no_columns()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # texts of models have characters that a terminal may lack
    try:
        code = cli.main(prog_name="moesaic", standalone_mode=False) or 0
        sys.stdout.flush()
        sys.exit(code)
    except (KeyboardInterrupt, click.Abort):
        say_text(f"ended by {stopped_by.name}")
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        drain_console()
        # Where the exception came through code of a string (a dataclass, while modules are imported), Python would end
        # by SIGINT in the place of sys.exit's code.
        os._exit(128 + stopped_by)
    except BrokenPipeError:  # what reads our output has ended, as `head` does: no error of ours
        _say_no_more()
        sys.exit(1)  # as click does
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _say_no_more()
        say_line(f"moesaic: error: {error.filename or 'what is printed'}: {error.strerror}")
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ValueError as error:
        say_line(f"moesaic: error: {error}")
        sys.exit(2)


def _say_no_more() -> None:
    """What is still to be written to stdout goes nowhere, also at the end of the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
