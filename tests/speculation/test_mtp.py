"""The layer that drafts: its drafts are those of transformers' MtpModel, and its weights are the checkpoint's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_tiny
import hf_tiny
import pytest
import torch
from amounts import examples
from hf_tiny import HfModel
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from rank_parts import Job, drive, mailbox_ranks, make_plan
from survivors import Survivors, tight
from torch import Tensor
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from configs.engine import EngineConfig
from configs.speculation import SpeculativeConfig
from engine.build import build_rank
from engine.plan import make_plan as plan_of
from engine.plan import model_numbers
from engine.rank import Rank
from models.facts import with_drafts
from models.registry import read_config
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.speculation
torch.set_num_threads(1)

PROMPTS = [[3 + 7 * i % 80 for i in range(11)], [5, 6, 7], [2 + 11 * i % 90 for i in range(30)]]
FULL_LAYER = 1  # of the small Qwen3-Next, which attends to everything
LAST_LAYER = 2  # of the others: with experts, and an indexer
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=4, adaptive=False)


def with_mtp(hf: HfModel, own_head: bool = False) -> MtpModel:
    """A random MTP layer, written behind the layers of the checkpoint, with copies of the embedding and the head."""
    torch.manual_seed(5)
    mtp = MtpModel(hf.model, 1).float().eval()
    mtp.tie_with_main_model(hf.model)
    write_mtp(hf, mtp.layers[0], own_head)
    return mtp


def write_mtp(hf: HfModel, layer: torch.nn.Module, own_head: bool = False) -> None:
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


class OwnMtp(torch.nn.Module, ABC):
    """What transformers leaves out of a family, of its blocks there."""

    def __init__(self, hf: HfModel) -> None:
        super().__init__()
        self._main = [hf.model]  # in a list, so that it is no part of this module

    @abstractmethod
    def layer(self, embedded: Tensor, states: Tensor, **more: Any) -> Tensor:
        """The layer with its norms. more: rope and mask, as transformers names them."""

    def forward_layer(self, _: int, states: Tensor, places: Tensor, cache: None, input_ids: Tensor) -> Tensor:
        main, length = self._main[0].model, states.shape[1]
        causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
        more = {"position_embeddings": main.rotary_emb(states, places), "attention_mask": causal}
        return self.layer(main.embed_tokens(input_ids), states, **more)

    def shared_head(self, state: Tensor) -> Tensor:
        logits: Tensor = self._main[0].lm_head(state)
        return logits


# By model_type: where transformers has the blocks, and how their names begin.
NEXT_BLOCKS = {
    "qwen3_next": (modeling_qwen3_next, "Qwen3Next"),
    "qwen3_5_moe_text": (modeling_qwen3_5_moe, "Qwen3_5Moe"),
    "qwen3_5_text": (modeling_qwen3_5, "Qwen3_5"),
}
NEXT = [hf_tiny.make_qwen3_next, hf_tiny.make_qwen3_5_moe, hf_tiny.make_qwen3_5]
NEXT_IDS = ["qwen3_next", "qwen3_5_moe", "qwen3_5"]


class NextMtp(OwnMtp):
    """Of Qwen3-Next and Qwen3.5."""

    def __init__(self, hf: HfModel) -> None:
        super().__init__(hf)
        config = hf.model.config
        blocks, name = NEXT_BLOCKS[config.model_type]
        norm, layer = getattr(blocks, f"{name}RMSNorm"), getattr(blocks, f"{name}DecoderLayer")
        norms = [norm(config.hidden_size, config.rms_norm_eps) for _ in range(3)]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = torch.nn.ModuleList([layer(config, FULL_LAYER)])

    def layer(self, embedded: Tensor, states: Tensor, **more: Any) -> Tensor:
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)), -1))
        out: Tensor = self.norm(self.layers[0](x, **more))
        return out


class SparseMtp(OwnMtp):
    """Of DeepSeek-V3.2 and GLM-5: `layers` as MtpModel has them."""

    def __init__(self, hf: HfModel) -> None:
        super().__init__(hf)
        config, like = hf.model.config, hf.model.model.layers[-1]
        self.layers = torch.nn.ModuleList([MtpLayer(config, type(like), type(like.input_layernorm), LAST_LAYER)])
        # GLM-5's also tells what it has chosen.
        self.layers[0].mtp_block.register_forward_hook(lambda _, given, out: out[0] if isinstance(out, tuple) else out)

    def layer(self, embedded: Tensor, states: Tensor, **more: Any) -> Tensor:
        out: Tensor = self.layers[0](embedded, states, position_ids=None, past_key_values=None, **more)
        return out


def with_next_mtp(hf: HfModel, fused: bool = False) -> NextMtp:
    """Random, and written to the checkpoint as Qwen has it: a key for each expert, or (fused) one for all."""
    torch.manual_seed(5)
    mtp = NextMtp(hf).float().eval()
    hf_tiny.randomize(mtp)
    stored = {f"mtp.{name}": tensor.clone() for name, tensor in mtp.state_dict().items()}
    prefix = "mtp.layers.0.mlp.experts."
    if f"{prefix}down_proj" in stored and not fused:
        split_experts(stored, prefix)
    hf_tiny.rewrite(hf.path, lambda tensors: {**tensors, **stored})
    return mtp


def split_experts(stored: dict[str, Tensor], prefix: str) -> None:
    gate_up, down = stored.pop(f"{prefix}gate_up_proj"), stored.pop(f"{prefix}down_proj")
    for expert in range(len(down)):
        gate, up = gate_up[expert].chunk(2)
        for name, tensor in (("gate", gate), ("up", up), ("down", down[expert])):
            stored[f"{prefix}{expert}.{name}_proj.weight"] = tensor.clone()


def drafts_of(hf: HfModel, mtp: MtpModel | OwnMtp, tokens: list[int], count: int) -> list[int]:
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


def check_drafts(hf: HfModel, mtp: MtpModel | OwnMtp) -> None:
    for prompt in PROMPTS:
        rank = build_rank(make_plan(hf.path, speculation=MTP, max_num_batched_tokens=8))
        rank.submit(Job(prompt, 12).message(0))
        for tokens, drafts in drafted(rank, prompt):
            assert drafts == drafts_of(hf, mtp, tokens[:-1], 4)
        rank.close()


@pytest.mark.parametrize("make", [deepseek_tiny.make_v3, hf_tiny.make_glm4_moe], ids=["deepseek_v3", "glm4_moe"])
def test_drafts_are_those_of_transformers(tmp_path: Path, make: Callable[..., HfModel]) -> None:
    hf = make(tmp_path, num_mtp_layers=1)
    mtp = with_mtp(hf)
    check_drafts(hf, mtp)


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


def check_streams(plain: Path, path: Path, size: int, speculation: SpeculativeConfig) -> None:
    """plain: the same model, where nothing drafts."""
    jobs = [Job(prompt, 20 + 3 * index, arrive=index) for index, prompt in enumerate(PROMPTS)]
    expected = [got.tokens for got in drive([build_rank(make_plan(plain, max_num_seqs=1))], jobs)]
    ranks = mailbox_ranks(path, size, speculation=speculation, max_num_batched_tokens=16, num_kv_blocks=40)
    assert [got.tokens for got in drive(ranks, jobs)] == expected
    assert sum(rank.stats.spec_drafts for rank in ranks) > 0
    for rank in ranks:
        rank._scheduler.kv.check([])
        rank.close()


def check_kills(plain: Path, path: Path, speculation: SpeculativeConfig) -> None:
    """The same of ranks that die at any moment."""
    jobs = [Job(prompt[:14], 12 + index) for index, prompt in enumerate(PROMPTS)]
    alone = build_rank(make_plan(plain, max_num_seqs=1))
    expected = {index: got.tokens for index, got in enumerate(drive([alone], jobs))}

    @settings(max_examples=examples(8), deadline=None)
    @given(st.data())
    def endure(data: st.DataObject) -> None:
        cluster = Survivors(path, 3, slots_per_rank=8, max_model_len=36, speculation=speculation, **tight(data, 9))
        cluster.endure(jobs, data)
        assert cluster.released == expected

    endure()


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


@pytest.mark.parametrize("size", [1, 2])
def test_the_whole_layer_on_every_rank(size: int) -> None:
    """Without exchanges: the stream is the same, and so are the drafts."""
    jobs = [Job([1, 300, 412, 250], 60, params={"ignore_eos": True}), Job([1, 9, 700], 40, params={"ignore_eos": True})]
    found = []
    for whole in (False, True):
        config = structs.replace(MTP, whole=whole)
        ranks = mailbox_ranks(CHECKPOINT, size, max_model_len=256, block_size=16, speculation=config)
        streams = [got.tokens for got in drive(ranks, jobs)]
        found.append((streams, sum(rank.stats.spec_accepted_tokens for rank in ranks)))
        for rank in ranks:
            assert rank._team.placement is not None and len(rank._team.placement.slot_to_expert) == 4 - whole
            rank._scheduler.kv.check([])
            rank.close()
    assert found[0] == found[1] and found[0][1] > 0


def test_explained() -> None:
    reasons: dict[str, Any] = plan_of(EngineConfig()).reasons
    assert "MTP" in reasons["speculation"]


@pytest.mark.parametrize("make", NEXT, ids=NEXT_IDS)
def test_drafts_of_models_with_states(tmp_path: Path, make: Callable[..., HfModel]) -> None:
    hf = make(tmp_path)
    mtp = with_next_mtp(hf)
    check_drafts(hf, mtp)


def test_experts_of_the_layer_in_one_key(tmp_path: Path) -> None:
    hf = hf_tiny.make_qwen3_5_moe(tmp_path)
    mtp = with_next_mtp(hf, fused=True)
    check_drafts(hf, mtp)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("make", NEXT[:2], ids=NEXT_IDS[:2])
def test_streams_of_models_with_states(tmp_path: Path, make: Callable[..., HfModel], size: int) -> None:
    """Those without drafts; some of its drafts are right, though it is random: the text repeats itself."""
    hf = make(tmp_path)
    with_next_mtp(hf)
    check_streams(hf.path, hf.path, size, MTP)


def test_qwen3_next_without_the_layer(tmp_path: Path) -> None:
    """Its config.json does not say whether there is one."""
    hf = hf_tiny.make_qwen3_next(tmp_path)
    with pytest.raises(ValueError, match=r"it has no mtp\.fc\.weight"):
        build_rank(make_plan(hf.path, speculation=MTP))


@pytest.mark.parametrize("make", [deepseek_tiny.make_v32, deepseek_tiny.make_glm5], ids=["deepseek_v32", "glm5"])
def test_drafts_of_models_with_an_indexer(tmp_path: Path, make: Callable[..., HfModel]) -> None:
    """Its layer that drafts has one too; of the longest prompt it chooses a part."""
    hf = make(tmp_path)
    torch.manual_seed(5)
    mtp = SparseMtp(hf).float().eval()
    write_mtp(hf, mtp.layers[0])
    check_drafts(hf, mtp)


@pytest.mark.slow
@pytest.mark.parametrize("make", [*NEXT[:2], deepseek_tiny.make_glm5], ids=[*NEXT_IDS[:2], "glm5"])
def test_kills_at_any_moment(tmp_path_factory: pytest.TempPathFactory, make: Callable[..., HfModel]) -> None:
    if make in NEXT:
        hf = make(tmp_path_factory.mktemp("mtp"))
        with_next_mtp(hf)
    else:
        hf = make(tmp_path_factory.mktemp("mtp"), n_routed_experts=8)
        write_mtp(hf, SparseMtp(hf).layers[0])
    check_kills(hf.path, hf.path, MTP)


def test_experts_of_the_whole_layer_count_on_every_rank() -> None:
    """In the plan of memory: those of a layer that is spread are shared by the ranks."""
    facts = read_config(CHECKPOINT)
    spread, whole = (model_numbers(CHECKPOINT, "tiny", with_drafts(facts, whole)) for whole in (False, True))
    layer = 3 * facts.num_experts * facts.moe_intermediate_size * facts.hidden_size * 2  # bytes in bfloat16
    assert spread.weight_bytes == whole.weight_bytes
    assert spread.expert_bytes - whole.expert_bytes == layer == whole.expert_bytes // facts.num_moe_layers
