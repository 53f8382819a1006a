"""What tensors a .safetensors file says that it has, and how large they are, without torch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from layers.identity import MAX_HEADER_BYTES

ITEM_SIZES = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


def tensor_sizes(file: Path) -> list[tuple[str, str, int]]:
    """(key, dtype name, bytes) of every tensor. Ranks check the rest of its header (layers/safetensors_header.py),
    which needs torch; the library's reader would import numpy, which takes as long as all else that is done here.
    ValueError, one line with the file, where it cannot be read or a dtype is not supported."""
    found: list[tuple[str, str, int]] = []
    end = 0
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes")
            header = json.loads(opened.read(length))
            size = os.fstat(opened.fileno()).st_size
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            dtype, end = str(entry["dtype"]), max(end, entry["data_offsets"][1])
            found.append((key, dtype, math.prod(entry["shape"]) * ITEM_SIZES.get(dtype, 0)))
        if 8 + length + end > size:
            raise ValueError(f"it is cut short: {size} bytes of {8 + length + end}")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: not a readable safetensors file ({error})") from None
    for key, dtype, _ in found:
        if dtype not in ITEM_SIZES:
            raise ValueError(f"{file}: tensor {key} has dtype {dtype}, which is not supported")
    return found
