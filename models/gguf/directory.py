"""A directory that stands for a GGUF file, or for all parts of one: everything that is read of a model lies in it, made
once; the weights are read where they are.

Parts have the names that llama.cpp's gguf-split gives them (`_PART`); the first has the model's metadata, each has
`split.no`, from 0, and `split.count`.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layers.gguf.header import GgufHeader, GgufTensor, read_header
from layers.identity import GGUF_INDEX, CheckpointError
from models.fields import ConfigError
from models.gguf.config import Metadata, config_json
from models.gguf.names import places
from models.gguf.tokenizer import tokenizer_files
from models.made_directory import made_directory

_WRITER = 2  # of what is made of a file
_ROPE_FACTORS = "rope_freqs.weight"
SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    """Also of the name of a part that is missing, where others are there."""
    return path.suffix == SUFFIX and any(part.is_file() for part in _parts(path))


def _parts(path: Path) -> list[Path]:
    """All parts of the file that this is one of, the first one first. The name counts, and what it links to where the
    name is no part's."""
    for named in (path.absolute(), path.resolve()):
        matched = _PART.fullmatch(named.name)
        if matched is not None and 1 <= int(matched[2]) <= int(matched[3]):
            names = (f"{matched[1]}-{number:05d}-of-{matched[3]}{SUFFIX}" for number in range(1, int(matched[3]) + 1))
            return [named.with_name(name) for name in names]
    return [path.absolute()]


def model_directory(path: Path, root: Path) -> Path:
    """Of this file, or of all parts of the one that it is a part of; under `root`, if it is not there yet. Raises
    CheckpointError or ConfigError: one line with the file, and what is wrong."""
    parts = _parts(path)
    key = " ".join((str(_WRITER), *(_identity(part, number, len(parts)) for number, part in enumerate(parts))))
    directory = root / f"{parts[0].stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def fill(made: Path) -> None:
        for name, content in _files(parts).items():
            (made / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for part in parts:
            (made / part.name).symlink_to(part.resolve())

    return made_directory(directory, GGUF_INDEX, fill)


def _identity(part: Path, number: int, count: int) -> str:
    try:
        said = part.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{part}: missing: part {number + 1} of {count} of this model") from None
    except OSError as error:
        raise CheckpointError(f"{part}: cannot be read: {error.strerror}") from None
    return f"{part.resolve()} {said.st_size} {said.st_mtime_ns}"


def _files(parts: list[Path]) -> dict[str, dict[str, Any]]:
    """By name, what is written."""
    headers = {part: read_header(part) for part in parts}
    whole = _joined(headers)
    meta = Metadata(whole.metadata, str(parts[0]))
    config = config_json(whole, meta, _rope_factors(headers))
    paired = {}
    if meta.architecture == "llama":
        paired = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    index = {"files": {part.name: places(header.tensors, paired, str(part)) for part, header in headers.items()}}
    return {"config.json": config, **tokenizer_files(meta), GGUF_INDEX: index}


def _joined(headers: Mapping[Path, GgufHeader]) -> GgufHeader:
    """The first one's metadata, and the tensors of all: of these only what they are, not where they begin."""
    owner: dict[str, Path] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, (path, header) in enumerate(headers.items()):
        for name, said, wanted in (("split.count", 1, len(headers)), ("split.no", 0, number)):
            got = header.metadata.get(name, said)
            if got != wanted:
                hint = "" if _PART.fullmatch(path.name) else " (parts are named NAME-00001-of-00002.gguf)"
                raise ConfigError(f"{path}: {name}: expected {wanted} of a file of this name{hint}, got {got!r}")
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{path}: {name}: also in {owner[name].name}")
            tensors[name], owner[name] = tensor, path
    path, first = next(iter(headers.items()))
    count = first.metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise ConfigError(f"{path}: split.tensors.count: {count!r}, but there are {len(tensors)} tensors in all parts")
    return GgufHeader(first.metadata, tensors)


def _rope_factors(headers: Mapping[Path, GgufHeader]) -> list[float] | None:
    for path, header in headers.items():
        tensor = header.tensors.get(_ROPE_FACTORS)
        if tensor is not None and tensor.kind == "F32":
            with path.open("rb") as file:
                file.seek(tensor.start)
                return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))
    return None
