"""What the Triton kernels want to know about a device."""

from __future__ import annotations

import functools

import torch


@functools.cache
def chip_of(device: torch.device) -> str:
    """The row of a table of configurations: "sm_90". Elsewhere (the interpreter runs on the CPU) the same."""
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
