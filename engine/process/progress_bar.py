"""A bar on a terminal that tells how much is done, how fast, and the seconds left."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class _Visible(Console):
    """The terminal's cursor stays: a process that is ended at once, as by Ctrl-C, could not bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Bar:
    """It is gone when it is stopped."""

    def __init__(self, label: str, stream: TextIO) -> None:
        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=_Visible(file=stream), transient=True)
        self._task = self._progress.add_task("weights", total=None)
        self._progress.start()

    def update(self, bytes_done: int, bytes_total: int) -> None:
        self._progress.update(self._task, completed=bytes_done, total=bytes_total)

    def stop(self) -> None:
        self._progress.stop()
