"""A peer's file, opened as far as it takes to see what it is."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eplb.offline.files import decode_json, open_file, read_arrays, read_bytes
from eplb.offline.formats import torch_link
from eplb.offline.trace import FORMAT as TRACE_FORMAT
from eplb.offline.trace import Progress


class Container(Enum):
    """What the bytes are, before it is asked what they mean."""

    LINES = "JSON lines"
    JSON = "JSON"
    YAML = "YAML"
    TORCH = "a torch file"
    NPY = "a .npy file"
    NPZ = "a .npz file"
    TABLE = "a table of numbers"
    FOLDER = "a folder"


class MissingHint(ValueError):
    """The file leaves something open that the caller has to say."""


class Hints(Struct, frozen=True):
    """What the caller knows and a file may not say. 0, "" and () mean: not given. layers: the model's layers to keep.
    skip_cut_line: of JSON lines, leave out a last line that was cut off. experts, record_tokens: of ids per token, how
    many experts there are (0: the highest id says it) and how many tokens make a record."""

    ranks: int = 0
    model: str = ""
    top_k: int = 0
    layers: tuple[int, ...] = ()
    skip_cut_line: bool = False
    experts: int = 0
    record_tokens: int = 4096
    steps: int = 0
    progress: Progress | None = None

    def need_ranks(self, num_slots: int, where: Path) -> int:
        """The number of ranks that share `num_slots` slots of a layer."""
        if not self.ranks:
            raise MissingHint(f"{where} does not say how many ranks share its {num_slots} slots; give --ranks")
        if num_slots % self.ranks:
            raise ValueError(f"{where}: {num_slots} slots cannot be shared evenly by {self.ranks} ranks")
        return self.ranks


class Source(Struct, frozen=True):
    """path, what it contains, and `value`: of JSON objects and YAML a dict (JSON values not yet decoded: msgspec.Raw),
    of .npy an array, of .npz a dict of arrays, of torch files what was saved with tensors as arrays, else None."""

    path: Path
    container: Container
    value: Any = None

    def __contains__(self, key: str) -> bool:
        """Whether the file is an object with this name at its top."""
        return isinstance(self.value, Mapping) and key in self.value

    def json(self, key: str, kind: Any) -> Any:
        """The value under `key` of a JSON object, as `kind`. ValueError names the file, the key and the place."""
        return decode_json(self.value[key], kind, f"{self.path}: {key}")


def open_source(path: Path) -> Source:
    """Raises ValueError, one line with the file's name, for what cannot be read or is of no known kind."""
    if path.is_dir():
        return Source(path, Container.FOLDER)
    with open_file(path) as stream:
        head = stream.read(4096)
    if not head:
        raise ValueError(f"{path} is empty")
    if head.startswith(b"PK"):
        return _zip(path)
    if head.startswith(b"\x93NUMPY"):
        return Source(path, Container.NPY, read_arrays(path)[""])
    if head.startswith(b"\x80") or path.suffix in (".pt", ".pth"):
        return Source(path, Container.TORCH, torch_link.read(path))
    if f'"{TRACE_FORMAT}"'.encode() in head.split(b"\n", 1)[0]:
        return Source(path, Container.LINES)
    if head.lstrip()[:1] in (b"{", b"["):
        return _json(path)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path)
    if path.suffix in (".csv", ".txt", ".tsv"):
        return Source(path, Container.TABLE)
    raise ValueError(f"{path} is no JSON, YAML, .npy, .npz, .pt or .csv file that this can read")


def _json(path: Path) -> Source:
    data = read_bytes(path)
    is_object = data.lstrip()[:1] == b"{"
    return Source(path, Container.JSON, decode_json(data, dict[str, msgspec.Raw] if is_object else list[Any], path))


def _yaml(path: Path) -> Source:
    try:
        value = msgspec.yaml.decode(read_bytes(path))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    return Source(path, Container.YAML, value)


def _zip(path: Path) -> Source:
    """Both .npz and torch files are zip archives; their members tell them apart."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception as error:  # a damaged directory of an archive shows in many ways
        raise ValueError(f"{path} is cut off or damaged: {error}") from None
    if any(name.endswith("data.pkl") for name in names):
        return Source(path, Container.TORCH, torch_link.read(path))
    if "header.npy" in names:  # a native trace, which is read by its own reader
        return Source(path, Container.NPZ, dict.fromkeys(["header"]))
    return Source(path, Container.NPZ, read_arrays(path))
