"""Expert matrices in Triton equal the reference, and compile for Hopper and Blackwell."""

from __future__ import annotations

import pytest
import torch
from amounts import combined
from msgspec.structs import replace
from rounding import assert_within, bound, expert_bound
from torch import Tensor
from triton_support import compiling, report, running

from moe_kernels import ExpertBatch, Layout, dequantize_rows, quantize_rows, reference
from moe_kernels.activation import Activation
from moe_kernels.quant import num_blocks
from moe_kernels.triton import fp8_experts as fp8
from moe_kernels.triton import grouped_gemm as gemm
from moe_kernels.triton import quant as triton_quant
from moe_kernels.triton import tiles
from moe_kernels.triton import tma_gemm as tma
from moe_kernels.triton.configs import GemmConfig

pytestmark = pytest.mark.triton

SMALL = GemmConfig(16, 16, 32, 4, 2, band=2)  # several tiles of everything, also of small matrices
SMALL_FP8 = GemmConfig(16, 128, 128, 4, 2, band=2)
BY_TMA = [False, True]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(num_slots: int, hidden: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = normal(num_slots, 2 * width, hidden, seed=1) * hidden**-0.5
    return gate_up.to(dtype), (normal(num_slots, hidden, width, seed=2) * width**-0.5).to(dtype)


def make_batch(layout: Layout, rows: list[int], hidden: int, dtype: torch.dtype, capacity: int = 20) -> ExpertBatch:
    """Rows past a padded slot's count are NaN."""
    rows_S = torch.tensor(rows, dtype=torch.int32)
    if layout is Layout.RAGGED:
        return ExpertBatch(layout, normal(sum(rows), hidden, seed=3).to(dtype), rows_S)
    x_SCD = normal(len(rows), capacity, hidden, seed=3).to(dtype)
    x_SCD[torch.arange(capacity) >= rows_S[:, None]] = float("nan")
    return ExpertBatch(layout, x_SCD, rows_S)


def valid(batch: ExpertBatch, y: Tensor) -> Tensor:
    """The rows that count: [R, D]."""
    if batch.layout is Layout.RAGGED:
        return y
    return y[torch.arange(y.shape[1]) < batch.rows_S[:, None]]


def of_rows(batch: ExpertBatch, gate_up: Tensor, down: Tensor) -> Tensor:
    """The bound of the rows that count: [R, D]."""
    width = down.shape[2]
    slots = valid(batch, batch.x).split(batch.rows_S.tolist())
    halves = [(w[:width], w[width:]) for w in gate_up]
    return torch.cat([expert_bound(x, *halves[slot], down[slot], x.dtype) for slot, x in enumerate(slots)])


def run(
    batch: ExpertBatch, gate_up: Tensor, down: Tensor, row_weight: Tensor | None = None, by_tma: bool = False
) -> Tensor:
    config = replace(SMALL, tma=int(by_tma))
    with running(gemm, tma):
        return gemm.run_experts(batch, gate_up, down, row_weight=row_weight, gate_up_config=config, down_config=config)


@pytest.mark.parametrize(
    ("layout", "kind", "sizes"),
    combined(
        list(Layout),
        [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)],
        [([3, 0, 18, 1], 40, 24), ([0, 0, 0, 1], 64, 32), ([0, 20, 16], 48, 17)],
    ),
)
def test_equals_the_reference(
    layout: Layout, kind: tuple[torch.dtype, bool], sizes: tuple[list[int], int, int]
) -> None:
    """By TMA: where it can (float32 and odd widths cannot)."""
    (dtype, by_tma), (rows, hidden, width) = kind, sizes
    batch, matrices = make_batch(layout, rows, hidden, dtype), weights(len(rows), hidden, width, dtype)
    y = run(batch, *matrices, None, by_tma)
    assert y.dtype == dtype and y.shape == batch.x.shape
    expected = reference.experts(batch, *matrices)
    assert_within(valid(batch, y), valid(batch, expected), of_rows(batch, *matrices))


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_row_weights(layout: Layout) -> None:
    batch, matrices = make_batch(layout, [2, 0, 17], 32, torch.float32), weights(3, 32, 16, torch.float32)
    row_weight = torch.rand(batch.x.shape[:-1], generator=torch.Generator().manual_seed(5))
    y = run(batch, *matrices, row_weight)
    expected = reference.experts(batch, *matrices) * row_weight[..., None]
    allowed = of_rows(batch, *matrices) * valid(batch, row_weight)[:, None]
    assert_within(valid(batch, y), valid(batch, expected), allowed + bound(1, valid(batch, expected).abs()))


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("biased", [False, True])
def test_biases_and_another_activation(layout: Layout, biased: bool) -> None:
    """gpt-oss's, with a limit that many numbers are beyond."""
    (gate_up, down), rows, activation = weights(4, 40, 24, torch.float32), [3, 0, 18, 1], Activation(1.702, 0.7, 1.0)
    batch = make_batch(layout, rows, 40, torch.float32)
    biases = (normal(4, 48, seed=7), normal(4, 40, seed=8)) if biased else (None, None)
    row_weight = torch.ones(batch.x.shape[:-1])
    with running(gemm, tma):
        y = gemm.run_experts(batch, gate_up, down, *biases, activation, row_weight, SMALL, SMALL)
    expected = reference.experts(batch, gate_up, down, *biases, activation)
    slots = zip(range(4), valid(batch, batch.x).split(rows), strict=True)
    allowed = []
    for slot, x in slots:
        given = (*biases[0][slot].chunk(2), biases[1][slot]) if biased else None
        halves = gate_up[slot].chunk(2)
        allowed.append(expert_bound(x, *halves, down[slot], torch.float32, given, activation))
    assert_within(valid(batch, y), valid(batch, expected), torch.cat(allowed))


