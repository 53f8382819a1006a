"""The head shared by ranks: the same logits as each would have of its own, whoever has how many rows; and a rank that
is lost meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from shm_threads import team, together
from torch import Tensor

from ep.backends.dispatchers import StepState
from ep.protocol import PeerLost
from ep.transport.shm_group import ShmGroup
from ep.vocab_parallel import MAX_ROWS, STRIDE, VocabParallel, parts_of
from layers.head import LMHead
from native.packed_linear import PANEL

CPU = torch.device("cpu")
HIDDEN = 16


def test_a_part_begins_where_a_panel_does() -> None:
    assert STRIDE == PANEL


@settings(max_examples=examples(200), deadline=None)
@given(vocab_size=st.integers(1, 5000), num_ranks=st.integers(1, 62))
def test_parts_are_the_vocabulary(vocab_size: int, num_ranks: int) -> None:
    parts = parts_of(vocab_size, num_ranks)
    assert len(parts) == num_ranks and parts[0][0] == 0 and parts[-1][1] == vocab_size
    assert all(end == first for (_, end), (first, _) in itertools.pairwise(parts))
    assert all(first <= last and first % STRIDE == 0 for first, last in parts if first < vocab_size)
    sizes = [-(-(last - first) // STRIDE) for first, last in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[ShmGroup]]:
    found = team(tmp_path, 3, timeout=1.5)
    yield found
    for group in found:
        group.close()


def head_of(vocab_size: int, dtype: torch.dtype, packed: bool) -> LMHead:
    head = LMHead(HIDDEN, vocab_size, None, dtype, CPU, bias=True)
    assert head.bias is not None
    head.weight.copy_(torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(1)))
    head.bias.copy_(torch.randn(vocab_size, generator=torch.Generator().manual_seed(2)))
    if packed and head.can_pack:
        head.pack(head.weight)
    return head


@pytest.mark.parametrize("vocab_size", [50, 200, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True], ids=["as it is", "packed"])
def test_logits_are_those_of_one_rank(
    groups: list[ShmGroup], vocab_size: int, dtype: torch.dtype, packed: bool
) -> None:
    """Step after step with other numbers of rows; of 50 outputs one rank alone has a part."""
    steps = [(1, 0, 3), (0, 0, 0), (4, 2, 5), (0, 1, 0), (MAX_ROWS, 7, 1)]

    def rows(step: int, rank: int) -> Tensor:
        return torch.randn(steps[step][rank], HIDDEN, generator=torch.Generator().manual_seed(100 * step + rank)).to(
            dtype
        )

    def act(rank: int) -> list[Tensor]:
        with torch.inference_mode():
            vocab, head = VocabParallel(groups[rank], HIDDEN, vocab_size, dtype), head_of(vocab_size, dtype, packed)
            return [vocab.logits(rows(step, rank), head.part).clone() for step in range(len(steps))]

    found = together(3, act)
    with torch.inference_mode():
        head = head_of(vocab_size, dtype, packed)
        for rank, logits in enumerate(found):
            assert isinstance(logits, list), logits
            for step, values in enumerate(logits):
                assert values.dtype is dtype and values.shape == (steps[step][rank], vocab_size)
                torch.testing.assert_close(values, head(rows(step, rank)))


def test_only_steps_with_few_rows_are_shared(groups: list[ShmGroup]) -> None:
    """The state asks by the most tokens of any rank, which all of them know."""
    hidden_PD, head = torch.zeros(2, HIDDEN), head_of(100, torch.float32, False)

    def act(rank: int) -> tuple[bool, bool, bool]:
        state = StepState()
        alone = state.logits(hidden_PD, head.part, 2) is None
        state.vocab = VocabParallel(groups[rank], HIDDEN, 100, torch.float32)
        few, many = state.logits(hidden_PD, head.part, MAX_ROWS), state.logits(hidden_PD, head.part, MAX_ROWS + 1)
        state.forget()
        return alone, few is not None, many is None and state.logits(hidden_PD, head.part, 2) is None

    assert together(3, act) == [(True, True, True)] * 3


def test_a_rank_that_leaves_is_named(groups: list[ShmGroup]) -> None:
    hidden_PD, head = torch.zeros(2, HIDDEN), head_of(100, torch.float32, False)
    shared = [VocabParallel(group, HIDDEN, 100, torch.float32) for group in groups]

    def act(rank: int) -> tuple[int, ...]:
        if rank == 1:
            groups[1].close()
            return ()
        with pytest.raises(PeerLost) as lost:
            shared[rank].logits(hidden_PD, head.part)
        return lost.value.ranks

    assert together(3, act) == [(1,), (), (1,)]
