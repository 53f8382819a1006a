"""The options that say what engine to build, shared by serve, generate, bench and explain. vLLM's names where the
meaning is the same, so that launch scripts carry over."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
from msgspec import structs

from configs.dbo import DBO_MODES
from configs.engine import EngineConfig, Quantization
from configs.eplb import EplbConfig, parse_eplb_config
from configs.json_option import json_object
from configs.speculation import METHODS
from moesaic.vllm_flags import vllm_flags

EMBEDDED_RANKS = 2  # without a model, the embedded one is served the way it is meant: experts over two ranks

Command = TypeVar("Command", bound=Callable[..., Any])

COUNTS = {
    "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30,
}  # fmt: skip
# vLLM's and torch's spellings of values.
ALIASES = {
    "dtype": {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "all2all_backend": {"naive": "auto", "allgather_reducescatter": "auto"},
    "attention_backend": {
        "flashinfer_mla": "flashinfer", "triton_mla": "triton", "torch_sdpa": "torch", "cpu_attn": "auto",
    },
}  # fmt: skip
# Formats that checkpoints have, and say themselves.
STORED = ("awq", "awq_marlin", "compressed-tensors", "gguf", "gptq", "gptq_marlin")
MULTIPLES = {"K": 10**3, "M": 10**6, "G": 10**9, "k": 10**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


class Bytes(click.ParamType[int]):
    """A number of bytes: 123, 4G (10^9), 4Gi (2^30)."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().rstrip("bB")
        digits = text.rstrip("KMGIkmgi")
        suffix = text[len(digits) :].upper()
        try:
            number = int(float(digits) * (MULTIPLES[suffix] if suffix else 1))
        except (ValueError, KeyError, OverflowError):
            number = 0
        if number < 1:
            self.fail(f"{value!r} is not a number of bytes such as 500M or 4Gi", param, ctx)
        return number


class Count(click.ParamType[int | None]):
    """A number: 8192, 8k (8000), 8K (8192); with `auto` also "auto" and -1, as vLLM has them: decide for me."""

    name = "integer"

    def __init__(self, auto: bool = False) -> None:
        self.auto = auto

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        text = str(value).strip()
        if self.auto and text in ("auto", "-1"):
            return None
        digits, unit = (text[:-1], COUNTS[text[-1]]) if text[-1:] in COUNTS else (text, 1)
        try:
            return int(digits) if unit == 1 else round(float(digits) * unit)
        except (ValueError, OverflowError):
            more = " or auto" if self.auto else ""
            self.fail(f"{value!r} is not a number such as 8192, 8k or 8K{more}", param, ctx)


class Spelled(click.Choice[str]):
    """Choices in any case; aliases: other spellings -> the choice."""

    def __init__(self, choices: Sequence[str], aliases: Mapping[str, str]) -> None:
        super().__init__(choices, case_sensitive=False)
        self.aliases = aliases

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).lower()
        return super().convert(self.aliases.get(text, text), param, ctx)


class Quantized(Spelled):
    """Those of `quantization`; what a checkpoint says itself asks for nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """None: nothing is asked for."""
        if str(value).lower() not in STORED:
            return super().convert(value, param, ctx)
        why = "the checkpoint says how its weights are stored, and what is in 4 or 8 bits there stays so"
        print(f"moesaic: --quantization {value} changes nothing: {why}", file=sys.stderr)
        return None


class Name(click.ParamType[str]):
    """A word in any case; aliases: as for Spelled."""

    name = "text"

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self.aliases = aliases

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).lower()
        return self.aliases.get(text, text)


class Number(click.FloatRange):
    """click's own range lets NaN through, and says the largest number in every line of help."""

    name = "float"

    def _describe_range(self) -> str:
        return ""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = click.FLOAT.convert(str(value), param, ctx)  # type: ignore[arg-type]  # it parses text
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        least, most = -math.inf if self.min is None else self.min, math.inf if self.max is None else self.max
        if not least <= number <= most or (self.min_open and number == least):
            self.fail(f"{number} is not in the range {super()._describe_range()}.", param, ctx)
        return number


SECONDS = Number(0, 1e6)


_HINTS = get_type_hints(EngineConfig)
_DEFAULTS = {field.name: field.default for field in structs.fields(EngineConfig)}
_EPLB_FIELDS = ", ".join(f"{field.name} {json.dumps(field.default)}" for field in structs.fields(EplbConfig))


