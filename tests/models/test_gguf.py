"""GGUF files are read as what they stand for: blocks, names, config, tokenizer, and whole models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_tiny import make_v3
from gguf_files import gguf_names, numbers_of, plain, q4_0, q8_0, tokenizer_metadata, write_gguf, write_parts
from hf_tiny import (
    VOCAB,
    HfModel,
    chunked_logits,
    load_ours,
    make_llama,
    make_qwen2,
    make_qwen3,
    make_qwen3_moe,
    relative_error,
    single_rank,
)
from safetensors.torch import load_file
from torch import Tensor

from configs.engine import EngineConfig, Plan
from engine.build import build_rank
from engine.plan import make_plan, model_numbers
from engine.process.local_ranks import LocalRanks
from ep.experts import WeightFormat
from front.llm import LLM
from front.params import SamplingParams
from front.text.tokenizer import Tokenizer
from layers.gguf.blocks import FORMS, convert, widen
from layers.gguf.header import KINDS, read_header
from layers.identity import CheckpointError
from layers.linear import Linear
from layers.stored import StoredForm, StoredWeight
from layers.weights import Checkpoint
from models.fields import ConfigError
from models.gguf.directory import model_directory
from models.registry import build, read_config
from models.tiny import CHECKPOINT
from native import Isa, isa

pytestmark = pytest.mark.parity

TOKENS = [(7 * i) % VOCAB for i in range(24)]
DENSE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
NAMES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3moe": "Qwen3Moe", "deepseek2": "DeepseekV3"}
MAKERS: dict[str, Callable[[Path], HfModel]] = {
    "llama": lambda path: make_llama(path, tie_word_embeddings=True, **DENSE),
    "qwen2": lambda path: make_qwen2(path, **DENSE),
    "qwen3": lambda path: make_qwen3(path, **{**DENSE, "head_dim": 16}),
    "qwen3moe": lambda path: make_qwen3_moe(
        path, hidden_size=64, head_dim=16, moe_intermediate_size=32, num_hidden_layers=2
    ),
    "deepseek2": lambda path: make_v3(path, num_hidden_layers=2),
}


def metadata_of(architecture: str, config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    fields: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "context_length": config.max_position_embeddings,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if architecture in ("qwen3", "qwen3moe"):
        fields["attention.key_length"] = config.head_dim
    if architecture in ("qwen3moe", "deepseek2"):
        count = config.num_experts if architecture == "qwen3moe" else config.n_routed_experts
        fields |= {
            "expert_count": count,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if architecture == "deepseek2":
        fields |= {
            "expert_gating_func": 2,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_weights_norm": bool(config.norm_topk_prob),
            "leading_dense_block_count": config.first_k_dense_replace,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "rope.dimension_count": config.qk_rope_head_dim,
            "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length": config.v_head_dim,
            **({"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {}),
        }
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in fields.items()}}


def as_gguf(
    hf: HfModel,
    architecture: str,
    path: Path,
    weights: Callable[[str, Tensor], Any] = lambda name, tensor: plain(tensor),
    write: Callable[[Path, dict[str, Any], dict[str, Any]], object] = write_gguf,
) -> Path:
    heads = {"attn_q": hf.model.config.num_attention_heads, "attn_k": hf.model.config.num_key_value_heads}
    tensors = gguf_names(load_file(hf.path / "model.safetensors"), heads if architecture == "llama" else {})
    tokens = {**tokenizer_metadata(CHECKPOINT), "tokenizer.ggml.add_bos_token": False}
    write(
        path,
        {**metadata_of(architecture, hf.model.config), **tokens},
        {name: weights(name, tensor) for name, tensor in tensors.items()},
    )
    return path


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][0] > 1])
def test_blocks(kind: str) -> None:
    """Any bytes but for what is no number: their numbers one by one, and what they are kept as."""
    size, num_bytes = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, (5, 512 // size, num_bytes), generator=generator, dtype=torch.uint8)
    halves = [208] if kind == "Q6_K" else [0, 2] if kind.endswith(("1", "4_K", "5_K")) else [0]
    for at in halves:
        number = torch.rand(5, 512 // size, 1, generator=generator) * 0.02 - (0 if kind.endswith("K") else 0.01)
        rows[..., at : at + 2] = number.half().view(torch.uint8)
    wanted = torch.tensor([[x for block in row for x in numbers_of(kind, bytes(block.tolist()))] for row in rows])
    flat = rows.flatten(1)
    torch.testing.assert_close(widen(kind, flat), wanted, rtol=1e-5, atol=1e-7)
    made = convert(kind, flat)
    kept = StoredWeight(made.weight, made.scale, FORMS[kind], (5, 512), made.zero).widened()
    if kind == "Q4_0":
        assert torch.equal(kept, widen(kind, flat))
    elif FORMS[kind] is StoredForm.INT4_ZERO:
        groups = wanted.view(5, -1, 32)
        size_OG = 3 * groups.abs().amax(-1) + groups.amax(-1) - groups.amin(-1)
        assert ((kept - wanted).abs() <= 2.0**-10 * size_OG.repeat_interleave(32, 1) + 1e-6).all()
    else:
        step = wanted.view(5, -1, 128).abs().amax(-1).repeat_interleave(128, 1) / 127
        assert ((kept - wanted).abs() <= 0.51 * step).all()


def test_a_group_of_one_number() -> None:
    """Q4_1 whose scale is nothing, or next to nothing, beside its least number."""
    rows = torch.zeros(3, 20, dtype=torch.uint8)
    rows[:, 4:] = 0x5A
    for row, (scale, least) in zip(rows, ((0.0, 0.25), (1e-7, -3.0), (0.0, 0.0)), strict=True):
        row[:4] = torch.tensor([scale, least]).half().view(torch.uint8)
    made = convert("Q4_1", rows)
    kept = StoredWeight(made.weight, made.scale, StoredForm.INT4_ZERO, (3, 32), made.zero).widened()
    torch.testing.assert_close(kept, torch.tensor([0.25, -3.0, 0.0])[:, None].expand(3, 32), rtol=1e-3, atol=0)


@pytest.mark.parametrize("architecture", MAKERS)
def test_a_whole_model(tmp_path: Path, architecture: str) -> None:
    hf = MAKERS[architecture](tmp_path / "hf")
    directory = model_directory(as_gguf(hf, architecture, tmp_path / "m.gguf"), tmp_path / "cache")
    assert json.loads((directory / "config.json").read_text())["architectures"] == [f"{NAMES[architecture]}ForCausalLM"]
    ours = load_ours(directory)
    assert relative_error(chunked_logits(ours, TOKENS, [20, 4]), hf.logits(TOKENS)) < 1e-4
    assert model_directory(tmp_path / "m.gguf", tmp_path / "cache") == directory


_WIDE = ("attn_v", "token_embd")


@pytest.mark.skipif(isa() == Isa.NONE, reason="4 bits are kept by the native kernels only")
@pytest.mark.parametrize(
    ("architecture", "wide", "kept"),
    [
        ("llama", _WIDE, None),
        ("qwen3moe", _WIDE, WeightFormat.INT4),
        ("qwen3moe", (*_WIDE, "down_exps"), WeightFormat.INT4_INT8),
        ("qwen3moe", (*_WIDE, "up_exps"), WeightFormat.INT8),
    ],
)
def test_4_bits_stay_so(tmp_path: Path, architecture: str, wide: tuple[str, ...], kept: WeightFormat | None) -> None:
    """And 8 bits, in `wide`, where some parts of what lies together have them."""
    hf = MAKERS[architecture](tmp_path / "hf")
    meant: dict[str, Tensor] = {}

    def weights(name: str, tensor: Tensor) -> Any:
        if tensor.dim() == 1 or "gate_inp" in name:
            return plain(tensor)
        made, meant[name] = (q8_0 if any(part in name for part in wide) else q4_0)(tensor)
        return made

    directory = model_directory(as_gguf(hf, architecture, tmp_path / "m.gguf", weights), tmp_path / "cache")
    state = load_file(hf.path / "model.safetensors")
    heads = {"attn_q": hf.model.config.num_attention_heads, "attn_k": hf.model.config.num_key_value_heads}
    for name in state:
        for key in gguf_names({name: state[name]}, {}) if ".experts." not in name else ():
            if key in meant:
                paired = heads.get(key.split(".")[-2], 0) if architecture == "llama" else 0
                state[name] = unpaired(meant[key], paired)
    for key, tensor in meant.items():
        if "_exps" in key:
            _, layer, part, _ = key.split(".")
            for expert in range(tensor.shape[0]):
                state[f"model.layers.{layer}.mlp.experts.{expert}.{part[4:-5]}_proj.weight"] = tensor[expert]
    state = fused_if(hf, state)
    hf.model.load_state_dict(state, strict=False)
    ours_model = load_ours(directory)
    error = relative_error(chunked_logits(ours_model, TOKENS, [20, 4]), hf.logits(TOKENS))
    assert error < 0.1  # 8 bits are rounded once more, to one scale for 128
    forms = {module.packed.form for module in ours_model.modules() if isinstance(module, Linear) and module.packed}
    assert {WeightFormat.INT4, WeightFormat.INT8} <= forms
    if architecture == "qwen3moe":
        assert ours_model.moe_layers[0][1].experts.format is kept


def unpaired(tensor: Tensor, heads: int) -> Tensor:
    if not heads:
        return tensor
    return tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def fused_if(hf: HfModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers holds the experts of a layer in one tensor."""
    out = dict(state)
    for name, parameter in hf.model.named_parameters():
        stem, _, kind = name.rpartition(".")
        if kind == "gate_up_proj" and name not in state:
            count = parameter.shape[0]
            out[name] = torch.stack(
                [torch.cat([state[f"{stem}.{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in range(count)]
            )
            out[f"{stem}.down_proj"] = torch.stack([state[f"{stem}.{e}.down_proj.weight"] for e in range(count)])
    return out


def test_the_tokenizer(tmp_path: Path) -> None:
    hf = make_llama(tmp_path / "hf", **DENSE)
    tokens = tokenizer_metadata(CHECKPOINT)
    tensors = gguf_names(load_file(hf.path / "model.safetensors"), {"attn_q": 4, "attn_k": 2})
    write_gguf(
        tmp_path / "m.gguf",
        {**metadata_of("llama", hf.model.config), **tokens},
        {name: plain(tensor) for name, tensor in tensors.items()},
    )
    ours, theirs = Tokenizer(model_directory(tmp_path / "m.gguf", tmp_path / "cache")), Tokenizer(CHECKPOINT)
    for text in ("Once upon a time", "  two  spaces\n\tand tabs", "Grüße, 世界! 12345", "<|user|>hi<|assistant|>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.special_ids == theirs.special_ids and ours.bos_token == theirs.bos_token


def test_sentencepiece(tmp_path: Path) -> None:
    """The best pair first; bytes for what no token has."""
    hf = make_llama(tmp_path / "hf", **DENSE)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab", "ba"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -3.0, -4.0, -1.0]
    told: dict[str, Any] = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 7, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    tensors = gguf_names(load_file(hf.path / "model.safetensors"), {"attn_q": 4, "attn_k": 2})
    named = {name: plain(tensor) for name, tensor in tensors.items()}
    write_gguf(tmp_path / "m.gguf", {**metadata_of("llama", hf.model.config), **told}, named)
    tokenizer = Tokenizer(model_directory(tmp_path / "m.gguf", tmp_path / "cache"))
    ids = {token: number for number, token in enumerate(tokens)}
    assert tokenizer.encode("ab") == [1, ids["▁ab"]]
    assert tokenizer.encode("aba") == [1, ids["▁a"], ids["ba"]]
    assert tokenizer.encode("é") == [1, ids["▁"], ids["<0xC3>"], ids["<0xA9>"]]
    assert tokenizer.decode(tokenizer.encode("ab aé b")) == "ab aé b"


def test_what_cannot_be_read(tmp_path: Path) -> None:
    hf = make_llama(tmp_path / "hf", **DENSE)
    path = as_gguf(hf, "llama", tmp_path / "m.gguf")
    whole = path.read_bytes()
    cases = [
        (whole[:-4], "cut short"),
        (whole[:100], "cut short"),
        (b"GGML" + whole[4:], "not a GGUF file"),
        (
            whole.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00lemma"),
            "one of llama",
        ),
        (whole.replace(b"gpt-2", b"gpt-x"), "tokenizer.ggml.pre"),
        (whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"), "blk.0.attn_x.weight"),
        (whole.replace(b"llama.block_count", b"llama.block_coun_"), "llama.block_count"),
    ]
    for number, (content, said) in enumerate(cases):
        broken = tmp_path / f"{number}.gguf"
        broken.write_bytes(content)
        with pytest.raises((CheckpointError, ConfigError), match=said):
            model_directory(broken, tmp_path / "cache")
    assert read_header(path).tensors["token_embd.weight"].shape == (VOCAB, 64)


def test_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))
    path = as_gguf(make_qwen2(tmp_path / "hf", **DENSE), "qwen2", tmp_path / "m.gguf")
    plan = make_plan(EngineConfig(model=str(path)))
    assert plan.served_model_names == (str(path),) and "m.gguf" in plan.checkpoint
    with pytest.raises(ValueError, match="is not a directory, nor a"):
        make_plan(EngineConfig(model=str(tmp_path / "none.gguf")))


def tokens_of(path: Path) -> tuple[Plan, list[list[int]]]:
    plan = make_plan(EngineConfig(model=str(path), max_model_len=64, max_num_seqs=2, data_parallel_size=1))
    with LLM(LocalRanks(build_rank(plan)), Tokenizer(Path(plan.model_path)), block_size=plan.block_size) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        found = llm.generate([TOKENS, TOKENS[:5]], greedy)
    return plan, [result.outputs[0].token_ids for result in found]


@pytest.mark.parametrize("counts", [[9, 1], [0, 12]])
def test_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
    """Each names the model: the tokens are those of one file, the identity covers them all. The first may have metadata
    only."""
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))
    hf = MAKERS["qwen3moe"](tmp_path / "hf")
    parts: list[Path] = []

    def weights(name: str, tensor: Tensor) -> Any:
        return plain(tensor) if tensor.dim() == 1 or "gate_inp" in name else q4_0(tensor)[0]

    whole = as_gguf(hf, "qwen3moe", tmp_path / "m.gguf", weights)
    as_gguf(hf, "qwen3moe", whole, weights, lambda *what: parts.extend(write_parts(*what, counts)))
    one, wanted = tokens_of(whole)
    plan, found = tokens_of(parts[1])
    assert found == wanted and {part.name for part in parts} <= set(plan.checkpoint)
    paths = [Path(one.model_path), Path(plan.model_path)]
    counted = [model_numbers(path, "m", read_config(path)) for path in paths]
    assert len({(n.weight_bytes, n.expert_bytes, n.half_experts, n.dtype) for n in counted}) == 1
    linked = tmp_path / "linked.gguf"
    linked.symlink_to(parts[2])
    assert {make_plan(EngineConfig(model=str(path))).model_path for path in (*parts, linked)} == {plan.model_path}
    os.utime(parts[2], ns=(0, 0))
    other = make_plan(EngineConfig(model=str(parts[0])))
    assert other.model_path != plan.model_path and other.checkpoint != plan.checkpoint


def test_parts_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))
    hf = make_qwen2(tmp_path / "hf", **DENSE)
    parts: list[Path] = []
    as_gguf(hf, "qwen2", tmp_path / "m.gguf", write=lambda *what: parts.extend(write_parts(*what, [9, 1])))
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(parts[0].read_bytes())
    contents = [part.read_bytes() for part in parts]

    def refused(path: Path, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            make_plan(EngineConfig(model=str(path)))

    refused(alone, "split.count: expected 1 .*NAME-00001-of-00002.gguf")
    parts[1].write_bytes(contents[2])
    refused(parts[0], f"{parts[1].name}: split.no: expected 1 ")
    parts[1].write_bytes(contents[1].replace(b"split.no", b"split.on"))
    refused(parts[0], f"{parts[1].name}: split.no: expected 1 ")
    twice = next(iter(read_header(parts[0]).tensors))
    write_gguf(parts[1], {"split.no": 1, "split.count": 3}, {twice: plain(torch.ones(4, 4))})
    refused(parts[0], "also in m-00001-of-00003.gguf")
    write_gguf(parts[1], {"split.no": 1, "split.count": 3}, {})
    refused(parts[0], "split.tensors.count: ")
    parts[1].unlink()
    for path in parts:
        refused(path, f"{parts[1].name}: missing: part 2 of 3")


def test_threads_read_at_once(tmp_path: Path) -> None:
    """As those do that fill a store: each gets what it asked for."""
    hf = MAKERS["llama"](tmp_path / "hf")
    made = {"weights": lambda name, tensor: plain(tensor) if tensor.dim() == 1 else q4_0(tensor)[0]}
    directory = model_directory(as_gguf(hf, "llama", tmp_path / "m.gguf", **made), tmp_path / "cache")
    checkpoint = Checkpoint(directory)
    names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(2) for part in ("gate", "up", "down")]
    shapes = {name: tuple(load_file(hf.path / "model.safetensors")[name].shape) for name in names}
    alone = {name: checkpoint.borrow(name, shapes[name]).widened() for name in names}
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            together = pool.map(lambda name: checkpoint.borrow(name, shapes[name]).widened(), names)
            assert all(torch.equal(found, alone[name]) for name, found in zip(names, together, strict=True))


@pytest.mark.parametrize("form", [WeightFormat.INT8, WeightFormat.INT4, WeightFormat.MXFP4])
def test_a_format_that_was_asked_for(tmp_path: Path, form: WeightFormat) -> None:
    """Of a file in 4 bits whose head is its embedding."""
    if isa() == Isa.NONE:
        pytest.skip("needs the native kernels")
    hf = MAKERS["llama"](tmp_path / "hf")
    made = {"weights": lambda name, tensor: plain(tensor) if tensor.dim() == 1 else q8_0(tensor)[0]}
    directory = model_directory(as_gguf(hf, "llama", tmp_path / "m.gguf", **made), tmp_path / "cache")
    model = build(read_config(directory), single_rank(directory), torch.float32, torch.device("cpu"))
    model.keep_linears(form)
    model.load(Checkpoint(directory))
    forms = {module.packed.form for module in model.modules() if isinstance(module, Linear) and module.packed}
    assert forms == {form}
    assert relative_error(chunked_logits(model, TOKENS, [20, 4]), hf.logits(TOKENS)) < 0.8
