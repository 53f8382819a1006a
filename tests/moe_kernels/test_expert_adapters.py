"""Experts by DeepGEMM and FlashInfer (fakes of them) equal the reference; and which backend is chosen, with the reasons."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch
from moe_inputs import routing
from msgspec.structs import replace
from torch import Tensor
from use_fakes import use_fakes

from moe_kernels import ExpertBatch, Layout, TokenBatch, WeightFormat, quantize_rows, reference, silu_mul
from moe_kernels.backends import NAMES, ExpertFacts, choose_experts, explain_experts
from moe_kernels.choice import silu_mul_quantize
from moe_kernels.deepgemm import DeepGemm
from moe_kernels.expert_storage import ExpertWeights
from moe_kernels.flashinfer import FlashInferExperts
from moe_kernels.fp8_experts import Fp8Experts
from moe_kernels.quant import num_blocks
from moe_kernels.weights import PlainExperts

pytestmark = pytest.mark.fakes

CPU, BF16 = torch.device("cpu"), torch.bfloat16
S, D, F = 3, 256, 128
ROWS = [[3, 0, 18], [0, 130, 1], [0, 0, 0]]


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    with use_fakes():
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(experts: ExpertWeights) -> ExpertWeights:
    for slot in range(S):
        parts = (normal(F, D, seed=slot), normal(F, D, seed=10 + slot), normal(D, F, seed=20 + slot))
        experts.fill(slot, *(part * part.shape[1] ** -0.5 for part in parts))
    return experts


def make(name: str, form: WeightFormat) -> ExpertWeights:
    if name == "flashinfer":
        return filled(FlashInferExperts(S, D, F, BF16, CPU, form))
    library = DeepGemm((10, 0) if name == "deepgemm sm_100" else (9, 0), psum=name == "deepgemm psum")
    if name == "deepgemm sm_100":
        importlib.import_module("deep_gemm").set_arch(100)
    if form is WeightFormat.FP8:
        return filled(Fp8Experts(S, D, F, BF16, CPU, library.run_experts_fp8, library.power_of_two_scales))
    return filled(PlainExperts(S, D, F, BF16, CPU, library.run_experts))


def make_batch(layout: Layout, rows: list[int], scaled: bool) -> ExpertBatch:
    """Rows past a padded slot's count are NaN."""
    rows_S = torch.tensor(rows, dtype=torch.int32)
    if layout is Layout.RAGGED:
        x = normal(sum(rows), D, seed=5).to(BF16)
    else:
        x = normal(S, 140, D, seed=5).to(BF16)
        x[torch.arange(140) >= rows_S[:, None]] = float("nan")
    if not scaled:
        return ExpertBatch(layout, x, rows_S)
    value, scale = quantize_rows(x.flatten(0, -2))
    return ExpertBatch(layout, value.view(x.shape), rows_S, scale.view(*x.shape[:-1], num_blocks(D)))


def expected_rows(experts: ExpertWeights, batch: ExpertBatch) -> Tensor:
    """In float32, with the weights as they are kept."""
    parts = [experts.read(slot) for slot in range(S)]
    gate_up = torch.stack([torch.cat((gate, up)) for gate, up, _ in parts]).float()
    down = torch.stack([down for _, _, down in parts]).float()
    x = batch.x.float() if batch.scale is None else batch.x.float() * batch.scale.repeat_interleave(128, -1)
    return reference.experts(ExpertBatch(batch.layout, x, batch.rows_S), gate_up, down)


def valid(batch: ExpertBatch, y: Tensor) -> Tensor:
    return y if batch.layout is Layout.RAGGED else y[torch.arange(y.shape[1]) < batch.rows_S[:, None]]


LIBRARIES = ["deepgemm", "deepgemm psum", "deepgemm sm_100", "flashinfer"]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("form", [WeightFormat.PLAIN, WeightFormat.FP8], ids=lambda form: form.value)
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("scaled", [False, True], ids=["bf16 rows", "fp8 rows"])
def test_rows(name: str, form: WeightFormat, layout: Layout, scaled: bool) -> None:
    experts = make(name, form)
    for rows in ROWS:
        batch = make_batch(layout, rows, scaled)
        y = experts.run_rows(batch)
        assert y.shape == batch.x.shape and y.dtype is BF16
        expected = valid(batch, expected_rows(experts, batch))
        check(valid(batch, y), expected, form)


