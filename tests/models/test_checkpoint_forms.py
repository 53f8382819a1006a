"""The forms in which one model's weights may be stored, and what a rank reads of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drive import single_rank
from hf_tiny import (
    CPU,
    VOCAB,
    HfModel,
    chunked_logits,
    load_ours,
    make_deepseek_moe,
    make_fp8,
    make_llama,
    make_qwen3,
    make_qwen3_moe,
    relative_error,
    rewrite,
)
from torch import Tensor

from ep.backends.local import LocalAllToAll
from ep.experts import WeightFormat
from ep.parallel import Parallel
from eplb.placement import linear_placement
from layers.linear import Linear
from layers.weights import Checkpoint, CheckpointError
from models.base import CausalLM
from models.parts import Part, kept_tensors
from models.registry import build, read_config
from moe_kernels.matrix import dequantize, quantize
from native import Isa, isa

TOKENS = [(7 * i) % VOCAB for i in range(24)]
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def error(hf: HfModel) -> float:
    return relative_error(chunked_logits(load_ours(hf.path), TOKENS, [20, 4]), hf.logits(TOKENS))


def fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor per layer for all experts, as transformers 5 holds them."""
    out = {key: tensor for key, tensor in tensors.items() if not EXPERT.match(key)}
    found = [match for match in map(EXPERT.match, tensors) if match]
    for layer in {match[1] for match in found}:
        count = len({match[2] for match in found})
        parts = {
            part: torch.stack([tensors[f"{layer}.{e}.{part}_proj.weight"] for e in range(count)])
            for part in ("gate", "up", "down")
        }
        out[f"{layer}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        out[f"{layer}.down_proj"] = parts["down"]
    return out


def test_fused_experts(tmp_path: Path) -> None:
    hf = make_qwen3_moe(tmp_path)
    rewrite(tmp_path, fuse_experts)
    assert error(hf) < 1e-4


@pytest.mark.parametrize("form", ["one key per expert", "fused", "fp8"])
def test_one_expert_can_be_read_at_any_time(tmp_path: Path, form: str) -> None:
    """As a rank does that takes over an expert of a lost one."""
    hf = make_qwen3_moe(tmp_path)
    if form == "fp8":
        make_fp8(hf)
    elif form == "fused":
        rewrite(tmp_path, fuse_experts)
    model, whole = load_ours(tmp_path), load_ours(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    with torch.inference_mode():
        model.read_expert(checkpoint, 1, 3, 6)
    (_, ours), (_, theirs) = model._hosts[1], whole._hosts[1]
    for slot in range(ours.experts.num_slots):
        kept = zip(ours.experts.slot_storage(slot), theirs.experts.slot_storage(6 if slot == 3 else slot), strict=True)
        assert all(torch.equal(read, expected) for read, expected in kept), slot
    assert 0 < checkpoint.bytes_read < 0.1 * sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("make", [make_qwen3, make_qwen3_moe])
def test_fp8_blocks(tmp_path: Path, make: type) -> None:
    hf = make(tmp_path, hidden_size=160, intermediate_size=200, head_dim=40, num_hidden_layers=2)
    before = hf.logits(TOKENS)
    make_fp8(hf)
    assert relative_error(hf.logits(TOKENS), before) > 1e-3, "quantising changed nothing: the test would be empty"
    assert error(hf) < 1e-4


def test_experts_of_a_plain_checkpoint_can_be_kept_in_8_bits(tmp_path: Path) -> None:
    hf = make_qwen3_moe(tmp_path, hidden_size=160, moe_intermediate_size=96)
    plain = chunked_logits(load_ours(tmp_path), TOKENS, [20, 4])
    config = read_config(tmp_path)
    placement = linear_placement(config.num_moe_layers, config.num_experts, 1)
    errors = {}
    for form in (WeightFormat.FP8, WeightFormat.INT8):
        parallel = Parallel(0, 1, placement, lambda slots, _hidden: [LocalAllToAll(slots)])
        model = build(config, parallel, torch.float32, CPU)
        model.keep_experts(form)
        model.load(Checkpoint(tmp_path))
        assert all(moe.experts.weights.format is form for _, moe in model._hosts) or isa() == Isa.NONE
        errors[form] = relative_error(chunked_logits(model, TOKENS, [20, 4]), plain)
    assert errors[WeightFormat.FP8] < 0.3 and errors[WeightFormat.INT8] < 0.03
    assert min(errors.values()) > 1e-4 or isa() == Isa.NONE
    assert error(hf) < 1e-4


@pytest.mark.parametrize("make", [make_qwen3, make_qwen3_moe])
@pytest.mark.parametrize("tied", [False, True])
def test_linear_layers_can_be_kept_in_8_bits(tmp_path: Path, make: Callable[..., HfModel], tied: bool) -> None:
    """The same as weights that were rounded to 8 bits before they were loaded."""
    hf = make(tmp_path / "plain", hidden_size=160, intermediate_size=200, head_dim=40, tie_word_embeddings=tied)
    kept = load_kept(hf.path, WeightFormat.INT8)
    assert any(isinstance(part, Linear) and part.packed is not None for part in kept.modules()) or isa() == Isa.NONE

    def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        def one(key: str, tensor: Tensor) -> Tensor:
            kept_so = isa() > Isa.NONE and (
                (key.endswith("_proj.weight") and ".experts." not in key) or "lm_head" in key
            )
            return dequantize(quantize(tensor, WeightFormat.INT8), torch.float32) if kept_so else tensor

        kept = {key: one(key, tensor) for key, tensor in tensors.items()}
        if own_head:  # the embedding stays as it is
            kept["lm_head.weight"] = one("lm_head.weight", tensors["model.embed_tokens.weight"])
        return kept

    own_head = tied and isa() > Isa.NONE
    rewrite(hf.path, rounded, **({"tie_word_embeddings": False} if own_head else {}))
    expected_TV = chunked_logits(load_ours(hf.path), TOKENS, [20, 4])
    assert relative_error(chunked_logits(kept, TOKENS, [20, 4]), expected_TV) < 1e-4


@pytest.mark.skipif(isa() == Isa.NONE, reason="the native kernels are not there")
@pytest.mark.parametrize("make", [make_qwen3_moe, make_deepseek_moe])
def test_bfloat16_is_kept_beneath_float32(tmp_path: Path, make: Callable[..., HfModel]) -> None:
    """Where all experts of a layer are in bfloat16, and in linear layers all of whose numbers are of it."""
    hf = make(tmp_path)
    other = "model.layers.2.mlp.experts.1.up_proj.weight"
    rewrite(hf.path, lambda tensors: {key: t if key == other else t.bfloat16() for key, t in tensors.items()})
    model, plain = (load_kept(hf.path, form, form) for form in (WeightFormat.BF16, WeightFormat.PLAIN))
    forms = {prefix: moe.experts.format for prefix, moe in model._hosts}  # type: ignore[attr-defined]
    assert forms.pop("model.layers.2.mlp.experts.") is WeightFormat.PLAIN
    assert forms and set(forms.values()) == {WeightFormat.BF16}
    linears = [part for part in model.modules() if isinstance(part, Linear)]  # type: ignore[attr-defined]
    assert all(part.packed is not None and part.packed.form is WeightFormat.BF16 for part in linears)
    expected_TV = chunked_logits(plain, TOKENS, [20, 4])
    assert relative_error(chunked_logits(model, TOKENS, [20, 4]), expected_TV) < 1e-6
    for (_, ours), (_, theirs) in zip(model._hosts, plain._hosts, strict=True):  # type: ignore[attr-defined]
        for kept, wanted in zip(ours.experts.read_slot(1), theirs.experts.read_slot(1), strict=True):
            assert torch.equal(kept, wanted)


@pytest.mark.parametrize("form", [WeightFormat.PLAIN, WeightFormat.INT8])
def test_a_tied_head_and_its_embedding_are_one_part(tmp_path: Path, form: WeightFormat) -> None:
    """Ranks that fill a store together make parts of it: a head is made by the rank that has read the embedding."""
    hf = make_llama(tmp_path, tie_word_embeddings=True)
    model = load_kept(hf.path, form)
    parts: list[Part] = []
    model.load_parts = lambda found, *_: parts.extend(found)  # type: ignore[attr-defined]
    model.load(Checkpoint(hf.path))
    with_head = [part for part in parts if model.head in list(part.module.modules())]  # type: ignore[attr-defined]
    assert len(with_head) == 1 and model.embed in list(with_head[0].module.modules())  # type: ignore[attr-defined]
    kept = kept_tensors(with_head[0].module)
    assert sum(tensor.numel() == VOCAB * 32 and tensor.is_floating_point() for tensor in kept.values()) == 1


def load_kept(path: Path, form: WeightFormat, experts: WeightFormat = WeightFormat.PLAIN) -> CausalLM:
    """With all linear layers in `form`."""
    model = build(read_config(path), single_rank(path), torch.float32, CPU)
    model.keep_experts(experts)
    model.keep_linears(form)
    model.load(Checkpoint(path))
    return model


def test_keys_that_repeat_what_is_known(tmp_path: Path) -> None:
    """Old Llamas carry rotary frequencies; some tied checkpoints carry the head nevertheless."""
    hf = make_llama(tmp_path, tie_word_embeddings=True)

    def add(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
        return {**tensors, **extra, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    rewrite(tmp_path, add)
    assert error(hf) < 1e-4


def test_every_key_must_be_used_and_present(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "model.layers.9.mlp.odd": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.9\.mlp\.odd"):
        load_ours(tmp_path)
    rewrite(tmp_path, lambda t: {k: v for k, v in t.items() if k != "model.layers.1.self_attn.k_norm.weight"})
    with pytest.raises(CheckpointError, match=r"missing key model\.layers\.1\.self_attn\.k_norm\.weight"):
        load_ours(tmp_path)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_reads_only_its_experts(tmp_path: Path, size: int, fused: bool) -> None:
    """Seen with `pytest -s`: two ranks read each half of the experts, and all of the rest."""
    make_qwen3_moe(tmp_path, moe_intermediate_size=64)
    if fused:
        rewrite(tmp_path, fuse_experts)
    config = read_config(tmp_path)
    placement = linear_placement(config.num_moe_layers, config.num_experts, size)
    expert_bytes = 3 * 8 * 3 * 64 * 32 * 4  # layers x experts x projections x width x hidden x float32
    total = tensor_bytes(tmp_path)
    for rank in range(size):
        parallel = Parallel(rank, size, placement, lambda slots, _hidden: [LocalAllToAll(slots)])
        model = build(config, parallel, torch.float32, CPU)
        checkpoint = Checkpoint(tmp_path)
        model.load(checkpoint)
        checkpoint.finish()
        print(f"{size} ranks: rank {rank} read {checkpoint.bytes_read:,} of {total:,} bytes of tensors")
        assert checkpoint.bytes_read == total - expert_bytes + expert_bytes // size


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of the checkpoint, as its headers say."""
    seen: list[int] = []
    checkpoint = Checkpoint(path, progress=lambda _done, total: seen.append(total))
    for name in checkpoint.names():
        checkpoint.skip(name)
    return seen[-1]
