"""vLLM's command lines: its flags, its spellings, its files of options, models by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from configs.engine import EngineConfig
from configs.env import read_env
from engine.plan import make_plan
from front.text.tokenizer import Tokenizer
from models.tiny import CHECKPOINT
from moesaic.command_line import VllmCommand
from moesaic.explain import command as explain_command
from moesaic.options import engine_config, engine_options
from moesaic.serve import command as serve_command

# As vLLM's documentation of expert parallelism has it, for node 0.
WIDE_EP = [
    "deepseek-ai/DeepSeek-V3",
    "--tensor-parallel-size",
    "1",
    "--enable-expert-parallel",
    "--all2all-backend",
    "deepep_low_latency",
    "--data-parallel-size",
    "16",
    "--data-parallel-size-local",
    "8",
    "--data-parallel-address",
    "10.0.0.1",
    "--data-parallel-rpc-port",
    "13345",
    "--api-server-count",
    "8",
    "--enable-eplb",
    "--eplb-config",
    '{"window_size":1000,"step_interval":3000,"num_redundant_experts":32,"log_balancedness":false}',
    "--enable-dbo",
    "--dbo-decode-token-threshold",
    "32",
]


def explained(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(explain_command, ["--json", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def refused(*words: str) -> str:
    done = CliRunner().invoke(explain_command, list(words))
    assert done.exit_code != 0
    return " ".join(f"{done.output} {done.exception or ''}".split())


def test_the_published_wide_ep_line() -> None:
    done = CliRunner().invoke(explain_command, ["--json", *WIDE_EP], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "--api-server-count changes nothing: one front process serves" in done.stderr
    found = json.loads(done.stdout)
    plan = found["plan"]
    assert (plan["data_parallel_size"], plan["slots_per_rank"], plan["device"]) == (16, 18, "cuda")
    assert plan["all2all_backend"] == "deepep_high_throughput+deepep_low_latency"
    assert "as asked where a rank brings few tokens" in found["reasons"]["all2all_backend"]
    assert plan["dbo"]["decode_tokens"] == 32 and plan["eplb"]["log_balancedness"] is False


@click.command(cls=VllmCommand)
@click.option("--allowed-origins", multiple=True)
@engine_options
def parsed_command(allowed_origins: tuple[str, ...], **options: Any) -> None:
    parsed.append((allowed_origins, engine_config(options)))


parsed: list[Any] = []


def config_of(*words: str) -> Any:
    parsed.clear()
    done = CliRunner().invoke(parsed_command, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return parsed[0][1]


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--max-model-len 8k", "max_model_len", 8000),
        ("--max-model-len 8K", "max_model_len", 8192),
        ("--max-model-len 1.5K", "max_model_len", 1536),
        ("--max-model-len auto", "max_model_len", None),
        ("--max-model-len -1", "max_model_len", None),
        ("--max_model_len=300", "max_model_len", 300),
        ("--dtype half", "dtype", "float16"),
        ("--dtype bf16", "dtype", "bfloat16"),
        ("--dtype FLOAT", "dtype", "float32"),
        ("--kv-cache-dtype fp8_e4m3", "kv_cache_dtype", "fp8"),
        ("--all2all-backend naive", "all2all_backend", "auto"),
        ("--attention-backend FLASHINFER_MLA", "attention_backend", "flashinfer"),
        ("--cudagraph-mode FULL_DECODE_ONLY", "cudagraph_mode", "full_decode_only"),
        ("--cudagraph-capture-sizes 1 2 4", "cudagraph_capture_sizes", (1, 2, 4)),
        ("--cudagraph-capture-sizes [1,2]", "cudagraph_capture_sizes", (1, 2)),
        ("--served-model-name a b", "served_model_name", ("a", "b")),
        ('--served-model-name ["a","b"]', "served_model_name", ("a", "b")),
        ("--served-model-name a --served-model-name b", "served_model_name", ("a", "b")),
        ("-O1", "optimization_level", 1),
        ("-O 0", "optimization_level", 0),
        ('-cc {"cudagraph_mode":"NONE"}', "cudagraph_mode", "none"),
        ("--compilation-config 2", "optimization_level", 2),
        ("--hf-overrides.rope_scaling.factor 4", "hf_overrides", {"rope_scaling": {"factor": 4}}),
        ('--hf-overrides {"a":1} --hf-overrides.b two', "hf_overrides", {"a": 1, "b": "two"}),
        ("--enforce-eager --no-enforce-eager", "cudagraph_mode", "auto"),
        ("--no_enforce_eager --enforce_eager", "cudagraph_mode", "none"),
        ("--stream-interval 1 --numa-bind --use-tqdm-on-load", "data_parallel_size", 1),
        ("-tp 1 -pp 1 --seed 0 --trust-remote-code --disable-log-stats", "data_parallel_size", 1),
        ("--load-format auto --tokenizer-mode auto --swap-space 4", "data_parallel_size", 1),
    ],
)
def test_spellings(words: str, field: str, value: object) -> None:
    assert getattr(config_of(*words.split()), field) == value


def test_fields_of_a_config_one_by_one() -> None:
    words = "--enable-eplb --eplb-config.num_redundant_experts 16 --eplb-config.window-size=50"
    config = config_of(*words.split())
    assert config.num_redundant_experts == 16 and config.eplb.window_size == 50


def test_lists_leave_the_model_alone(tmp_path: Path) -> None:
    config = config_of("--served-model-name", "a", "b", str(tmp_path))
    assert config.model == str(tmp_path) and config.served_model_name == ("a", "b")
    config_of("--allowed-origins", '["*"]')
    assert parsed[0][0] == ("*",)
    config_of("--allowed-origins", "[]")
    assert parsed[0][0] == ()


def test_a_file_of_options(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: org/name\nmax-model-len: 8k\nserved_model_name: [a, b]\nenable-eplb: true\ntrust-remote-code: false\n"
        "eplb-config: {window_size: 50}\nenable_prefix_caching: false\ndtype: bfloat16\n"
    )
    config = config_of("--config", str(file), "--dtype", "float32")
    assert (config.model, config.max_model_len, config.dtype) == ("org/name", 8000, "float32")
    assert config.served_model_name == ("a", "b") and not config.enable_prefix_caching
    assert config.eplb.window_size == 50
    file.write_text("enforce-eager: true\n")
    assert config_of("--config", str(file)).cudagraph_mode == "none"
    assert config_of("--config", str(file), "--no-enforce-eager").cudagraph_mode == "auto"
    file.write_text("- a list\n")
    assert "must hold options" in refused("--config", str(file))
    file.write_text("a: [\n")
    assert "not YAML" in refused(f"--config={file}")
    assert "No such file" in refused("--config", str(tmp_path / "none.yaml"))
    file.write_text("no-such-option: 1\n")
    assert "--no-such-option" in refused("--config", str(file))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-tp 2", "--tensor-parallel-size must be 1, not 2: ranks do not split tensors or layers"),
        ("--load-format sharded", "--load-format must be auto or safetensors or gguf, not sharded"),
        ("--enable-lora", "--enable-lora cannot be: adapters are not supported"),
        ("--distributed-executor-backend ray", "must be mp or uni, not ray"),
        ("-O4", "4 is not in the range"),
        ('-cc {"pass_config":{}}', "compilation_config: 'pass_config' is not supported"),
        ("--max-model-len much", "is not a number such as 8192, 8k or 8K or auto"),
        ("--dtype int3", "'int3' is not one of"),
        ("--no-such-flag", "--no-such-flag"),
        ("--threads-per-rank 1000", "threads_per_rank must be at most"),
        ("--model-impl transformers", "--model-impl must be auto, not transformers"),
        ("--enable-prompt-embeds", "--enable-prompt-embeds cannot be: prompts are texts or token ids"),
        ("--worker-cls a.B", "--worker-cls cannot be: code of others"),
        ("--attention-config.backend FLASHINFER", "--attention-config cannot be: --attention-backend says it"),
        ('--rope-scaling {"factor":2}', "--hf-overrides.rope_scaling says it"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: str, message: str) -> None:
    assert message in refused(*words.split())


def test_levels_of_optimization() -> None:
    plan = explained("-O0")["plan"]
    assert plan["cudagraph_mode"] == "none" and plan["dbo"] is None and not plan["async_scheduling"]
    low = explained("-O1")
    assert low["plan"]["dbo"] is None and low["plan"]["native_choice"] == ""
    assert "-O1" in low["reasons"]["native_choice"]
    assert explained("-O2")["plan"]["dbo"] == explained()["plan"]["dbo"] is not None
    assert explained("-O0", "--enable-dbo", "on")["plan"]["dbo"] is not None


def test_float16_is_computed_in_float32() -> None:
    found = explained("--dtype", "half")
    assert found["plan"]["dtype"] == "float32" and "float16 as asked" in found["reasons"]["dtype"]
    assert "dtype float16" in refused("--dtype", "half", "--gpu", "h200", "deepseek-v3")


def test_a_model_by_name(tmp_path: Path) -> None:
    """From the cache of huggingface_hub, where there is no network."""
    folder = tmp_path / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(CHECKPOINT, folder / "snapshots" / ("0" * 40))
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}

    def explain(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moesaic", "explain", "--json", *words]
        return subprocess.run(command, capture_output=True, text=True, env=offline, timeout=120)

    done = explain("org/name")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    assert plan["served_model_names"] == ["org/name"] and plan["model_path"].endswith("snapshots/" + "0" * 40)
    for words in (["org/other"], ["org/name", "--revision", "v2"]):
        done = explain(*words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert "is neither a directory nor in the cache of huggingface_hub" in done.stderr
    done = explain(str(CHECKPOINT), "--revision", "main")
    assert done.returncode == 2 and "is a directory, which has no revisions" in done.stderr


def test_another_tokenizer(tmp_path: Path) -> None:
    """It has its own template; the model's end of text counts too."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((CHECKPOINT / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    plan = make_plan(EngineConfig(tokenizer=str(tmp_path)))
    assert plan.tokenizer_path == str(tmp_path) != plan.model_path
    tokenizer, own = Tokenizer(plan.model_path, plan.tokenizer_path), Tokenizer(plan.model_path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == "a!"
    assert tokenizer.eos_token_ids == own.eos_token_ids and tokenizer.encode("a b") == own.encode("a b")
    assert make_plan(EngineConfig()).tokenizer_path == ""
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["added_tokens"].append({**file["added_tokens"][0], "id": own.vocab_size + 9, "content": "<|more|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=r"it has \d+ tokens, the model's vocabulary only \d+"):
        make_plan(EngineConfig(tokenizer=str(tmp_path)))
    for wrong, message in (
        ({"tokenizer": "no-such"}, "tokenizer 'no-such' is not a directory"),
        ({"tokenizer_revision": "v2"}, "tokenizer_revision 'v2' is not that of the model"),
    ):
        with pytest.raises(ValueError, match=message):
            make_plan(EngineConfig(**wrong))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ssl-certfile", __file__], "--ssl-keyfile"),
        (["--ssl-certfile", __file__, "--ssl-keyfile", __file__], "--ssl-certfile"),
        (["--root-path", "models"], "--root-path must begin with a slash"),
        (["--override-generation-config", '{"colour": 1}'], "'colour' is no default of sampling"),
        (["--override-generation-config", '{"temperature": 9}'], "temperature must be from 0 to 2"),
        (["--default-chat-template-kwargs", "[1]"], "default_chat_template_kwargs"),
        (["--structured-outputs-config.backend", "outlines"], "backend must be one of .*, not 'outlines'"),
        (
            ["--structured-outputs-config", '{"disable_any_whitespace": true}'],
            "'disable_any_whitespace' is not supported",
        ),
    ],
)
def test_options_of_the_server(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.serving.guard_console", lambda: None)  # it would take this process's streams
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(serve_command, words, catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eplb-config: &a [*a]", "eplb-config: Circular reference"),
        ("cudagraph-capture-sizes: [2024-01-01]", "cudagraph-capture-sizes: Object of type date"),
        ("enable-dbo: maybe", "'maybe' is none of auto, on, off"),
        ("model: " + "[" * 5000, "too deep"),
    ],
)
def test_odd_files_of_options(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(text)
    done = CliRunner().invoke(parsed_command, ["--config", str(tmp_path / "options.yaml")], catch_exceptions=False)
    assert done.exit_code == 2 and message in done.output


def test_empty_variables_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOESAIC_URL", "MOESAIC_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, "")
    assert read_env().url == "http://127.0.0.1:8000" and read_env().runtime_root == Path("/tmp")


def test_flags_and_a_key_of_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What names the reasoning's bounds says nothing new; a key that vLLM would have asked for is asked for here too."""
    explained("--reasoning-config", '{"reasoning_end_str": "</think>"}', "--enable-scale-out")
    explained(
        "--disable-hybrid-kv-cache-manager", "--prefix-caching-hash-algo", "sha256", "--h11-max-header-count", "9"
    )
    monkeypatch.setenv("MOESAIC_API_KEY", "one, two")
    monkeypatch.setenv("VLLM_API_KEY", "a,b")
    assert read_env().api_keys == ("one", "two", "a,b")
    monkeypatch.delenv("MOESAIC_API_KEY")
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert read_env().api_keys == ()
