"""The options that say what engine to build, shared by serve, generate, bench and explain. vLLM's names where the
meaning is the same, so that launch scripts carry over."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from configs.dbo import DBO_MODES
from configs.engine import EngineConfig
from configs.eplb import EplbConfig, parse_eplb_config
from configs.json_option import json_object

Command = TypeVar("Command", bound=Callable[..., Any])

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


class Number(click.FloatRange):
    """click's own range lets NaN through."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(str(value), param, ctx)  # type: ignore[arg-type]  # it parses text
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


SECONDS = Number(0, 1e6)


OPTIONS = [
    click.option("--model", "model_option", help="Directory of a Hugging Face checkpoint (same as the argument)."),
    click.option(
        "--hf-overrides", help="Fields in the place of those of config.json, as a JSON object or a file with one."
    ),
    click.option("--served-model-name", multiple=True, help="Name(s) in the API; default: the model's path."),
    click.option(
        "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="cuda: GPUs."
    ),
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True),
    click.option("--max-model-len", type=int, help="Longest prompt plus output, in tokens."),
    click.option("--max-num-seqs", type=int, help="Sequences that a rank works on at once."),
    click.option("--max-num-batched-tokens", type=int, help="Tokens that a rank computes in one step."),
    click.option("--block-size", type=int, help="Tokens in a block of the KV cache."),
    click.option("--num-gpu-blocks-override", "--num-kv-blocks", "num_kv_blocks", type=int, help="KV blocks per rank."),
    click.option("--kv-cache-memory-bytes", type=Bytes(), help="Memory of a rank's KV cache, e.g. 4Gi."),
    click.option("--gpu-memory-utilization", type=float, help="Part of the free memory for weights and KV cache."),
    click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True),
    click.option("--enable-chunked-prefill/--no-enable-chunked-prefill", default=True, show_default=True),
    click.option("--scheduling-policy", type=click.Choice(["fcfs", "priority"]), default="fcfs", show_default=True),
    click.option("--async-scheduling/--no-async-scheduling", default=None, help="Schedule while the step computes."),
    click.option("--data-parallel-size", "-dp", type=int, default=None, help="Ranks; experts are spread over them."),
    click.option(
        "--enable-expert-parallel", is_flag=True, help="Accepted for vLLM scripts: experts are always spread."
    ),
    click.option(
        "--all2all-backend",
        default="auto",
        show_default=True,
        help="How tokens reach their experts; a+b: a in steps with many tokens, b in those with few.",
    ),
    click.option(
        "--dispatch-dtype",
        type=click.Choice(["auto", "bf16", "fp8"]),
        default="auto",
        show_default=True,
        help="How rows travel to their experts; fp8: in half the bytes, bf16: as they are.",
    ),
    click.option(
        "--num-redundant-experts",
        type=int,
        help="Extra expert slots in all, of experts that each rank has for itself; default: ranks of one machine share "
        "all experts, others have enough to lose one rank.",
    ),
    click.option(
        "--weight-cache",
        metavar="DIR|off",
        help="Where packed weights are kept for the next start; default: the user's cache, of models from 512 MiB on.",
    ),
    click.option(
        "--enable-eplb/--no-enable-eplb",
        default=False,
        show_default=True,
        help="Balance the experts' load while serving: shares of the replicas follow it, and few experts move.",
    ),
    click.option(
        "--eplb-config",
        help="How, as a JSON object or a file with one; fields and defaults: "
        + ", ".join(f"{field.name} {json.dumps(field.default)}" for field in dataclasses.fields(EplbConfig))
        + ".",
    ),
    click.option(
        "--enable-dbo",
        is_flag=False,
        flag_value="on",
        metavar="[auto|on|off]",
        default="auto",
        show_default=True,
        help="Split a step in parts that compute while the others' tokens travel; alone: on; auto: where it pays.",
    ),
    click.option("--dbo-decode-token-threshold", type=int, help="Split a step of decodes from so many tokens on."),
    click.option("--dbo-prefill-token-threshold", type=int, help="The same for a step with prompts in it."),
    click.option("--ubatch-size", type=int, default=2, show_default=True, help="Parts of a step that is split."),
    click.option(
        "--quantization", type=click.Choice(["fp8", "int8"]), help="Keep all large matrices in 8 bits (native kernels)."
    ),
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(["auto", "fp8"]),
        default="auto",
        show_default=True,
        help="fp8: latents in 8 bits, a scale for 128 of them (DeepSeek).",
    ),
    click.option("--attention-backend", default="auto", show_default=True, help="Of latent attention, on a GPU."),
    click.option("--moe-backend", default="auto", show_default=True, help="What multiplies by the experts' weights."),
    click.option(
        "--cudagraph-mode",
        type=click.Choice(["auto", "none", "piecewise", "full", "full_and_piecewise", "tapes"]),
        default="auto",
        show_default=True,
        help=(
            "Which steps are captured as CUDA graphs: whole decode steps, all steps in pieces, or both; "
            "tapes: decode steps, on a CPU."
        ),
    ),
    click.option("--enforce-eager", is_flag=True, help="The same as --cudagraph-mode none."),
    click.option("--cudagraph-capture-sizes", help="Rows of the graphs, e.g. 1,2,4,8; default: decided."),
    click.option("--threads-per-rank", type=int, help="CPU threads of each rank."),
    click.option("--mla-prefill", type=click.Choice(["auto", "naive", "absorbed"]), default="auto", show_default=True),
    click.option(
        "--logprobs-mode",
        type=click.Choice(["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]),
        default="raw_logprobs",
        show_default=True,
    ),
    click.option("--max-logprobs", type=int, default=20, show_default=True, help="-1: no limit."),
    click.option(
        "--exchange-timeout", type=float, default=60.0, show_default=True, help="Bound of waits between ranks, s."
    ),
]


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
    return click.argument("model", required=False, callback=_take_model)(command)


def engine_config(values: dict[str, Any], default_ranks: int = 1) -> EngineConfig:
    """The options' values as an EngineConfig; removes them from `values`."""
    argument, option = values.pop("model"), values.pop("model_option")
    if argument and option and argument != option:
        raise ValueError(f"two models given: {argument} and --model {option}")
    values.pop("enable_expert_parallel")
    ranks = values.pop("data_parallel_size")
    if values.pop("enforce_eager", False):
        values["cudagraph_mode"] = "none"
    values["cudagraph_capture_sizes"] = _numbers("cudagraph_capture_sizes", values.get("cudagraph_capture_sizes"))
    _take_eplb_config(values)
    overrides = values.pop("hf_overrides", None)
    values["hf_overrides"] = {} if overrides is None else json_object("hf_overrides", overrides)[0]
    return EngineConfig(
        model=argument or option, data_parallel_size=default_ranks if ranks is None else ranks, **values
    )


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
