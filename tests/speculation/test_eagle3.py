"""EAGLE-3: drafts of a layer that was trained for a model are those of the formulas in plain torch, and streams are
those without drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepseek_tiny
import hf_tiny
import pytest
import torch
from drafting import DRAFTER
from eagle3_parts import Drafter
from hf_tiny import HfModel
from msgspec import structs
from overlapped import SPLIT
from rank_parts import Job, drive, mailbox_ranks, make_plan
from test_gguf import as_gguf
from test_mtp import PROMPTS, check_kills, check_streams, drafted

from configs.engine import EngineConfig
from configs.speculation import SpeculativeConfig, parse_speculative_config
from dbo.steps import drain, weave
from engine.build import build_rank
from engine.cluster import plan_cluster
from engine.plan import make_plan as plan_of
from models.eagle3.directory import model_directory, weight_bytes
from models.gqa.config import GqaConfig
from models.registry import read_config
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.speculation
torch.set_num_threads(1)

KINDS: dict[str, tuple[Callable[..., HfModel], tuple[int, ...], dict[str, Any]]] = {
    "own head": (hf_tiny.make_qwen3_moe, (0, 1, 2), {"few": 40}),
    "the model's": (hf_tiny.make_llama, (1, 2), {"norm_output": True}),
    "speculators": (hf_tiny.make_qwen3, (1,), {"few": 50, "prefix": "layers.0", "fc_norm": True}),
    "states": (hf_tiny.make_qwen3_next, (1, 2), {"few": 40}),
    "states and latents": (hf_tiny.make_kimi_linear, (1, 2), {"few": 40}),
    "indexer": (
        partial(deepseek_tiny.make_v32, n_routed_experts=8),
        (1, 3),
        {"norm_before_residual": True, "norm_before_fc": True},
    ),
    "windows": (hf_tiny.make_gpt_oss, (0, 2), {"few": 40, "under": "model."}),
    "latents": (partial(deepseek_tiny.make_v3, n_routed_experts=8), (1, 3), {"few": 60, "norm_before_residual": True}),
}


def made(tmp_path: Path, kind: str) -> tuple[HfModel, Drafter, Path]:
    make, layers, more = KINDS[kind]
    hf = make(tmp_path / "model")
    drafter = Drafter(hf, layers, **more)
    return hf, drafter, model_directory(hf.path, drafter.write(tmp_path / "drafter"), tmp_path / "both")


def config_of(tmp_path: Path) -> SpeculativeConfig:
    return SpeculativeConfig(method="eagle3", model=str(tmp_path / "drafter"), num_speculative_tokens=4, adaptive=False)


@pytest.mark.parametrize("graphs", ["none", "full_decode_only"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_formulas(tmp_path: Path, kind: str, graphs: str) -> None:
    _, drafter, path = made(tmp_path, kind)
    config = config_of(tmp_path)
    for prompt in PROMPTS:
        rank = build_rank(make_plan(path, speculation=config, max_num_batched_tokens=8, cudagraph_mode=graphs))
        rank.submit(Job(prompt, 12).message(0))
        for tokens, drafts in drafted(rank, prompt):
            assert drafts == drafter.drafts(tokens[:-1], 4)
        passes = rank._runner._passes
        assert passes is not None and bool(passes._captures) == (graphs != "none")
        refused = any(capture._refused for capture in passes._captures.values())
        assert not refused or "states" in kind, "a verification of layers with states has no graph"
        rank.close()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_with_it(tmp_path: Path, kind: str, size: int) -> None:
    hf, _, path = made(tmp_path, kind)
    check_streams(hf.path, path, size, config_of(tmp_path))


@pytest.mark.parametrize("graphs", ["none", "full_decode_only"])
def test_steps_in_two_parts(tmp_path: Path, graphs: str) -> None:
    """Each part keeps what the layer sees of it."""
    hf, drafter, path = made(tmp_path, "own head")
    plan = {"speculation": config_of(tmp_path), "slots_per_rank": 8, "dbo": SPLIT, "cudagraph_mode": graphs}
    ranks = mailbox_ranks(path, 2, **plan)
    ranks[0].submit(Job(PROMPTS[2], 12).message(0))
    model = ranks[0]._scheduler.speculation._model
    assert model is not None
    tokens, found = list(PROMPTS[2]), 0
    while ranks[0].has_work:
        for output in drain(weave(*(rank.steps() for rank in ranks)))[0]:
            tokens += output.new_token_ids
            if output.finish_reason is None:
                assert model._drafts[0][1] == drafter.drafts(tokens[:-1], 4)
                found += 1
    assert found > 3 and tokens[30:] == hf.greedy(PROMPTS[2], 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own head", "latents"])
def test_kills_at_any_moment(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    """Steps that a kill has broken off go on in the middle, where some of what the layer sees is gone."""
    folder = tmp_path_factory.mktemp("eagle3")
    hf, _, path = made(folder, kind)
    check_kills(hf.path, path, config_of(folder))


def test_most_drafts_of_a_trained_one_are_right() -> None:
    """As many as training says that there are (benchmarks/train_eagle3.py)."""
    plan = plan_of(EngineConfig(speculative_config={"method": "eagle3", "model": str(DRAFTER), "adaptive": False}))
    rank = build_rank(structs.replace(plan, data_parallel_size=1))
    prompt = [1, 300, 412, 250]
    (got,) = drive([rank], [Job(prompt, 120, params={"ignore_eos": True})])
    assert rank.stats.spec_accepted_per_pos[0] > 0.5 * rank.stats.spec_drafts
    plain = build_rank(make_plan(CHECKPOINT, max_model_len=256, block_size=16))
    assert got.tokens == drive([plain], [Job(prompt, 120, params={"ignore_eos": True})])[0].tokens
    rank.close()
    plain.close()


def test_one_checkpoint_of_two(tmp_path: Path) -> None:
    """What is planned is of both; a changed drafter is another one."""
    hf, drafter, _ = made(tmp_path, "own head")
    config = EngineConfig(
        model=str(hf.path), speculative_config={"method": "eagle3", "model": str(tmp_path / "drafter")}
    )
    plan = plan_of(config)
    assert plan.speculation is not None and "drafts" in plan.reasons["speculation"]
    assert {"eagle3.model.safetensors", "model.safetensors"} <= plan.checkpoint.keys()
    assert plan_of(config).model_path == plan.model_path != plan_of(EngineConfig(model=str(hf.path))).model_path
    rank = build_rank(plan)
    drive([rank], [Job(PROMPTS[0], 5)])
    assert rank.stats.spec_drafts
    rank.close()
    before = plan.model_path
    (hf.path / "chat_template.jinja").write_text("new")
    assert plan_of(config).model_path != before and (Path(plan_of(config).model_path) / "chat_template.jinja").is_file()
    drafter.own["fc.weight"] *= 2
    drafter.write(tmp_path / "drafter")
    assert plan_of(config).model_path != plan.model_path


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"hidden_size": 48}, "eagle3.config.hidden_size: expected 32, which the model has"),
        ({"vocab_size": 7}, "eagle3.config.vocab_size: expected"),
        ({"num_hidden_layers": 2}, "eagle3.config.num_hidden_layers: expected 1"),
        ({"norm_before_fc": True}, "eagle3.config.norm_before_fc: expected false where norm_before_residual is false"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state: expected null or true"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc: expected false where norm_before_residual"),
        ({"parallel_drafting": True}, "eagle3.config.parallel_drafting: expected null or false"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 9]}, "eagle_aux_hidden_state_layer_ids: expected numbers of layers"),
        ({"draft_vocab_size": 1000}, "eagle3.config.draft_vocab_size: expected at most"),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle3.config.architectures: expected"),
        ({"speculators_model_type": "peagle"}, "eagle3.config.speculators_model_type: expected"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    hf, drafter, _ = made(tmp_path, "own head")
    drafter.write(tmp_path / "drafter", **change)
    config = {"method": "eagle3", "model": str(tmp_path / "drafter")}
    with pytest.raises(ValueError, match=error) as caught:
        plan_of(EngineConfig(model=str(hf.path), speculative_config=config))
    assert "\n" not in str(caught.value)


def test_without_a_drafter(tmp_path: Path) -> None:
    for asked, error in (
        ({"method": "eagle3"}, "model must be the directory of the drafter of method eagle3, not ''"),
        ({"method": "mtp", "model": "here"}, "model must be the directory of the drafter of method eagle3, not 'here'"),
        ({"method": "eagle3", "model": str(tmp_path / "none")}, "drafter '.*none' is not a directory"),
    ):
        with pytest.raises(ValueError, match=error):
            plan_of(EngineConfig(speculative_config=asked))


def test_on_a_cluster(tmp_path: Path) -> None:
    """Its weights and its rows of the cache are planned."""
    hf, _, _ = made(tmp_path, "own head")
    drafts = {"method": "eagle3", "model": str(tmp_path / "drafter")}
    configs = [EngineConfig(model=str(hf.path), speculative_config=asked) for asked in ({"method": "none"}, drafts)]
    plain, drafting = (plan_cluster(config, "h200", lambda _: True) for config in configs)
    assert drafting.plan.speculation is not None and drafting.plan.speculation.model == drafts["model"]
    (hf.path / "model.safetensors").unlink()  # then it is planned by the shapes
    shaped = [plan_cluster(config, "h200", lambda _: True) for config in configs]
    weights, size = "attention, embeddings and other weights", weight_bytes(tmp_path / "drafter")
    for one, other in ((plain, drafting), shaped):
        more = other.memory[weights] - one.memory[weights]
        assert 0.4 * size < more <= size, "in bfloat16, or as they are stored"
        assert other.parameters == one.parameters
    assert any("draft_key" in name for name in drafting.memory) and not any("draft" in name for name in plain.memory)


def test_beside_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))
    hf = hf_tiny.make_llama(tmp_path / "hf")
    file = as_gguf(hf, "llama", tmp_path / "m.gguf")
    drafter = Drafter(hf, (1, 2), few=40).write(tmp_path / "drafter")
    found = []
    for asked in ({"method": "none"}, {"method": "eagle3", "model": str(drafter), "adaptive": False}):
        rank = build_rank(plan_of(EngineConfig(model=str(file), dtype="float32", speculative_config=asked)))
        found.append([got.tokens for got in drive([rank], [Job(prompt, 20) for prompt in PROMPTS])])
        assert bool(rank.stats.spec_drafts) == (asked["method"] == "eagle3")
        rank.close()
    assert found[0] == found[1]


def test_where_it_may_say_what_it_sees(tmp_path: Path) -> None:
    hf, drafter, _ = made(tmp_path, "own head")
    nothing: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": None}
    count = hf.model.config.num_hidden_layers
    for change, layers in (
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 0]}}, (0, 2)),
        ({}, tuple(sorted({2, count // 2, count - 3}))),
    ):
        path = model_directory(hf.path, drafter.write(tmp_path / "drafter", **nothing, **change), tmp_path / "others")
        facts = read_config(path)
        assert isinstance(facts, GqaConfig) and facts.eagle3 is not None and facts.eagle3.layers == layers


def test_as_vllm_is_asked_for_it() -> None:
    config = parse_speculative_config({"model": "a/b", "draft_tensor_parallel_size": 1, "num_speculative_tokens": 2})
    assert config == SpeculativeConfig(method="eagle3", model="a/b", num_speculative_tokens=2)


def test_a_model_that_looks_back_a_window_only(tmp_path: Path) -> None:
    hf = hf_tiny.make_mistral(tmp_path / "model", sliding_window=8)
    config = {"method": "eagle3", "model": str(Drafter(hf, (1, 2)).write(tmp_path / "drafter"))}
    with pytest.raises(ValueError, match="needs a model with a layer that attends to everything"):
        plan_of(EngineConfig(model=str(hf.path), speculative_config=config))


def test_a_checkpoint_without_the_layer(tmp_path: Path) -> None:
    hf, drafter, _ = made(tmp_path, "own head")
    del drafter.own["midlayer.hidden_norm.weight"]
    path = model_directory(hf.path, drafter.write(tmp_path / "drafter"), tmp_path / "others")
    with pytest.raises(ValueError, match=r"eagle3\.midlayer\.hidden_norm\.weight"):
        build_rank(make_plan(path, speculation=config_of(tmp_path)))


def test_a_token_that_the_model_has_not(tmp_path: Path) -> None:
    hf, drafter, _ = made(tmp_path, "own head")
    drafter.own["d2t"][3] = 1 << 20
    path = model_directory(hf.path, drafter.write(tmp_path / "drafter"), tmp_path / "others")
    with pytest.raises(ValueError, match=r"eagle3.d2t: a token that is not below the model's"):
        build_rank(make_plan(path, speculation=config_of(tmp_path)))
