"""A directory that stands for a GGUF file: everything that is read of a model lies in it, made once; the weights are
read where they are."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

from layers.gguf.header import GgufHeader, read_header
from layers.identity import GGUF_INDEX, CheckpointError
from models.gguf.config import Metadata, config_json
from models.gguf.names import places
from models.gguf.tokenizer import tokenizer_files

_WRITER = 1  # of what is made of a file
_ROPE_FACTORS = "rope_freqs.weight"
SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def model_directory(path: Path, root: Path) -> Path:
    """Of this file; under `root`, if it is not there yet. Raises CheckpointError or ConfigError: one line with the
    file, and what is wrong."""
    path = path.resolve()
    said = path.stat()
    key = f"{_WRITER} {path} {said.st_size} {said.st_mtime_ns}"
    directory = root / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if (directory / GGUF_INDEX).is_file():
        return directory
    files = _files(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            for name, content in files.items():
                (made / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
            (made / path.name).symlink_to(path)
            _put(made, directory)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error.strerror}") from None
    return directory


def _put(made: Path, directory: Path) -> None:
    """Another process may have made the same meanwhile."""
    try:
        os.rename(made, directory)
    except OSError:
        if not (directory / GGUF_INDEX).is_file():
            raise


def _files(path: Path) -> dict[str, dict[str, Any]]:
    """By name, what is written."""
    header = read_header(path)
    meta = Metadata(header.metadata, str(path))
    if "split.count" in header.metadata and header.metadata["split.count"] != 1:
        raise meta.error("split.count", "1: a model in several GGUF files is not read")
    config = config_json(header, meta, _rope_factors(path, header))
    paired = {}
    if meta.architecture == "llama":
        paired = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = places(header.tensors, paired, str(path))
    index = {"file": path.name, "tensors": tensors}
    return {"config.json": config, **tokenizer_files(meta), GGUF_INDEX: index}


def _rope_factors(path: Path, header: GgufHeader) -> list[float] | None:
    tensor = header.tensors.get(_ROPE_FACTORS)
    if tensor is None or tensor.kind != "F32":
        return None
    with path.open("rb") as file:
        file.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))
