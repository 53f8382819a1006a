"""Under which key packed weights are kept: whatever their bytes depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from store.memory import VERSION

# Raise it whenever the bytes of packed weights change in a way that the library of native kernels does not show: what
# moe_kernels, native/packed_linear.py or the families' reading of a checkpoint write.
PACKING = 1


def weights_key(files: Mapping[str, tuple[int, int, int, str]], choices: Mapping[str, object], library: str) -> str:
    """64 hexadecimal digits. files: the identity of the checkpoint (layers/identity.py); choices: dtype, formats and
    whatever else was decided about weights, as JSON can write it; library: the file of the native kernels, whose bytes
    stand for the layout that they pack; "": there is none."""
    kernels = hashlib.sha256(Path(library).read_bytes()).hexdigest() if library else ""
    text = json.dumps([VERSION, PACKING, kernels, dict(files), dict(choices)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
