"""What was measured, kept on disk from one start to the next: a JSON file per kind of engine (docs/dbo.md)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dbo.threshold import Crossover, Sample

FORMAT = 1

Key = Mapping[str, str | int]


class Remembered(NamedTuple):
    """The crossover and the samples that it comes from, of both kinds of steps."""

    crossover: Crossover
    decode: Sequence[Sample]
    prefill: Sequence[Sample]

    @property
    def check(self) -> Sample | None:
        """The cheapest sample of a step with prompts: whether it still holds is soon found out. None: there is none."""
        return min(self.prefill, default=None, key=lambda sample: sample.tokens)


def file_of(folder: Path, key: Key, name: str = "dbo") -> Path:
    """Where an engine of this key remembers what `name` says."""
    digest = hashlib.sha256(json.dumps([FORMAT, sorted(key.items())]).encode()).hexdigest()
    return folder / f"{name}-{digest[:16]}.json"


def recall(file: Path) -> Remembered | None:
    """None when there is nothing, or nothing that can be read."""
    values = read_json(file)
    try:
        decode, prefill = ([Sample(*sample) for sample in values[name]] for name in ("decode", "prefill"))
        crossover = Crossover(*values["crossover"])
    except (ValueError, TypeError, KeyError):
        return None
    return Remembered(crossover, decode, prefill) if _holds(crossover, [*decode, *prefill]) else None


def remember(file: Path, remembered: Remembered) -> None:
    """Another process finds the old file or the new one, never a part. Raises OSError."""
    write_json(file, remembered._asdict())


def read_json(file: Path) -> Any:
    """None when there is nothing, or nothing that can be read."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_json(file: Path, values: Any) -> None:
    """As `remember`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "w") as out:
            json.dump(values, out)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _holds(crossover: Sequence[Any], samples: Sequence[Sequence[Any]]) -> bool:
    counts = [*crossover, *(sample[0] for sample in samples)]
    times = [value for sample in samples for value in sample[1:]]
    return all(type(count) is int and count > 0 for count in counts) and all(
        type(value) is float and 0 <= value < 1e6 for value in times
    )
