"""torch.save files, the only place of the balancer's tools that needs torch."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eplb.offline.files import replacing


def read(path: Path) -> Any:
    """What was saved, with tensors as numpy arrays (bfloat16 as float32).

    Only tensors and plain containers are read, never code. Raises ValueError naming the file when it holds more, or is
    damaged.
    """
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = (str(error).splitlines() or ["damaged"])[0][:160]
        raise ValueError(f"{path} cannot be read as tensors and plain containers alone: {reason}") from None
    except Exception as error:  # the bytes of a damaged pickle are instructions: they can fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise ValueError(f"{path} is no readable torch file: {reason}") from None
    return _without_tensors(value)


def write(path: Path, value: Any) -> None:
    """Save with numpy arrays as tensors. The file appears whole or not at all."""
    with replacing(path) as stream:
        torch.save(_with_tensors(value), stream)


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, Mapping):
        return {key: _without_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item) for item in value]
    return value


def _with_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, dict):
        return {key: _with_tensors(item) for key, item in value.items()}
    return value
