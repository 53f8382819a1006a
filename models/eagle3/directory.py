"""A directory that stands for a model and the EAGLE-3 drafter that is served with it: links to the files of both, and a
config.json with a section for the drafter. So all that is read of a model, and known of its files, is of both."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from layers.identity import DRAFTER_FILES, CheckpointError
from layers.safetensors_sizes import tensor_sizes
from models.eagle3.config import SECTION
from models.fields import Fields
from models.made_directory import made_directory

_CONFIG = "config.json"


def model_directory(model: Path, drafter: Path, root: Path) -> Path:
    """Of these two directories; under `root`, if it is not there yet. Raises ConfigError or CheckpointError, one line,
    where one of them has no config.json, or the drafter no weights in safetensors files."""
    config = with_section(Fields.from_file(model / _CONFIG).raw, drafter)
    files = sorted(file.absolute() for file in model.iterdir() if file.is_file())
    drafts = sorted(file.absolute() for file in drafter.glob("*.safetensors"))
    key = json.dumps([config, *((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files + drafts)])
    directory = root / f"{model.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def fill(made: Path) -> None:
        for file in files:
            if file.name != _CONFIG:
                (made / file.name).symlink_to(file)
        for file in drafts:
            (made / f"{DRAFTER_FILES}{file.name}").symlink_to(file)
        (made / _CONFIG).write_text(json.dumps(config), encoding="utf-8")

    return made_directory(directory, _CONFIG, fill)


def with_section(config: dict[str, Any], drafter: Path) -> dict[str, Any]:
    """The fields of a model's config.json, and what is said of the drafter in this directory. Raises as
    `model_directory`."""
    drafts = Fields.from_file(drafter / _CONFIG).raw
    tensors = [key for key, _, _ in _tensors(drafter)]
    if not tensors:
        raise CheckpointError(f"{drafter}: no *.safetensors file in this directory, which is to have a drafter")
    return {**config, SECTION: {"config": drafts, "tensors": tensors}}


def weight_bytes(drafter: Path) -> int:
    """Of its files."""
    return sum(size for _, _, size in _tensors(drafter))


def _tensors(drafter: Path) -> list[tuple[str, str, int]]:
    return [tensor for file in sorted(drafter.glob("*.safetensors")) for tensor in tensor_sizes(file)]
