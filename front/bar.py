"""A bar on standard error that tells how many prompts are done, and how fast; it stays when they all are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from front.outputs import Progress


@contextlib.contextmanager
def drawn(num_prompts: int) -> Iterator[Callable[[Progress], None]]:
    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    began = time.monotonic()
    with ProgressBar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=num_prompts, speed="")

        def draw(now: Progress) -> None:
            speed = now.num_output_tokens / (time.monotonic() - began)
            bar.update(task, completed=now.num_finished, speed=f"{speed:.0f} tokens/s")

        yield draw
