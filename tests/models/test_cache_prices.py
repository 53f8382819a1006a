"""What `moesaic explain` says of the cache of every family is what a rank allocates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepseek_tiny
import pytest
import test_varied_configs as varied
from click.testing import CliRunner

from configs.engine import EngineConfig
from engine.build import build_rank
from engine.plan import make_plan
from moesaic.explain import command

MAKE = {family: make for family, (make, _) in varied.FAMILIES.items()}
MAKE |= {"DeepseekV32ForCausalLM": deepseek_tiny.make_v32, "GlmMoeDsaForCausalLM": deepseek_tiny.make_glm5}
STATES = ("Qwen3NextForCausalLM", "KimiLinearForCausalLM")
LATENTS = ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "KimiLinearForCausalLM")
PLAIN: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 200, "max_num_batched_tokens": 32, "block_size": 4}
FP8 = {"kv_cache_dtype": "fp8"}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
CASES = [
    *((family, {}) for family in MAKE),
    *((family, DRAFTS) for family in STATES),
    *((family, FP8) for family in LATENTS),
    *((family, {"dtype": "bfloat16"}) for family in ("GptOssForCausalLM", *STATES)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"), CASES, ids=lambda case: case if isinstance(case, str) else "-".join(case)
)
def test_it_is_what_is_allocated(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"index_head_dim": 12} if family == "DeepseekV32ForCausalLM" else {}
    MAKE[family](tmp_path, **({"kv_lora_rank": 16} if options == FP8 else {}), **sizes)
    asked = {**PLAIN, "kv_cache_memory_bytes": 3 << 20, **options}
    arguments = []
    for name, value in asked.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        arguments += [f"--{name.replace('_', '-')}", text]
    done = CliRunner().invoke(command, ["--json", "--device", "cpu", *arguments, str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    predicted = sum(json.loads(done.stdout)["cache"].values())

    rank = build_rank(make_plan(EngineConfig(model=str(tmp_path), device="cpu", **asked)))
    allocated = sum(field.nbytes for layer in rank._runner._kv.layers for field in layer)
    rank.close()
    assert predicted == pytest.approx(allocated, rel=0.02)
    assert allocated <= 3 << 20
