"""Flags of `vllm serve` beside those that mean the same here: taken where what they ask for is so anyway, refused with
a sentence where it cannot be. What is taken and does nothing is said on stderr.

Source of the names: vLLM's command line reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from msgspec import Struct

Command = TypeVar("Command", bound=Callable[..., Any])


class Taken(Struct, frozen=True):
    """kind: None for a flag without a value. fits: the values that can be; (): all. why: against others. said: what is
    said when it is given; "": nothing, as it is so."""

    names: tuple[str, ...]
    kind: type[int] | type[float] | type[str] | None = None
    fits: tuple[object, ...] = ()
    why: str = ""
    said: str = ""


_SPLIT = "ranks do not split tensors or layers: give --data-parallel-size N, over which experts are spread"
_TEXT_ONLY = "models take text only"

TAKEN = (
    Taken(("--tensor-parallel-size", "-tp"), int, (1,), _SPLIT),
    Taken(("--pipeline-parallel-size", "-pp"), int, (1,), _SPLIT),
    Taken(("--prefill-context-parallel-size", "-pcp"), int, (1,), _SPLIT),
    Taken(("--decode-context-parallel-size", "-dcp"), int, (1,), _SPLIT),
    Taken(("--trust-remote-code",), said="no code that comes with a checkpoint is ever run here; its architecture must "
          "be one of docs/models.md"),
    Taken(("--code-revision",), str, said="no code that comes with a checkpoint is ever run here"),
    Taken(("--seed",), int, said="requests without a seed of their own are drawn from the system's randomness"),
    Taken(("--load-format",), str, ("auto", "safetensors", "gguf"), "checkpoints are safetensors or GGUF"),
    Taken(("--tokenizer-mode",), str, ("auto", "hf"), "tokenizers are read from tokenizer.json"),
    Taken(("--config-format",), str, ("auto", "hf"), "models are described by config.json"),
    Taken(("--runner",), str, ("auto", "generate"), "models generate"),
    Taken(("--task",), str, ("auto", "generate"), "models generate"),
    Taken(("--convert",), str, ("auto", "none"), "models generate"),
    Taken(("--distributed-executor-backend",), str, ("mp", "uni"), "each rank is a process of its own"),
    Taken(("--data-parallel-backend",), str, ("mp",), "each rank is a process of its own"),
    Taken(("--api-server-count", "-asc"), int, said="one front process serves; a second takes large bodies"),
    Taken(("--swap-space",), float, said="a preempted sequence is computed again, nothing is swapped"),
    Taken(("--cpu-offload-gb",), float, (0.0,), "weights are not moved between a GPU and the host"),
    Taken(("--limit-mm-per-prompt",), str, said=_TEXT_ONLY),
    Taken(("--allowed-local-media-path",), str, said=_TEXT_ONLY),
    Taken(("--allowed-media-domains",), str, said=_TEXT_ONLY),
    Taken(("--mm-processor-cache-gb",), float, said=_TEXT_ONLY),
    Taken(("--disable-log-stats",), said="the log has no statistics; /metrics does"),
    Taken(("--disable-uvicorn-access-log",), said="there is one line per request; --no-log-requests turns it off"),
    Taken(("--uvicorn-log-level",), str, said="uvicorn says errors only; --log-format and --no-log-requests are ours"),
    Taken(("--disable-custom-all-reduce",), said="there is none"),
    Taken(("--disable-frontend-multiprocessing",), said="the front is a process of its own"),
    Taken(("--max-parallel-loading-workers",), int, said="ranks read their parts at the same time"),
    Taken(("--reasoning-config",), str, said="where reasoning begins and ends is known from --reasoning-parser"),
    Taken(("--response-role",), str, ("assistant",), "answers have the role assistant"),
    Taken(("--enable-request-id-headers",)),
    Taken(("--enable-tokenizer-info-endpoint",)),
    Taken(("--enable-server-load-tracking",)),
    Taken(("--enable-offline-docs",)),
    Taken(("--enable-scale-out",)),
    Taken(("--show-hidden-metrics-for-version",), str, said="no metric is hidden"),
    Taken(("--disable-fastapi-docs",), said="/docs and /openapi.json say nothing of this server but its routes"),
    Taken(("--max-log-len",), int, said="prompts are never logged"),
    Taken(("--stream-interval",), int, (1,), "the tokens of a step go out at once"),
    Taken(("--long-prefill-token-threshold",), int, (0,), "prompts are computed in parts of --max-num-batched-tokens"),
    Taken(("--max-num-partial-prefills",), int, (1,), "prompts are computed one behind another"),
    Taken(("--max-long-partial-prefills",), int, (1,), "prompts are computed one behind another"),
    Taken(("--max-seq-len-to-capture",), int, said="graphs are for numbers of rows, whatever their lengths"),
    Taken(("--performance-mode",), str, ("balanced",), "what is faster is measured at the start"),
    Taken(("--safetensors-load-strategy",), str, said="weights are mapped, and read by all ranks at the same time"),
    Taken(("--use-tqdm-on-load",), said="what has been read is said anyway"),
    Taken(("--enable-flashinfer-autotune",), said="what is faster is measured at the start"),
    Taken(("--language-model-only",), said=_TEXT_ONLY),
    Taken(("--mm-processor-kwargs",), str, said=_TEXT_ONLY),
    Taken(("--mm-encoder-tp-mode",), str, said=_TEXT_ONLY),
    Taken(("--model-impl",), str, ("auto",), "architectures are those of docs/models.md"),
    Taken(("--disable-hybrid-kv-cache-manager",), said="each kind of layer has a cache of its own kind"),
    Taken(("--prefix-caching-hash-algo",), str, said="the prefix cache has one hash"),
    Taken(("--h11-max-incomplete-event-size",), int, said="headers are bounded anyway"),
    Taken(("--h11-max-header-count",), int, said="headers are bounded anyway"),
    Taken(("--numa-bind",), said="ranks keep to cores of their own where that pays (pin_ranks of `moesaic explain`)"),
)  # fmt: skip

REFUSED = {
    "--enable-log-outputs": "prompts and outputs are never logged",
    "--tool-parser-plugin": "code of others is not run in the front; --tool-call-parser has the known formats",
    "--reasoning-parser-plugin": "code of others is not run in the front; --reasoning-parser has the known formats",
    "--trust-request-chat-template": "templates come with the model, or by --chat-template",
    "--log-config-file": "--log-format is text or json, on stderr",
    "--guided-decoding-backend": "--structured-outputs-config.backend says it",
    "--rope-scaling": "--hf-overrides.rope_scaling says it",
    "--rope-theta": "--hf-overrides.rope_theta says it",
    "--attention-config": "--attention-backend says it",
    "--kernel-config": "--moe-backend and --attention-backend say it",
    "--profiler-config": "--profile-dir, and /start_profile of a running server, say it",
    "--disable-sliding-window": "windows are part of the model",
    "--enable-lora": "adapters are not supported",
    "--lora-modules": "adapters are not supported",
    "--kv-transfer-config": "caches do not travel between servers",
    "--kv-events-config": "caches do not tell what they hold",
    "--enable-sleep-mode": "a server cannot sleep",
    "--enable-prompt-embeds": "prompts are texts or token ids",
    "--hf-token": "huggingface_hub takes it from HF_TOKEN, or from the login it knows",
    "--pooler-config": "models generate",
    "--skip-tokenizer-init": "the front checks and counts with the tokenizer; /inference/v1/generate takes token ids",
    "--scheduler-cls": "code of others is not run in the ranks",
    "--worker-cls": "code of others is not run in the ranks",
    "--collect-detailed-traces": "--otlp-traces-endpoint says how long each part of a request took",
    "--enable-elastic-ep": "a running server is grown and shrunk by `moesaic ranks --count N`",
    "--data-parallel-rank": "one server has all its ranks: give --node-rank, or --data-parallel-start-rank",
    "--data-parallel-hybrid-lb": "the head's front serves for all machines",
    "--data-parallel-external-lb": "the head's front serves for all machines",
    "--middleware": "code of others is not run in the front",
    "--ssl-ca-certs": "clients are known by API keys, not by certificates",
    "--ssl-cert-reqs": "clients are known by API keys, not by certificates",
    "--enable-ssl-refresh": "a new certificate is read at the next start",
    "--allow-credentials": "keys travel in headers, not in cookies",
    "--allowed-methods": "GET and POST are allowed to --allowed-origins",
    "--allowed-headers": "all headers are allowed to --allowed-origins",
    "--model-loader-extra-config": "checkpoints are read in one way",
    "--enable-return-routed-experts": "answers do not tell which experts were used",
    "--quantization-param-path": "scales are read from the checkpoint",
}


def vllm_flags(command: Command) -> Command:
    """Adds them; the command does not see their values."""
    for flag in reversed(TAKEN):
        more: dict[str, Any] = {"is_flag": True} if flag.kind is None else {"type": flag.kind}
        option = click.option(
            *flag.names, flag.names[0][2:].replace("-", "_"), default=None, expose_value=False, callback=_check(flag),
            **more,
        )  # fmt: skip
        command = option(command)
    return command


def _check(flag: Taken) -> Callable[[click.Context, click.Parameter, Any], None]:
    def check(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is None or value is False:
            return
        if flag.fits and value not in flag.fits:
            fitting = " or ".join(map(str, flag.fits))
            raise click.UsageError(f"{flag.names[0]} must be {fitting}, not {value}: {flag.why}", context)
        if flag.said:
            print(f"moesaic: {flag.names[0]} changes nothing: {flag.said}", file=sys.stderr)

    return check


def refusal(option: str) -> str:
    """The sentence against a flag of vLLM's; "": it is none of them."""
    reason = REFUSED.get(option)
    return f"{option} cannot be: {reason}" if reason else ""
