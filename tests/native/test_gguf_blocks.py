"""GGUF's blocks by the native kernel become what they become in torch, to the bit, on every level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from isas import EVERY_ISA
from torch import Tensor

from layers.gguf.blocks import convert
from layers.gguf.header import KINDS
from native import Isa, isa, limit_isa

pytestmark = pytest.mark.store
PACKED = [kind for kind, (numbers, _) in KINDS.items() if numbers > 1]


@pytest.fixture(params=EVERY_ISA)
def level(request: pytest.FixtureRequest) -> Iterator[Isa]:
    before = isa()
    yield limit_isa(request.param)
    limit_isa(before)
    torch.set_num_threads(1)


def blocks(kind: str, outputs: int, inputs: int) -> Tensor:
    """Any bytes, with scales of any size but what is no number."""
    size, num_bytes = KINDS[kind]
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(0, 256, (outputs, inputs // size, num_bytes), generator=generator, dtype=torch.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2) if kind.endswith(("1", "4_K", "5_K")) else (0,):
        size_of = 10.0 ** torch.randint(-8, 3, (outputs, inputs // size, 1), generator=generator)
        number = torch.randn(outputs, inputs // size, 1, generator=generator) * size_of
        number[0, 0] = 0
        rows[..., at : at + 2] = number.half().view(torch.uint8)
    return rows.flatten(1)


@pytest.mark.parametrize("kind", PACKED)
def test_the_bits_of_torch(level: Isa, kind: str) -> None:
    for outputs, inputs, threads in ((5, 256, 1), (70, 768, 3)):
        torch.set_num_threads(threads)
        rows = blocks(kind, outputs, inputs)
        found = convert(kind, rows)
        limit_isa(Isa.NONE)
        expected = convert(kind, rows)
        limit_isa(level)
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.dtype is theirs.dtype
                if mine is found.zero:  # codes of a group that is one number are 0
                    assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
                else:
                    assert torch.equal(mine, theirs)
