"""Which implementation runs: torch's on the CPU; Triton's exist under the same names and take the same arguments."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import moe_kernels
from layers.choice import triton_implementation
from moe_kernels import choice

pytestmark = pytest.mark.triton

FORMS = {
    "moe_kernels.triton.grouped_gemm": ["run_experts"],
    "moe_kernels.triton.permute": ["permute", "permute_some", "sum_pairs", "sum_rows", "take_rows", "unpermute"],
    "moe_kernels.triton.quant": ["quantize_rows", "dequantize_rows", "silu_mul_quantize"],
    "layers.triton.silu_mul": ["silu_mul"],
    "moe_kernels.triton.topk": ["softmax_topk", "grouped_softmax_topk", "grouped_sigmoid_topk"],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in FORMS.items() for name in names])
def test_triton_has_the_function_with_these_arguments(module: str, name: str) -> None:
    chosen = vars(choice)[name]
    assert vars(moe_kernels).get(name, chosen) is chosen
    torch_arguments = list(inspect.signature(chosen).parameters)
    triton_arguments = inspect.signature(triton_implementation(module, name)).parameters
    assert list(triton_arguments)[: len(torch_arguments)] == torch_arguments
    more = list(triton_arguments.values())[len(torch_arguments) :]
    assert all(argument.default is not inspect.Parameter.empty for argument in more)


def test_every_choice_is_listed_here() -> None:
    wrapped = {
        name for name, value in vars(choice).items() if inspect.isfunction(value) and "__wrapped__" in vars(value)
    }
    assert wrapped == {name for names in FORMS.values() for name in names}


def test_the_cpu_does_without_triton() -> None:
    code = (
        "import sys, torch, moe_kernels, mla.backend; x = torch.ones(2, 4); moe_kernels.softmax_topk(x, 2, True); "
        "moe_kernels.permute(x, torch.zeros(2, 1, dtype=torch.int64), x[:, :1], 1); assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_missing_triton_names_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "moe_kernels.triton.topk", raising=False)
    triton_implementation.cache_clear()
    with pytest.raises(ImportError, match="pip install triton"):
        choice.triton_implementation("topk", "softmax_topk")
    assert torch.equal(moe_kernels.softmax_topk(torch.ones(1, 1), 1, True)[0], torch.zeros(1, 1, dtype=torch.int64))
