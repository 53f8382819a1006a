"""The layer that drafts: its drafts are those of transformers' MtpModel, and its weights are the checkpoint's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_tiny
import hf_tiny
import pytest
import torch
from hf_tiny import HfModel
from rank_parts import Job, make_plan
from torch import Tensor
from transformers.modeling_layers import MtpModel

from configs.engine import EngineConfig
from configs.speculation import SpeculativeConfig
from engine.build import build_rank
from engine.plan import make_plan as plan_of
from engine.rank import Rank
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.speculation
torch.set_num_threads(1)

PROMPTS = [[3 + 7 * i % 80 for i in range(11)], [5, 6, 7], [2 + 11 * i % 90 for i in range(30)]]
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=4)


def with_mtp(hf: HfModel, own_head: bool = False) -> MtpModel:
    """A random MTP layer, written behind the layers of the checkpoint, with copies of the embedding and the head."""
    torch.manual_seed(5)
    mtp = MtpModel(hf.model, 1).float().eval()
    mtp.tie_with_main_model(hf.model)
    layer = mtp.layers[0]
    hf_tiny.randomize(layer)
    prefix = f"model.layers.{hf.model.config.num_hidden_layers}."
    names = {"mtp_block.": "", "post_norm.": "shared_head.norm."}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        more = {
            f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
            f"{prefix}shared_head.head.weight": tensors["lm_head.weight"] + own_head,
        }
        for name, tensor in layer.state_dict().items():
            for old, new in names.items():
                name = name.replace(old, new)
            more[prefix + name] = tensor.clone()
        return {**tensors, **more}

    hf_tiny.rewrite(hf.path, change, num_nextn_predict_layers=1)
    return mtp


def drafts_of(hf: HfModel, mtp: MtpModel, tokens: list[int], count: int) -> list[int]:
    """By whole passes over the sequence: the layer's own states stand for the model's behind its end."""
    with torch.inference_mode():
        states = hf.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
        following = [*tokens[1:], int(hf.model.lm_head(states[0, -1]).argmax())]
        found: list[int] = []
        for _ in range(count):
            ids, places = torch.tensor([following]), torch.arange(1, len(following) + 1)[None]
            out = mtp.forward_layer(0, states, places, None, input_ids=ids)
            found.append(int(mtp.shared_head(out[0, -1]).argmax()))
            states = torch.cat((states, out[:, -1:]), 1)
            following.append(found[-1])
    return found


@pytest.mark.parametrize("make", [deepseek_tiny.make_v3, hf_tiny.make_glm4_moe], ids=["deepseek_v3", "glm4_moe"])
def test_drafts_are_those_of_transformers(tmp_path: Path, make: Callable[..., HfModel]) -> None:
    hf = make(tmp_path, num_mtp_layers=1)
    mtp = with_mtp(hf)
    for prompt in PROMPTS:
        rank = build_rank(make_plan(hf.path, speculation=MTP, max_num_batched_tokens=8))
        rank.submit(Job(prompt, 24).message(0))
        for tokens, drafts in drafted(rank, prompt):
            assert drafts == drafts_of(hf, mtp, tokens[:-1], 4)
        rank.close()


def drafted(rank: Rank, prompt: list[int]) -> list[tuple[list[int], list[int]]]:
    """Behind every step: the known tokens and their drafts."""
    tokens, found = list(prompt), []
    drafter = rank._scheduler.speculation._model
    assert drafter is not None
    while rank.has_work:
        for output in rank.step():
            tokens += output.new_token_ids
            if output.finish_reason is None:
                found.append((list(tokens), drafter._drafts[0][1]))
    assert len(found) > 3
    return found


def test_weights_of_its_own_are_refused(tmp_path: Path) -> None:
    hf = deepseek_tiny.make_v3(tmp_path, num_mtp_layers=1)
    with_mtp(hf, own_head=True)
    with pytest.raises(ValueError, match=r"layers.3.shared_head.head.weight is not lm_head.weight"):
        build_rank(make_plan(hf.path, speculation=MTP))
    build_rank(make_plan(hf.path)).close()  # without drafts the layer is skipped


def test_who_has_one(tmp_path: Path) -> None:
    hf = hf_tiny.make_qwen3_moe(tmp_path)
    with pytest.raises(ValueError, match="method mtp needs an MTP layer"):
        plan_of(EngineConfig(model=str(hf.path), speculative_config={"method": "mtp"}))
    plan = plan_of(EngineConfig(model=str(hf.path)))
    assert plan.speculation is not None and plan.speculation.method == "prediction"
    plan = plan_of(EngineConfig())
    assert plan.speculation is not None and plan.speculation.method == "mtp"
    assert plan_of(EngineConfig(speculative_config={"method": "none"})).speculation is None


def test_the_embedded_model_accepts_most_drafts() -> None:
    rank = build_rank(make_plan(CHECKPOINT, max_model_len=256, block_size=16, speculation=MTP))
    rank.submit(Job([1, 300, 412, 250], 120, params={"ignore_eos": True}).message(0))
    while rank.has_work:
        rank.step()
    stats = rank.stats
    assert stats.spec_accepted_per_pos[0] > 0.6 * stats.spec_drafts
    assert stats.steps < 80
    rank.close()


def test_explained() -> None:
    reasons: dict[str, Any] = plan_of(EngineConfig()).reasons
    assert "MTP" in reasons["speculation"]