def test_no_rows_at_all() -> None:
    for layout in Layout:
        batch = make_batch(layout, [0, 0], 32, torch.float32, capacity=0)
        assert run(batch, *weights(2, 32, 16, torch.float32)).shape == batch.x.shape


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_rows_in_fp8_on_weights_in_16_bits(layout: Layout) -> None:
    plain = make_batch(layout, [3, 0, 5], 160, torch.bfloat16, capacity=6)
    value, scale = quantize_rows(plain.x.flatten(0, -2))
    batch = ExpertBatch(layout, value.view(plain.x.shape), plain.rows_S, scale.view(*plain.x.shape[:-1], -1))
    matrices = weights(3, 160, 16, torch.bfloat16)
    y = run(batch, *matrices)
    assert batch.scale is not None
    exact = ExpertBatch(layout, dequantize_rows(batch.x, batch.scale, torch.bfloat16), batch.rows_S)
    expected = reference.experts(exact, *matrices)
    assert_within(valid(batch, y), valid(batch, expected), of_rows(exact, *matrices))


def fp8_matrices(num_slots: int, hidden: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, b = num_blocks(width), num_blocks(hidden)
    generator = torch.Generator().manual_seed(6)
    scales = [torch.rand(shape, generator=generator) + 0.5 for shape in [(num_slots, 2 * n, b), (num_slots, b, n)]]
    gate_up, down = (matrix.to(torch.float8_e4m3fn) for matrix in weights(num_slots, hidden, width, torch.float32))
    return gate_up, scales[0], down, scales[1]


@pytest.mark.parametrize(
    ("by_tma", "quantized", "layout", "sizes"),
    combined(BY_TMA, [False, True], list(Layout), [([3, 0, 18], 256, 128), ([1, 17], 160, 144)]),
)
def test_weights_in_fp8(by_tma: bool, quantized: bool, layout: Layout, sizes: tuple[list[int], int, int]) -> None:
    """quantized: rows in FP8, not in 16 bits."""
    rows, hidden, width = sizes
    batch, matrices = make_batch(layout, rows, hidden, torch.bfloat16), fp8_matrices(len(rows), hidden, width)
    if quantized:
        value, scale = quantize_rows(batch.x.flatten(0, -2))
        scale = scale.view(*batch.x.shape[:-1], -1)
        batch = ExpertBatch(layout, value.view(batch.x.shape), batch.rows_S, scale)
    row_weight = torch.rand(batch.x.shape[:-1], generator=torch.Generator().manual_seed(5))
    config = replace(SMALL_FP8, tma=int(by_tma))
    with running(gemm, fp8, tma, triton_quant):
        y = fp8.run_experts_fp8(batch, *matrices, row_weight, config, config)
    assert y.dtype == torch.bfloat16
    expected = reference.experts_fp8(batch, *matrices).float() * row_weight[..., None]
    # A number between the products that lies between two of FP8's may be rounded to either: 1/16 of it.
    torch.testing.assert_close(valid(batch, y).float(), valid(batch, expected), rtol=0.03, atol=0.03)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("num_rows", [512, 32768], ids=["decode", "prefill"])
def test_compiles_for_published_shapes(capability: int, num_rows: int) -> None:
    """DeepSeek-V3's experts, 64 of them on a rank."""
    with compiling(capability, gemm, tiles) as found:
        for rows in (num_rows, num_rows - 3):  # share what was compiled
            batch = ExpertBatch(Layout.RAGGED, meta(rows, 7168), meta(64, dtype=torch.int32))
            gemm.run_experts(batch, meta(64, 4096, 7168), meta(64, 7168, 2048))
    report(found)
    assert len(found) == 2 and all(item.spills == 0 for item in found)
    unit = "mma.sync" if num_rows == 512 else {90: "wgmma", 100: "tcgen05.mma"}[capability]
    assert [item.matrix_unit for item in found] == [unit, unit]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("num_rows", [512, 32768], ids=["decode", "prefill"])
def test_fp8_compiles_for_published_shapes(capability: int, num_rows: int) -> None:
    f8, f32 = torch.float8_e4m3fn, torch.float32
    rows_S = meta(64, dtype=torch.int32)
    batch = ExpertBatch(Layout.RAGGED, meta(num_rows, 7168, dtype=f8), rows_S, meta(num_rows, 56, dtype=f32))
    gate_up, down = meta(64, 4096, 7168, dtype=f8), meta(64, 7168, 2048, dtype=f8)
    with compiling(capability, gemm, tiles, fp8, triton_quant) as found:
        fp8.run_experts_fp8(batch, gate_up, meta(64, 32, 56, dtype=f32), down, meta(64, 56, 16, dtype=f32))
    report(found)
    assert len(found) == 2 and all(item.spills == 0 for item in found)
    unit = "mma.sync" if num_rows == 512 else {90: "wgmma", 100: "tcgen05.mma"}[capability]
    assert [item.matrix_unit for item in found] == [unit, unit]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
def test_tiles_fetched_by_the_copy_engine_compile(capability: int, is_fp8: bool) -> None:
    """DeepSeek-V3's prompts. What is measured will say whether they are the faster ones (benchmarks/tune_triton.py)."""
    f8, f32 = torch.float8_e4m3fn, torch.float32
    dtype, k = (f8, 128) if is_fp8 else (torch.bfloat16, 64)
    config = GemmConfig(64 if is_fp8 else 128, 128, k, 8, 3, tma=1)
    scale = meta(32768, 56, dtype=f32) if is_fp8 else None
    batch = ExpertBatch(Layout.RAGGED, meta(32768, 7168, dtype=dtype), meta(64, dtype=torch.int32), scale)
    gate_up, down = meta(64, 4096, 7168, dtype=dtype), meta(64, 7168, 2048, dtype=dtype)
    with compiling(capability, tma, tiles) as found:
        if is_fp8:
            scales = meta(64, 32, 56, dtype=f32), meta(64, 56, 16, dtype=f32)
            fp8.run_experts_fp8(batch, gate_up, scales[0], down, scales[1], None, config, config)
        else:
            gemm.run_experts(batch, gate_up, down, gate_up_config=config, down_config=config)
    report(found)
    assert [item.kernel for item in found] == ["_gate_up_tma_kernel", "_down_tma_kernel"]
    assert all(item.spills == 0 for item in found)
    assert [item.matrix_unit for item in found] == [{90: "wgmma", 100: "tcgen05.mma"}[capability]] * 2


@pytest.mark.parametrize("capability", [90, 100])
def test_padded_rows_in_fp8_compile(capability: int) -> None:
    """What a low-latency exchange brings: 64 slots with room for 1,024 rows, weighted here because its sum is not."""
    x, scale = meta(64, 1024, 7168, dtype=torch.float8_e4m3fn), meta(64, 1024, 56, dtype=torch.float32)
    batch = ExpertBatch(Layout.PADDED, x, meta(64, dtype=torch.int32), scale)
    with compiling(capability, gemm, tiles) as found:
        row_weight = meta(64, 1024, dtype=torch.float32)
        gemm.run_experts(batch, meta(64, 4096, 7168), meta(64, 7168, 2048), row_weight=row_weight)
    report(found)
    assert len(found) == 2 and all(item.spills == 0 for item in found)


@pytest.mark.parametrize("capability", [90, 100])
def test_gpt_oss_compiles(capability: int) -> None:
    """128 experts of 2880 x 2880."""
    batch = ExpertBatch(Layout.RAGGED, meta(512, 2880), meta(128, dtype=torch.int32))
    biases = meta(128, 5760, dtype=torch.float32), meta(128, 2880, dtype=torch.float32)
    with compiling(capability, gemm, tiles) as found:
        matrices = meta(128, 5760, 2880), meta(128, 2880, 2880)
        gemm.run_experts(batch, *matrices, *biases, Activation(1.702, 7.0, 1.0))
    report(found)
    assert len(found) == 2 and all(item.spills == 0 for item in found)


def test_float32_compiles() -> None:
    batch = ExpertBatch(Layout.RAGGED, meta(32768, 7168, dtype=torch.float32), meta(64, dtype=torch.int32))
    with compiling(90, gemm, tiles) as found:
        gemm.run_experts(batch, *(meta(*shape, dtype=torch.float32) for shape in [(64, 4096, 7168), (64, 7168, 2048)]))
    report(found)
    assert all(item.spills <= 64 for item in found)
