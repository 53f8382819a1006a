"""MLA by FlashInfer and FlashMLA (fakes of them) equals the reference; and which backend is chosen, with the reasons."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from mla_case import make_case
from msgspec.structs import replace
from use_fakes import use_fakes

from mla import reference
from mla.backend import make_backend
from mla.flashinfer import FlashInferMla
from mla.flashmla import FlashMla
from mla.protocol import MlaBackend, MlaShape
from mla.requirements import NAMES, MlaFacts, choose_mla, explain_mla

pytestmark = pytest.mark.fakes

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPE = MlaShape(num_heads=4, qk_nope_head_dim=16, qk_rope_head_dim=64, latent_dim=512, v_head_dim=8)
SCALE = 0.05
STEPS = {
    "decodes": [(1, 5), (1, 1), (1, 200)],
    "mixed": [(1, 70), (5, 5), (3, 130)],
    "prefill": [(7, 7)],
    "no tokens": [],
}


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    with use_fakes():
        yield


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("library", ["flashinfer", "flashmla"])
def test_equals_the_reference(name: str, library: str) -> None:
    case = make_case(STEPS[name], 64, SHAPE, BF16)
    q_nope, q_pe, cache, w_uk, w_uv = case.tensors
    w_uk *= 0.2
    backend: MlaBackend
    if library == "flashinfer":
        backend = FlashInferMla(SHAPE, SCALE, BF16, CPU)
    else:
        backend = FlashMla(SHAPE, SCALE, make_backend(SHAPE, SCALE, "auto", BF16, CPU))
    with torch.inference_mode():
        prepared = backend.prepare(case.step)
        for _ in range(2):  # layers share what was prepared
            ours = prepared(q_nope, q_pe, cache, w_uk, w_uv)
    expected = reference.absorbed(q_nope, q_pe, cache, case.step, w_uk, w_uv, SCALE)
    torch.testing.assert_close(ours.float(), expected.float(), rtol=0.05, atol=0.05)


def test_flashmla_wants_its_blocks() -> None:
    case = make_case(STEPS["decodes"], 16, SHAPE, BF16)
    with pytest.raises(ValueError, match="block_size of 64, not 16"):
        FlashMla(SHAPE, SCALE, make_backend(SHAPE, SCALE, "auto", BF16, CPU)).prepare(case.step)


HOPPER = MlaFacts(SHAPE, BF16, True, (9, 0), frozenset({"triton", "flashinfer", "flashmla"}))


@pytest.mark.parametrize(
    ("facts", "name", "reason"),
    [
        (replace(HOPPER, capability=None, on_gpu=False), "flashinfer", "needs an NVIDIA GPU"),
        (replace(HOPPER, on_gpu=False), "triton", "needs tensors on a GPU"),
        (replace(HOPPER, dtype=torch.float32), "flashmla", "works in bfloat16, not float32"),
        (replace(HOPPER, shape=replace(SHAPE, latent_dim=256)), "flashinfer", "not 256 and 64"),
        (replace(HOPPER, fp8_cache=True), "flashinfer", "not in FP8 rows"),
        (replace(HOPPER, capability=(8, 0)), "flashinfer", "Hopper or Blackwell"),
        (replace(HOPPER, capability=(10, 0)), "flashmla", "written for Hopper"),
        (replace(HOPPER, block_size=16), "flashmla", "--block-size 64"),
        (replace(HOPPER, installed=frozenset()), "flashinfer", "pip install .flashinfer-python>=0.6.18"),
        (replace(HOPPER, installed=frozenset()), "flashmla", "pip install git"),
        (HOPPER, "cutlass", "is unknown; it must be auto, torch"),
    ],
)
def test_a_backend_that_cannot_run_says_why(facts: MlaFacts, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choose_mla(name, facts)


def test_what_is_chosen() -> None:
    assert set(explain_mla(HOPPER)) == set(NAMES)
    assert choose_mla("auto", HOPPER) == "triton"
    assert choose_mla("flashinfer", HOPPER) == "flashinfer" and choose_mla("flashmla", HOPPER) == "flashmla"
    assert choose_mla("auto", replace(HOPPER, on_gpu=False)) == "torch"
    with pytest.raises(ValueError, match="'flashmla': needs an NVIDIA GPU"):
        make_backend(SHAPE, SCALE, "auto", BF16, CPU, "flashmla")


@pytest.mark.parametrize(("package", "line"), [("flashinfer.mla", "flashinfer-python"), ("flash_mla", "FlashMLA")])
def test_a_missing_library_names_the_line_to_type(package: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install .*{line}"):
        if package == "flash_mla":
            FlashMla(SHAPE, SCALE, make_backend(SHAPE, SCALE, "auto", BF16, CPU))
        else:
            FlashInferMla(SHAPE, SCALE, BF16, CPU)
