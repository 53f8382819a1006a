"""Models with linear attention whose weights have fewer bits: those of a checkpoint over 1, 2 and 4 ranks, and those that
are brought into 4 bits at load. What one rank makes of each form of a checkpoint: test_quantized_checkpoints.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from amounts import combined
from drive import (
    CPU,
    chunked_logits,
    generate_on_ranks,
    load_ours,
    mailbox_models,
    parallel_of,
    prompts_of,
    relative_error,
)
from hf_tiny import VOCAB, HfModel, make_fp8, make_quantized, rewrite
from test_quantized_checkpoints import FAMILIES, INT4, TOKENS, packed_int4
from torch import Tensor

from ep.experts import WeightFormat, quantize_halves
from ep.parallel import Parallel
from ep.transport.group import MailboxGroup, MailboxWorld
from layers.linear import Linear
from layers.weights import Checkpoint
from models.base import CausalLM
from models.registry import build, read_config
from moe_kernels.matrix import dequantize_halves
from native import Isa, isa, limit_isa

pytestmark = pytest.mark.parity
torch.set_num_threads(1)

LINEAR = ["Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "KimiLinearForCausalLM"]
EXPERT = re.compile(r"\.experts\.\d+\.(\w+_proj|w\d)\.weight$")
NUM_TOKENS = 16


def int4_experts(hf: HfModel) -> None:
    make_quantized(hf, packed_int4, INT4, within=".experts.")


@pytest.mark.parametrize(
    ("family", "quantize"), combined(LINEAR, [make_fp8, int4_experts], names=(LINEAR, ["fp8", "int4"]))
)
def test_ranks_give_the_tokens_of_transformers(tmp_path: Path, family: str, quantize: type) -> None:
    hf = FAMILIES[family](tmp_path)
    quantize(hf)
    prompts = [prompts_of(rank, VOCAB) for rank in range(4)]
    ours = {size: generate_on_ranks(mailbox_models(tmp_path, size), prompts[:size], NUM_TOKENS) for size in (1, 2, 4)}
    expected = [hf.continued(own, tokens) for own, tokens in zip(prompts, ours[4], strict=True)]
    assert ours == {size: expected[:size] for size in ours}


@pytest.mark.skipif(isa() == Isa.NONE, reason="without the native kernels nothing is kept in 4 bits")
@pytest.mark.parametrize(("family", "form"), combined(LINEAR, [WeightFormat.MXFP4, WeightFormat.INT4]))
def test_4_bits_at_load(tmp_path: Path, family: str, form: WeightFormat) -> None:
    """As if the weights had been rounded before: logits of one rank, and tokens of several."""
    path = FAMILIES[family](tmp_path).path
    prompts = [prompts_of(rank, VOCAB) for rank in range(4)]

    models = {size: kept_models(path, form, size) for size in (1, 2, 4)}
    ours = chunked_logits(models[1][0], TOKENS, [20, 4])
    tokens = {size: generate_on_ranks(ranks, prompts[:size], NUM_TOKENS) for size, ranks in models.items()}

    rewrite(path, lambda tensors: {k: rounded(x, form) if EXPERT.search(k) else x for k, x in tensors.items()})
    used = isa()
    limit_isa(min(used, Isa.AVX2))  # with which its linear layers are not packed
    plain = load_ours(path)
    limit_isa(used)
    for name, module in models[1][0].named_modules():
        if isinstance(module, Linear) and module.packed is not None:
            weight = plain.get_submodule(name).weight  # type: ignore[attr-defined]
            weight.copy_(rounded(weight, form))
    assert relative_error(ours, chunked_logits(plain, TOKENS, [20, 4])) < 1e-4
    expected = [generate_on_ranks([plain], [own], NUM_TOKENS)[0] for own in prompts]
    assert tokens == {size: expected[:size] for size in (1, 2, 4)}


def kept_models(path: Path, form: WeightFormat, size: int) -> list[CausalLM]:
    world = MailboxWorld(size)
    ranks = [MailboxGroup(world, rank) for rank in range(size)]
    return [load_kept(path, form, parallel_of(path, rank, "mailbox")) for rank in ranks]


def load_kept(path: Path, form: WeightFormat, parallel: Parallel) -> CausalLM:
    config = read_config(path)
    model = build(config, parallel, torch.float32, CPU)
    model.keep_experts(form)
    model.keep_linears(form)
    with torch.inference_mode():
        model.load(Checkpoint(path, names=config.key_names))
    linears = {module.packed.form for module in model.modules() if isinstance(module, Linear) and module.packed}
    assert linears == {form} and {moe.experts.format for _, moe in model.moe_layers} == {form}
    return model


def rounded(weight: Tensor, form: WeightFormat) -> Tensor:
    return dequantize_halves(quantize_halves(weight, form), torch.float32)