def check(y: Tensor, expected: Tensor, form: WeightFormat) -> None:
    """What stands between the products in FP8 is off by up to a sixteenth; sums of many by less."""
    assert not y.isnan().any()
    error = (y.float() - expected).norm() / expected.norm().clamp_min(1e-9)
    assert error < (0.06 if form is WeightFormat.FP8 else 0.01), error


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("form", [WeightFormat.PLAIN, WeightFormat.FP8], ids=lambda form: form.value)
def test_tokens(name: str, form: WeightFormat) -> None:
    """Slots 4 to 6 of a group are here; others count nothing."""
    experts = make(name, form)
    slot_TK, weight_TK = routing(9, 4, 8, seed=2)
    batch = TokenBatch(normal(9, D, seed=7).to(BF16), slot_TK, weight_TK, 4, torch.float32)
    expected = torch.zeros(9, D)
    for token, slots in enumerate(slot_TK.tolist()):
        for k, slot in enumerate(slots):
            if 4 <= slot < 7:
                gate, up, down = (part.float() for part in experts.read(slot - 4))
                row = batch.x_TD[token : token + 1].float()
                expected[token] += weight_TK[token, k] * reference.expert(row, torch.cat((gate, up)), down)[0]
    y_TD = experts.run_tokens(batch)
    assert y_TD.dtype is torch.float32
    check(y_TD, expected, form)


def test_experts_move_by_their_storage() -> None:
    """A slot is what its storage says; a cleared one gives zeros."""
    for experts in (make("deepgemm", WeightFormat.FP8), make("flashinfer", WeightFormat.PLAIN)):
        for ours, theirs in zip(experts.storage(0), experts.storage(2), strict=True):
            assert ours.is_contiguous()
            ours.copy_(theirs)
        for ours, theirs in zip(experts.read(0), experts.read(2), strict=True):
            assert torch.equal(ours, theirs)
        experts.clear(1)
        assert not any(part.any() for part in experts.read(1))


def test_silu_mul_quantize_is_the_two_of_them() -> None:
    gate_up = normal(2, 5, 320, seed=3).to(BF16)
    value, scale = silu_mul_quantize(gate_up)
    plain = silu_mul(gate_up.clone())
    expected_value, expected_scale = quantize_rows(plain.flatten(0, 1))
    assert torch.equal(value.flatten(0, 1).view(torch.uint8), expected_value.view(torch.uint8))
    assert torch.equal(scale.flatten(0, 1), expected_scale)


HOPPER = ExpertFacts(7168, 2048, BF16, WeightFormat.FP8, False, True, (9, 0), frozenset({"deepgemm", "flashinfer"}))


@pytest.mark.parametrize(
    ("facts", "name", "reason"),
    [
        (replace(HOPPER, capability=None, on_gpu=False), "deepgemm", "needs an NVIDIA GPU"),
        (replace(HOPPER, capability=(8, 0)), "deepgemm", "not compute capability 8.0"),
        (replace(HOPPER, dtype=torch.float32), "flashinfer", "works in bfloat16, not float32"),
        (replace(HOPPER, form=WeightFormat.INT8), "deepgemm", "INT8"),
        (replace(HOPPER, capability=(10, 0)), "flashinfer", "on Hopper only"),
        (replace(HOPPER, width=2000), "deepgemm", "not 7168 and 2000"),
        (replace(HOPPER, installed=frozenset()), "deepgemm", "pip install sgl-deep-gemm"),
        (replace(HOPPER, installed=frozenset()), "flashinfer", "pip install .flashinfer-python>=0.6.18"),
        (HOPPER, "native", "tensors on a CPU"),
        (HOPPER, "cutlass", "is unknown; it must be auto, native, torch"),
    ],
)
def test_a_backend_that_cannot_run_says_why(facts: ExpertFacts, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choose_experts(name, facts)


def test_what_is_chosen() -> None:
    assert set(explain_experts(HOPPER)) == set(NAMES)
    assert choose_experts("auto", HOPPER) == "deepgemm"
    assert choose_experts("auto", replace(HOPPER, installed=frozenset())) == "triton"
    assert choose_experts("auto", replace(HOPPER, form=WeightFormat.PLAIN)) == "triton"
    assert choose_experts("flashinfer", HOPPER) == "flashinfer"
    here = replace(HOPPER, native=True, on_gpu=False, capability=None)
    assert choose_experts("auto", here) == "native"
    assert choose_experts("auto", replace(here, native=False)) == "torch"


@pytest.mark.parametrize(
    ("package", "make_one", "line"),
    [
        ("deep_gemm", lambda: DeepGemm((9, 0)), "pip install sgl-deep-gemm"),
        (
            "flashinfer.fused_moe",
            lambda: FlashInferExperts(1, 128, 128, BF16, CPU, WeightFormat.PLAIN),
            "pip install .flashinfer-python>=0.6.18",
        ),
    ],
)
def test_a_missing_library_names_the_line_to_type(
    package: str, make_one: object, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=line):
        make_one()  # type: ignore[operator]
