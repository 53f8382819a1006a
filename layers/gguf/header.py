"""What a GGUF file says of itself: its metadata, and which tensors lie where. No torch here.

Format: magic, version, counts, then metadata (key, type, value), then for each tensor name, sizes (the innermost
first), kind and offset; the data begin at the next multiple of the alignment
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

from layers.identity import CheckpointError

# Numbers in a block, and its bytes, by kind.
KINDS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "BF16": 30,
}  # fmt: skip
_KIND_OF = {number: kind for kind, number in NUMBERS.items()}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST = 1 << 32  # of anything that is counted
_ALIGNMENT = 32


class GgufTensor(NamedTuple):
    """shape: the outermost size first."""

    shape: tuple[int, ...]
    kind: str
    start: int
    num_bytes: int


class GgufHeader(NamedTuple):
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Raises CheckpointError: one line with the file, and what is wrong."""
    try:
        with path.open("rb") as file:
            return parse_header(file, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def parse_header(file: BinaryIO, path: Path) -> GgufHeader:
    """The same of an open file, from its beginning."""
    try:
        return _parse(_Reader(file), path)
    except (struct.error, UnicodeDecodeError, OverflowError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt GGUF header, or cut short: {error!r}"[:300]) from None


def _parse(reader: _Reader, path: Path) -> GgufHeader:
    if reader.take(4) != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file")
    version = reader.number("I")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version}; 2 and 3 are read")
    num_tensors, num_fields = reader.count(), reader.count()
    metadata: dict[str, object] = {}
    for _ in range(num_fields):
        name = reader.text()
        metadata[name] = reader.value(reader.number("I"))
    found = []
    for _ in range(num_tensors):
        name = reader.text()
        shape = tuple(reader.count() for _ in range(reader.number("I")))[::-1]
        found.append((name, shape, reader.number("I"), reader.count()))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise CheckpointError(f"{path}: general.alignment: expected a positive number, got {alignment!r}")
    data = -(-reader.at // alignment) * alignment
    tensors = {name: _tensor(path, name, shape, kind, data + offset) for name, shape, kind, offset in found}
    size = path.stat().st_size
    for name, tensor in tensors.items():
        if tensor.start + tensor.num_bytes > size:
            raise CheckpointError(f"{path}: {name}: file is cut short ({size} bytes)")
    return GgufHeader(metadata, tensors)


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    if kind not in _KIND_OF:
        known = ", ".join(KINDS)
        raise CheckpointError(f"{path}: {name}: tensors of kind {kind} are not read (these are: {known})")
    numbers, num_bytes = KINDS[_KIND_OF[kind]]
    if not shape or shape[-1] % numbers:
        raise CheckpointError(
            f"{path}: {name}: {_KIND_OF[kind]} has rows of a multiple of {numbers}, not {list(shape)}"
        )
    return GgufTensor(shape, _KIND_OF[kind], start, math.prod(shape) // numbers * num_bytes)


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.at = 0

    def take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise struct.error("the file ends")
        self.at += count
        return data

    def number(self, kind: str) -> int:
        value: int = struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]
        return value

    def count(self) -> int:
        value = self.number("Q")
        if value > _MOST << 10:
            raise OverflowError(f"{value} is too large")
        return value

    def text(self) -> str:
        length = self.count()
        if length > _MOST:
            raise OverflowError(f"a text of {length} bytes")
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int) -> object:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        of, length = self.number("I"), self.count()
        if length > _MOST:
            raise OverflowError(f"an array of {length}")
        if of in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[of]}")
            return list(struct.unpack(f"<{length}{_SCALARS[of]}", self.take(length * size)))
        return [self.value(of) for _ in range(length)]