def _of(name: str, help: str | None = None, *names: str, **more: Any) -> Callable[[Command], Command]:
    """The option of a field of EngineConfig, which says its type, its choices and its default. names: it has besides;
    more: in the place of what the field says."""
    kind = _HINTS[name]
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        kind = Spelled(get_args(kind), ALIASES.get(name, {}))
    flag, default = "--" + name.replace("_", "-"), _DEFAULTS[name]
    if kind is bool:
        flag, kind = f"{flag}/--no-{flag[2:]}", None
    settings = {"type": kind, "default": default, "show_default": default is not None, "help": help, **more}
    return click.option(*names, flag, name, **settings)


_TEXT = {"type": str, "default": None, "show_default": False}  # what is parsed below

OPTIONS = [
    click.option("--model", "model_option", help="Directory or name of a checkpoint (same as the argument)."),
    _of("revision", "Of a model's name: branch, tag or commit."),
    _of("download_dir", "Of a model's name: where downloads are kept; default: the place of huggingface_hub."),
    _of("tokenizer", "Directory or name of another tokenizer; default: the model's own."),
    _of("tokenizer_revision", "Of its name; default, where it is the model's: that of --revision."),
    _of("hf_overrides", "Fields in the place of those of config.json, as a JSON object or a file with one.", **_TEXT),
    _of("served_model_name", "Name(s) in the API; default: the model's path.", type=str, multiple=True, default=None,
        show_default=False),
    _of("device", "cuda: GPUs."),
    _of("dtype", "Of the computation; auto: the checkpoint's; float16 is computed in float32 on a CPU."),
    _of("max_model_len", "Longest prompt plus output, in tokens: 8192, 8k, auto.", type=Count(auto=True)),
    _of("max_num_seqs", "Sequences that a rank works on at once.", type=Count()),
    _of("max_num_batched_tokens", "Tokens that a rank computes in one step.", type=Count()),
    _of("block_size", "Tokens in a block of the KV cache."),
    _of("num_kv_blocks", "KV blocks per rank.", "--num-gpu-blocks-override"),
    _of("kv_cache_memory_bytes", "Memory of a rank's KV cache, e.g. 4Gi.", type=Bytes()),
    _of("gpu_memory_utilization", "Part of the free memory for weights and KV cache."),
    _of("enable_prefix_caching", "Keep what was computed of prompts for those that begin alike."),
    _of("enable_chunked_prefill", "Compute long prompts in parts, beside the others' tokens."),
    _of("scheduling_policy", "priority: by the requests' field of this name, lower first."),
    _of("async_scheduling", "Schedule while the step computes."),
    _of("prefill_cadence", "Compute prompts on all ranks in the same steps; auto: with several ranks of experts."),
    _of("data_parallel_size", "Ranks; experts are spread over them.", "-dp", default=None, show_default=False),
    click.option(
        "--enable-expert-parallel", is_flag=True, help="Accepted for vLLM scripts: experts are always spread."
    ),
    _of("all2all_backend", "How tokens reach their experts; a+b: a in steps with many tokens, b in those with few.",
        type=Name(ALIASES["all2all_backend"])),
    _of("vocab_parallel", "Each rank of a machine computes a part of the vocabulary; auto: of a large one."),
    _of("resume_steps", "A step that a loss breaks off goes on at the layer where it was; auto: of a large model."),
    _of("dispatch_dtype", "How rows travel to their experts; fp8: in half the bytes, bf16: as they are."),
    _of("num_redundant_experts",
        "Extra expert slots in all, of experts that each rank has for itself; default: ranks of one machine share all "
        "experts, others have enough to lose one rank."),
    _of("weight_cache",
        "Where packed weights are kept for the next start; default: the user's cache, of models from 512 MiB on.",
        metavar="DIR|off"),
    _of("enable_eplb",
        "Balance the experts' load while serving: shares of the replicas follow it, and few experts move."),
    click.option(
        "--eplb-config", help=f"How, as a JSON object or a file with one; fields and defaults: {_EPLB_FIELDS}."
    ),
    _of("enable_dbo",
        "Split a step in parts that compute while the others' tokens travel; alone: on; auto: where it pays.",
        type=str, is_flag=False, flag_value="on", metavar="[auto|on|off]"),
    _of("dbo_decode_token_threshold", "Split a step of decodes from so many tokens on."),
    _of("dbo_prefill_token_threshold", "The same for a step with prompts in it."),
    _of("ubatch_size", "Parts of a step that is split."),
    _of("speculative_config",
        'Drafts, as a JSON object or a file with one, e.g. {"method": "ngram", "num_speculative_tokens": 5}; methods: '
        f"{', '.join(METHODS)}, none.", **_TEXT),
    _of("quantization", "Keep all large matrices in 8 or 4 bits (native kernels).",
        type=Quantized(get_args(Quantization), {})),
    _of("kv_cache_dtype", "fp8: latents in 8 bits, a scale for 128 of them (DeepSeek)."),
    _of("attention_backend", "Of latent attention, on a GPU.", type=Name(ALIASES["attention_backend"])),
    _of("moe_backend", "What multiplies by the experts' weights.", type=Name({})),
    _of("cudagraph_mode", "Which steps are captured: whole decode steps (on a CPU too), all steps in pieces, or both."),
    click.option(
        "--compilation-config", "-cc", help="cudagraph_mode and cudagraph_capture_sizes, as vLLM's JSON object."
    ),
    _of("optimization_level",
        "0: eager; 1: and graphs; 2: and split steps and drafts, where they pay; 3: and kernels chosen by measurement.",
        "-O", type=click.IntRange(0, 3)),
    click.option("--enforce-eager", is_flag=True, help="The same as --cudagraph-mode none."),
    _of("cudagraph_capture_sizes", "Rows of the graphs, e.g. 1,2,4,8; default: decided.", **_TEXT),
    _of("threads_per_rank", "CPU threads of each rank."),
    _of("mla_prefill", "How latent attention computes prompts."),
    _of("deterministic", "Bit-equal tokens and log-probabilities alone and in any batch, on any number of ranks."),
    _of("logprobs_mode", "Before or after temperature, penalties and masks; logits as they are."),
    _of("logits_processors", "Classes that change logits, as module:Class; may be repeated (docs/serving.md).",
        type=str, multiple=True, default=None, show_default=False),
    _of("max_logprobs", "The most that a request may ask for; -1: no limit."),
    _of("exchange_timeout", "Bound of waits between ranks, s."),
    _of("wait_warning_seconds", "Say who waits for whom from so many seconds on; 0: never."),
]  # fmt: skip


