"""Linear attention in Triton equals the layer in torch, and compiles for Hopper and Blackwell."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import astuple
from test_gated_delta import SHAPES, make_delta, make_inputs, step_of
from triton_support import compiling, report, running

from layers.gated_delta import L2_EPS, DeltaShape, GatedDelta, GatedDeltaStep, sequence_places
from layers.triton import gated_delta as triton_delta
from native import Isa, best_isa, limit_isa

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    ("dtype", "in_place"),
    [
        (torch.float32, True),
        pytest.param(torch.float32, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_equals_torch(shape: DeltaShape, dtype: torch.dtype, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    delta = make_delta(shape, generator, sigmoid_gate=shape.channel_decay)
    inputs = make_inputs(shape, 22, dtype, generator)
    step = step_of([1, 1, 2, 18], [1, 0, 3, 4], [1, 2, 3, 4] if in_place else [5, 6, 7, 8])
    tails = torch.randn(9, shape.taps - 1, shape.channels, generator=generator).to(dtype)
    states = torch.randn(9, shape.num_heads, shape.key_dim, shape.value_dim, generator=generator) * 0.3
    theirs, ours = (tails.clone(), states.clone()), (tails.clone(), states.clone())
    limit_isa(Isa.NONE)
    wanted = GatedDeltaStep(step)(*inputs, delta, theirs)
    limit_isa(best_isa())
    sizes = (*astuple(shape), delta.sigmoid_gate)
    with running(triton_delta):
        out = triton_delta.gated_delta(
            inputs,
            delta.log_decay(inputs.decay_T),
            (delta.conv, delta.norm),
            sizes,
            sequence_places(step),
            ours,
            (delta.eps, L2_EPS),
        )
    tolerance = {"rtol": 3e-4, "atol": 3e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, wanted, **tolerance)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=3e-4, atol=3e-5)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("channel_decay", [False, True])
def test_compiles(channel_decay: bool, capability: int) -> None:
    shape = DeltaShape(16, 32, 128, 128, 4, channel_decay)
    delta = GatedDelta(shape, 1e-6, torch.device("meta"))

    def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    cache = meta(8, 3, shape.channels), meta(8, 32, 128, 128, dtype=torch.float32)
    inputs = meta(70, shape.channels), meta(70, shape.value_size), meta(70, 32), meta(70, shape.decay_size)
    places = [meta(size, dtype=torch.int64) for size in (5, 70, 4, 4)]
    with compiling(capability, triton_delta) as found:
        log_decay = delta.log_decay(inputs[3])
        triton_delta.gated_delta(
            inputs, log_decay, (delta.conv, delta.norm), (*astuple(shape), False), places, cache, (delta.eps, L2_EPS)
        )
    report(found)
    assert len(found) == 4
