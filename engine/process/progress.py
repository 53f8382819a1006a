"""How far the weights are: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import time
from typing import Any, TextIO

LINE_SECONDS = 2.0  # at most one plain line in this time


class LoadProgress:
    """Call it with (bytes done, bytes in all). Models that load in a moment print nothing but the last line."""

    def __init__(self, label: str, stream: TextIO, leads: bool = True) -> None:
        """leads: this one shows how far it is; the others only say what they have read in the end."""
        self._label = label
        self._stream = stream
        self._leads = leads
        self._began = self._last = time.monotonic()
        self._total = 0
        # Where nobody looks at a bar, its library is not imported.
        bars = importlib.import_module("engine.process.progress_bar") if leads and stream.isatty() else None
        self._bar: Any = None if bars is None else bars.Bar(label, stream)

    def __call__(self, bytes_done: int, bytes_total: int) -> None:
        self._total = bytes_total
        if self._bar is not None:
            self._bar.update(bytes_done, bytes_total)
        elif self._leads and time.monotonic() - self._last > LINE_SECONDS:
            self._last = time.monotonic()
            left = (self._last - self._began) * (bytes_total / max(bytes_done, 1) - 1)
            self._say(f"weights: {bytes_done / 1e9:.1f} of {bytes_total / 1e9:.1f} GB, {left:.0f} s left")

    def finish(self, bytes_read: int) -> None:
        """bytes_read: what this rank really read; other ranks' experts are skipped without reading them."""
        if self._bar is not None:
            self._bar.stop()
        seconds = time.monotonic() - self._began
        self._say(f"read {bytes_read / 1e6:.1f} of {self._total / 1e6:.1f} MB of weights in {seconds:.1f} s")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream may be the caller's own, and closed
            print(f"{self._label}: {text}", file=self._stream, flush=True)
