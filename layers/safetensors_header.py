"""The header of a .safetensors file: what each tensor is and where its bytes lie. Everything in it is checked, as files
come from anywhere."""

from __future__ import annotations

import json
import math

import torch
from msgspec import Struct

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_DIMS = 64  # of a tensor
_MOST = (1 << 63) - 1
_MOST_TEXT = 200  # characters of an error that repeats what is in the file


class TensorEntry(Struct, frozen=True):
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file
    num_bytes: int


class HeaderError(ValueError):
    """A header that cannot be used: one line with the key, and what is wrong."""


def parse_header(header: bytes, data: int, size: int) -> dict[str, TensorEntry]:
    """Every tensor by key. data: where the bytes begin in a file of `size` bytes. Raises HeaderError."""
    try:
        raw = json.loads(header, object_pairs_hook=_without_duplicates)
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"corrupt safetensors header: {error!r}"[:_MOST_TEXT]) from None
    if not isinstance(raw, dict):
        raise HeaderError("corrupt safetensors header: it is no object")
    raw.pop("__metadata__", None)
    entries = {name: _entry(_shown(name), entry, data, size) for name, entry in raw.items()}
    _refuse_overlaps(entries)
    return entries


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """One JSON object. Of a key that comes twice the last would count otherwise."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise HeaderError(f"{_shown(name)}: comes twice in the safetensors header")
        found[name] = value
    return found


def _entry(name: str, raw: object, data: int, size: int) -> TensorEntry:
    if not isinstance(raw, dict) or not {"dtype", "shape", "data_offsets"} <= raw.keys():
        raise HeaderError(f"{name}: corrupt entry in the safetensors header: dtype, shape or data_offsets is missing")
    dtype = DTYPES.get(str(raw["dtype"]))
    if dtype is None:
        raise HeaderError(f"{name}: unknown dtype {_shown(str(raw['dtype']))}")
    dims, offsets = _counts(raw["shape"]), _counts(raw["data_offsets"])
    # A tensor without elements fits into any file; its sizes are still numbers that torch must be able to multiply.
    if dims is None or len(dims) > MAX_DIMS or math.prod(max(1, dim) for dim in dims) > _MOST:
        raise HeaderError(f"{name}: shape must be at most {MAX_DIMS} integers of 0 or more, below 2**63 in all")
    if offsets is None or len(offsets) != 2:
        raise HeaderError(f"{name}: data_offsets must be two integers of 0 or more, below 2**63")
    start, end = offsets
    if end - start != math.prod(dims) * dtype.itemsize:
        raise HeaderError(f"{name}: {end - start} bytes do not hold shape {list(dims)}")
    if data + end > size:
        raise HeaderError(f"{name}: file is cut short ({size} bytes, {data + end} needed)")
    return TensorEntry(dtype, dims, data + start, end - start)


def _counts(values: object) -> tuple[int, ...] | None:
    """None: these are no sizes."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= _MOST for value in values):
        return None
    return tuple(values)


def _refuse_overlaps(entries: dict[str, TensorEntry]) -> None:
    """Two tensors in the same bytes are no checkpoint that any writer makes."""
    last, last_end = "", 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.num_bytes == 0:
            continue
        if entry.start < last_end:
            raise HeaderError(f"{_shown(name)}: its bytes are also those of {_shown(last)}")
        last, last_end = name, entry.start + entry.num_bytes


def _shown(name: str) -> str:
    """On one line, of bounded length, and fit for any terminal."""
    return (name if name.isprintable() and name else repr(name))[:_MOST_TEXT]