GROUPS = {
    "Who may ask, and where": [
        "host", "port", "uds", "api_key", "admin_api_key", "root_path", "ssl_certfile", "ssl_keyfile",
        "allowed_origins",
    ],
    "Conversations": [
        "chat_template", "chat_template_content_format", "default_chat_template_kwargs", "generation_config",
        "override_generation_config",
        "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice", "exclude_tools_when_tool_choice_none",
        "enable_force_include_usage", "enable_prompt_tokens_details", "return_tokens_as_token_ids",
        "structured_outputs_config",
    ],
    "Limits and times": [
        "max_request_bytes", "max_inflight_bytes", "max_num_queued_reqs", "max_stored_responses", "max_stored_bytes",
        "request_timeout", "sse_keep_alive_interval", "shutdown_timeout", "startup_timeout",
    ],
    "What is written": [
        "log_format", "log_requests", "eplb_record_dir", "profile_dir", "otlp_traces_endpoint",
    ],
    "Model": [
        "model_option", "revision", "download_dir", "tokenizer", "tokenizer_revision", "hf_overrides",
        "served_model_name", "device", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "max_logprobs",
        "logprobs_mode", "logits_processors",
    ],
    "Memory and steps": [
        "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks", "kv_cache_memory_bytes",
        "gpu_memory_utilization", "enable_prefix_caching", "enable_chunked_prefill", "scheduling_policy",
        "async_scheduling", "prefill_cadence", "weight_cache",
    ],
    "Ranks and experts": [
        "data_parallel_size", "enable_expert_parallel", "all2all_backend", "vocab_parallel", "dispatch_dtype",
        "resume_steps", "num_redundant_experts", "enable_eplb", "eplb_config", "enable_dbo",
        "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "ubatch_size", "exchange_timeout",
        "wait_warning_seconds", "nnodes", "node_rank", "data_parallel_size_local", "data_parallel_address",
        "data_parallel_rpc_port", "data_parallel_start_rank", "headless",
    ],
    "How it computes": [
        "optimization_level", "enforce_eager", "cudagraph_mode", "cudagraph_capture_sizes", "compilation_config",
        "speculative_config", "attention_backend", "moe_backend", "mla_prefill", "threads_per_rank", "deterministic",
    ],
}  # fmt: skip


