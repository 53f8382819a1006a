"""Scripts that were written for vLLM's offline API: its keyword arguments, its methods, its forms of what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from configs.engine import EngineConfig
from configs.eplb import EplbConfig
from front.model_defaults import model_defaults
from models.tiny import CHECKPOINT
from moesaic.opened import config_of


@pytest.mark.parametrize(
    ("asked", "field", "value"),
    [
        ({"enforce_eager": True}, "cudagraph_mode", "none"),
        ({"enforce_eager": False}, "cudagraph_mode", "auto"),
        ({"dtype": "half"}, "dtype", "float16"),
        ({"dtype": torch.bfloat16}, "dtype", "bfloat16"),
        ({"dtype": "auto", "seed": 7}, "dtype", "auto"),
        ({"quantization": "int4", "seed": 7}, "quantization", "int4"),
        ({"quantization": "GPTQ"}, "quantization", None),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype", "fp8"),
        ({"max_model_len": -1}, "max_model_len", None),
        ({"num_gpu_blocks_override": 64}, "num_kv_blocks", 64),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, "cudagraph_mode", "full_decode_only"),
        ({"compilation_config": 0}, "optimization_level", 0),
        ({"cudagraph_capture_sizes": [1, 2], "seed": 0}, "cudagraph_capture_sizes", (1, 2)),
        ({"enable_dbo": True}, "enable_dbo", "on"),
        ({"enable_dbo": False}, "enable_dbo", "off"),
        ({"enable_prefix_caching": False, "seed": 0}, "enable_prefix_caching", False),
        ({"enable_eplb": True, "eplb_config": {"window_size": 77, "step_interval": 5}}, "enable_eplb", True),
        ({"eplb_config": {"num_redundant_experts": 2}}, "num_redundant_experts", 2),
        ({"enable_expert_parallel": True, "data_parallel_size": 2}, "data_parallel_size", 2),
        ({"speculative_config": {"method": "ngram"}, "seed": 0}, "speculative_config", {"method": "ngram"}),
        ({"hf_overrides": {"a": 1}, "swap_space": 4}, "hf_overrides", {"a": 1}),
        ({"served_model_name": ["a", "b"], "seed": 0}, "served_model_name", ("a", "b")),
        ({"eplb": EplbConfig(window_size=5), "seed": 0}, "eplb", EplbConfig(window_size=5)),
        ({"model": CHECKPOINT, "seed": 0}, "model", str(CHECKPOINT)),
    ],
)
def test_what_a_keyword_becomes(asked: dict[str, Any], field: str, value: object) -> None:
    found = config_of(asked)
    assert getattr(found, field) == value
    others = {name for name in EngineConfig.__struct_fields__ if name not in (field, *asked)}
    same = EngineConfig()
    changed = {name for name in others if getattr(found, name) != getattr(same, name)}
    assert changed <= {"eplb"}  # which an eplb_config is


def test_what_asks_for_nothing_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "trust_remote_code": False,
        "enable_lora": False,
        "skip_tokenizer_init": False,
        "quantization": None,
        "limit_mm_per_prompt": {},
        "kv_transfer_config": None,
        "load_format": "auto",
        "tokenizer_mode": "auto",
        "distributed_executor_backend": "mp",
        "cpu_offload_gb": 0,
        "max_loras": None,
    }
    assert config_of(asked) == EngineConfig()
    assert capsys.readouterr() == ("", "")


def test_what_changes_nothing_although_it_was_meant_to_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert config_of({"seed": 3}) == EngineConfig()
    assert "seed changes nothing: requests without a seed" in capsys.readouterr().err
    assert config_of({"quantization": "awq"}) == EngineConfig()
    assert "--quantization awq changes nothing: the checkpoint says" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"tensor_parallel_size": 2}, ValueError, r"^tensor_parallel_size must be 1, not 2: .*data_parallel_size N"),
        ({"enable_lora": True}, ValueError, "^enable_lora cannot be: adapters are not supported$"),
        ({"kv_transfer_config": {"a": 1}}, ValueError, "^kv_transfer_config cannot be: caches do not travel"),
        ({"load_format": "tensorizer"}, ValueError, "^load_format must be auto or safetensors or gguf"),
        ({"max_num_sequences": 3}, TypeError, "^there is no keyword argument 'max_num_sequences'"),
        ({"max_num_seq": 3}, TypeError, r"'max_num_seq'; did you mean .*max_num_seqs"),
        ({"max_num_seqs": "many"}, ValueError, "^max_num_seqs must be an integer or None, not 'many'$"),
        ({"dtype": "int3"}, ValueError, "^dtype must be one of auto, float32, bfloat16, float16, not 'int3'$"),
        ({"max_num_seqs": "many", "seed": 0}, ValueError, "^max_num_seqs: 'many' is not a number"),
        ({"compilation_config": {"level": 3}}, ValueError, "compilation_config: 'level' is not supported"),
        ({"worker_cls": object}, ValueError, "^worker_cls cannot be: code of others is not run in the ranks$"),
        ({"config": EngineConfig()}, TypeError, "^there is no keyword argument 'config'; LLM.from_config takes"),
        ({"something": object()}, TypeError, "^there is no keyword argument 'something'"),
        ({"hf_overrides": len, "seed": 0}, ValueError, "^hf_overrides must be of type dict"),
        ({"hf_overrides": {"a": object()}, "seed": 0}, ValueError, "^hf_overrides must hold what JSON can: "),
    ],
)
def test_what_is_refused(asked: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        config_of(asked)


@pytest.fixture(scope="module")
def llm() -> Iterator[moesaic.LLM]:
    with moesaic.LLM(tensor_parallel_size=1, trust_remote_code=False, enforce_eager=True, max_num_seqs=4) as llm:
        yield llm


def test_log_probabilities_are_read_as_dicts(llm: moesaic.LLM) -> None:
    params = moesaic.SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=1)
    [result] = llm.generate("Once upon a time", params)
    [output] = result.outputs
    assert result.finished and output.logprobs is not None and result.prompt_logprobs is not None
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        assert token_id in position and next(iter(position)) == token_id
        assert [*position] == [*position.keys()] and len(position) == 2
        assert position[token_id] == position.chosen == position.get(token_id)
        assert [*position.values()] == position.top  # greedy: the chosen one is the best
        for other, found in position.items():
            assert found.token_id == other and found.decoded_token == llm.get_tokenizer().decode([other])
        assert position.get(-1) is None and -1 not in position
    first, *others = result.prompt_logprobs
    assert first is None and len(others) == len(result.prompt_token_ids) - 1 > 0
    for token_id, place in zip(result.prompt_token_ids[1:], others, strict=True):
        assert place is not None and token_id in place


def test_what_else_scripts_ask_for(llm: moesaic.LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("A cat")) == "A cat"
    assert "cat" in tokenizer.apply_chat_template([{"role": "user", "content": "a cat"}])
    assert llm.get_default_sampling_params() == model_defaults(CHECKPOINT) != moesaic.SamplingParams()
    prompt = "The little dog and the big cat went to the park to play with a red ball, and then they " * 3
    greedy = moesaic.SamplingParams(max_tokens=2, temperature=0.0, stop=None, stop_token_ids=None, bad_words=None)
    cached = [llm.generate(prompt, greedy)[0].num_cached_tokens for _ in range(2)]
    llm.reset_prefix_cache()
    cached.append(llm.generate(prompt, greedy)[0].num_cached_tokens)
    assert cached[0] == cached[2] == 0 < cached[1]


def test_one_stop_string(llm: moesaic.LLM) -> None:
    [whole] = llm.generate("Once upon a time", moesaic.SamplingParams(max_tokens=12, temperature=0.0))
    word = whole.outputs[0].text.split()[3]
    for stop in (word, [word], (word,)):
        [cut] = llm.generate("Once upon a time", moesaic.SamplingParams(max_tokens=12, temperature=0.0, stop=stop))
        assert cut.outputs[0].text == whole.outputs[0].text.partition(word)[0]
        assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", word)


def test_calls_without_parameters_take_what_the_makers_recommend(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in CHECKPOINT.iterdir():
        (model / file.name).symlink_to(file)
    recommended = model / "generation_config.json"
    recommended.unlink()
    recommended.write_text('{"temperature": 0.0}')
    greedy = moesaic.SamplingParams(temperature=0.0)
    with moesaic.LLM(str(model)) as llm:
        assert llm.get_default_sampling_params() == greedy
        told = [llm.generate("Once upon a time", params)[0].outputs[0].text for params in (None, greedy, None)]
        assert told[0] == told[1] == told[2]
        chat = [{"role": "user", "content": "Tell me a story about a cat."}]
        whole = moesaic.SamplingParams(temperature=0.0, max_tokens=None)
        assert llm.chat(chat)[0].outputs[0].text == llm.chat(chat, whole)[0].outputs[0].text
    with moesaic.LLM(str(model), generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == moesaic.SamplingParams()
    with pytest.raises(ValueError, match="generation_config must be 'auto' or 'vllm', not 'mine'"):
        moesaic.LLM(str(model), generation_config="mine")
    recommended.write_text('{"temperature": -1}')
    with pytest.raises(ValueError, match=r"generation_config.json: temperature must be from 0 to 2, not -1"):
        moesaic.LLM(str(model))


def test_the_async_engine_takes_them_too() -> None:
    async def run() -> None:
        llm = moesaic.AsyncLLM(tensor_parallel_size=1, dtype="bf16", enforce_eager=True)
        try:
            await llm.wait_ready(60)
            assert (llm.plan.dtype, llm.plan.cudagraph_mode) == ("bfloat16", "none")
        finally:
            await llm.close()
        with pytest.raises(TypeError, match="there is no keyword argument 'nonsense'"):
            moesaic.AsyncLLM(nonsense=1)

    asyncio.run(run())
