"""What was recorded and is replayed gives what it gave, with the inputs of now."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from native import Isa, best_isa, rows
from native.tape import CpuGraphs, Memory, Recording, Tape

pytestmark = pytest.mark.skipif(best_isa() == Isa.NONE, reason="the native kernels were not built")
SOURCES = Path(__file__).parents[2] / "native" / "src"
# They compute nothing of a step.
OTHERS = r"native_|links_|weights_|probe_|eplb_|tape_|experts_shape|experts_pack|linear_packed_fill"


@pytest.fixture(autouse=True, params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def layer(x_TD: Tensor, weight_D: Tensor) -> Tensor:
    """A few kernels, with tensors that live for different times."""
    normed_TD = rows.rms_norm(x_TD, weight_D, 1e-6)
    out_TD = rows.copy(torch.empty_like(x_TD), x_TD)
    for _ in range(3):
        half_TF = rows.silu_mul(normed_TD)
        rows.add(out_TD.view(-1, half_TF.shape[1])[: half_TF.shape[0]], half_TF)
    return rows.add(out_TD, normed_TD)


def record(memory: Memory, x_TD: Tensor, weight_D: Tensor) -> tuple[Recording, Tensor, Tape]:
    recording = Recording(memory)
    tape = recording.new()
    tape.begin()
    out_TD = layer(x_TD, weight_D)
    tape.end()
    return recording, out_TD, tape


def test_it_gives_what_python_gives() -> None:
    weight_D = torch.rand(2048)
    x_TD = torch.zeros(64, 2048)
    recording, out_TD, tape = record(Memory(), x_TD, weight_D)
    assert recording.refused == ""
    for seed in range(5):
        x_TD.copy_(torch.randn(x_TD.shape, generator=torch.Generator().manual_seed(seed)))
        expected_TD = layer(x_TD, weight_D)
        tape.replay()
        assert torch.equal(out_TD, expected_TD)


def test_recordings_share_memory_and_freed_places_are_used_again() -> None:
    memory = Memory()
    x_TD, weight_D = torch.randn(8, 512), torch.rand(512)
    made = [record(memory, x_TD, weight_D) for _ in range(20)]
    once = memory.num_bytes
    assert len({out_TD.data_ptr() for _, out_TD, _ in made}) == 1
    tape = Recording(memory).new()
    tape.begin()
    places = {torch.empty(1000).data_ptr() for _ in range(1000)}  # each dies before the next one is made
    kept = [torch.empty(1000) for _ in range(4)]
    tape.end()
    assert len(places) == 1 and len({tensor.data_ptr() for tensor in kept}) == 4 and memory.num_bytes == once
    large = Recording(memory).new()
    large.begin()
    first, second = torch.empty(1 << 20), torch.empty(0, 4)
    large.end()
    assert memory.num_bytes > once and first.numel() == 1 << 20 and second.shape == (0, 4)


def test_what_torch_computes_is_refused_and_views_are_not() -> None:
    x_TD = torch.randn(4, 8)
    recording = Recording(Memory())
    tape = recording.new()
    tape.begin()
    x_TD[1:].view(-1, 4)[:, None].transpose(0, 1).unbind(0)
    torch.empty(3, dtype=torch.bfloat16), x_TD.new_empty(2), torch.empty_like(x_TD.t())
    tape.end()
    assert recording.refused == ""
    for compute in (lambda: x_TD + 1, lambda: x_TD.add_(1), lambda: x_TD.t().contiguous(), lambda: x_TD[0, 0].item()):
        recording = Recording(Memory())
        tape = recording.new()
        tape.begin()
        compute()
        tape.end()
        assert recording.refused.startswith("torch computes aten")


def test_a_thread_records_only_what_it_does_itself() -> None:
    x_TD, weight_D = torch.randn(4, 8), torch.rand(8)
    recording = Recording(Memory())
    tape = recording.new()
    tape.begin()
    other = threading.Thread(target=lambda: (torch.randn(3).exp(), x_TD.mul_(1)))
    other.start()
    other.join(10)
    out_TD = rows.rms_norm(x_TD, weight_D, 1e-6)
    tape.end()
    assert recording.refused == ""
    x_TD.neg_()
    tape.replay()
    assert torch.equal(out_TD, rows.rms_norm(x_TD, weight_D, 1e-6))


def test_one_recording_has_several_tapes() -> None:
    """What is done between them is not on them, and their tensors do not share their places."""
    graphs = CpuGraphs()
    x_TD, weight_D = torch.randn(4, 8), torch.rand(8)
    recording = graphs.series(0)
    first, second = recording.new(), recording.new()
    first.begin()
    normed_TD = rows.rms_norm(x_TD, weight_D, 1e-6)
    first.end()
    doubled_TD = normed_TD * 2
    second.begin()
    out_TD = rows.rms_norm(doubled_TD, weight_D, 1e-6)
    second.end()
    assert recording.refused == "" and out_TD.data_ptr() != normed_TD.data_ptr()
    x_TD.copy_(torch.randn(4, 8))
    first.replay()
    assert torch.equal(normed_TD, rows.rms_norm(x_TD, weight_D, 1e-6))
    doubled_TD.copy_(normed_TD * 3)
    second.replay()
    assert torch.equal(out_TD, rows.rms_norm(doubled_TD, weight_D, 1e-6))
    again, other = graphs.series(0), graphs.series(1)
    assert again.empty_like(x_TD).data_ptr() == normed_TD.data_ptr() != other.empty_like(x_TD).data_ptr()


def test_every_kernel_is_recorded_or_refuses(threads: int) -> None:
    for source in sorted(SOURCES.glob("*.cpp")):
        if source.name == "selftest.cpp":
            continue
        text = source.read_text()
        for match in re.finditer(r"NATIVE_API void (\w+)\([^{;]*\) \{\n(.*)\n", text):
            name, first = match.groups()
            if not re.match(OTHERS, name):
                assert f"tape_note({name}, " in first or f'tape_refuse("{name}");' in first, name