def _take_model(context: click.Context, argument: click.Parameter, model: str | None) -> str | None:
    """MODEL. An option whose value may be left out takes whatever word follows it, so in `--enable-dbo MODEL` that is
    MODEL. (click processes arguments after the options that are given.)"""
    mode = context.params.get("enable_dbo", "auto")
    if mode in DBO_MODES:
        return model
    if model is not None:
        raise click.BadParameter(f"{mode!r} is none of {', '.join(DBO_MODES)}.", context, param_hint="'--enable-dbo'")
    context.params["enable_dbo"] = "on"
    return str(mode)


def engine_options(command: Command) -> Command:
    """Adds MODEL and every engine option; the command takes them as **engine and calls `engine_config(engine)`."""
    for option in reversed(OPTIONS):
        command = option(command)
    command = vllm_flags(command)
    return click.argument("model", required=False, callback=_take_model)(command)


def engine_config(values: dict[str, Any], default_ranks: int = 1, embedded_ranks: int | None = None) -> EngineConfig:
    """The options' values as an EngineConfig; removes them from `values`. Ranks unless told otherwise: default_ranks,
    of the embedded model embedded_ranks."""
    argument, option = values.pop("model"), values.pop("model_option")
    if argument and option and argument != option:
        raise ValueError(f"two models given: {argument} and --model {option}")
    values.pop("enable_expert_parallel")
    ranks = values.pop("data_parallel_size")
    if values.pop("enforce_eager", False):
        values["cudagraph_mode"] = "none"
    _take_compilation_config(values)
    values["cudagraph_capture_sizes"] = _numbers("cudagraph_capture_sizes", values.get("cudagraph_capture_sizes"))
    _take_eplb_config(values)
    drafts = values.pop("speculative_config", None)
    values["speculative_config"] = None if drafts is None else json_object("speculative_config", drafts)[0]
    overrides = values.pop("hf_overrides", None)
    values["hf_overrides"] = {} if overrides is None else json_object("hf_overrides", overrides)[0]
    if "" in (argument, option):
        raise ValueError("MODEL is an empty text; leave it out for the embedded model")
    model = argument or option
    if ranks is None:
        ranks = default_ranks if model or embedded_ranks is None else embedded_ranks
    return EngineConfig(model=model, data_parallel_size=ranks, **values)


def _numbers(name: str, text: str | None) -> tuple[int, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"{name} must be numbers such as 1,2,4,8, not {text!r}") from None


def _take_eplb_config(values: dict[str, Any]) -> None:
    """--eplb-config, which may also say how many spare slots there are, as vLLM's does."""
    text = values.pop("eplb_config")
    if text is None:
        return
    values["eplb"], redundant = parse_eplb_config(text)
    if redundant is not None:
        asked = values["num_redundant_experts"]
        if asked is not None and asked != redundant:
            raise ValueError(
                f"num_redundant_experts is {asked}, but in eplb_config it is {redundant}; give one of them"
            )
        values["num_redundant_experts"] = redundant


def _take_compilation_config(values: dict[str, Any]) -> None:
    text = values.pop("compilation_config", None)
    if text is None:
        return
    if text.strip() in ("0", "1", "2", "3"):  # as vLLM had it before -O
        values["optimization_level"] = int(text)
        return
    found = json_object("compilation_config", text)[0]
    mode, sizes = found.pop("cudagraph_mode", None), found.pop("cudagraph_capture_sizes", None)
    if found:
        raise ValueError(
            f"compilation_config: {next(iter(found))!r:.100} is not supported; cudagraph_mode and "
            "cudagraph_capture_sizes are"
        )
    if mode is not None:
        modes = get_args(_HINTS["cudagraph_mode"])
        if not isinstance(mode, str) or mode.lower() not in modes:
            raise ValueError(f"compilation_config: cudagraph_mode must be one of {', '.join(modes)}, not {mode!r:.100}")
        values["cudagraph_mode"] = mode.lower()
    if sizes is not None:
        values["cudagraph_capture_sizes"] = ",".join(map(str, sizes)) if isinstance(sizes, list) else str(sizes)
