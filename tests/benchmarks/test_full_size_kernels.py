"""What gpu_check.py launches on a GPU, at its full size, compiled for Hopper: it fits the chip, and what spills is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gpu_cases
import gpu_work
import pytest
import torch
from gpu_cases import MODELS, Case
from triton_support import compiling, kernel_modules, report

pytestmark = pytest.mark.triton

META = torch.device("meta")
Cases = Callable[[], Iterator[Case]]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(lambda: gpu_cases.attention_cases(MODELS["qwen3-30b-a3b"], META), id="attention"),
        pytest.param(lambda: gpu_work.padded(META, False), id="padded", marks=pytest.mark.slow),
        pytest.param(lambda: gpu_cases.all_cases(META, list(MODELS)), id="all", marks=pytest.mark.slow),
    ],
)
def test_it_fits_a_hopper(cases: Cases) -> None:
    with compiling(90, *kernel_modules()) as found, torch.inference_mode():
        for case in cases():
            case.run(None)
    report(found)
    assert all(item.spills == 0 for item in found)
    wide = [item for item in found if item.kernel in ("_gate_up_kernel", "_gate_up_fp8_kernel", "_decode_kernel")]
    assert not wide or "wgmma" in {item.matrix_unit for item in wide}
