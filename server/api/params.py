"""From a request's fields to the engine's SamplingParams. What the server bounds is checked here, the rest by the
engine."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TypeVar

from configs.server import ServerConfig
from front.params import SamplingParams
from front.search.beams import BeamSearchParams, validate_beams
from server.api.openai import ChatRequest, CompletionRequest, GenerationRequest
from server.errors import ApiError, bad_request, from_value_error

Value = TypeVar("Value")

FIELDS = (*SamplingParams.__struct_fields__, "prompt", "messages", "max_completion_tokens", "top_logprobs")
# of stop_token_ids and of logit_bias: each costs time in the front, in the rank, and some at every token
MAX_IDS = 1024
# fields that a beam search does not follow
BENDING = (
    "stream", "stop", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "prompt_logprobs", "logprob_token_ids", "vllm_xargs", "thinking_token_budget",
)  # fmt: skip
REQUEST_ID = re.compile(r"[!-~]{1,128}")
TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
SALT = re.compile(r"[^@/\\\x00]{1,128}")


def either(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def check_common(request: GenerationRequest, config: ServerConfig, priorities: bool) -> None:
    """ApiError 400. priorities: the scheduler looks at them."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    if not 1 <= either(request.n, 1) <= config.max_n:
        raise bad_request(f"n must be from 1 to {config.max_n}, got {request.n}", "n")
    if len(stops(request)) > config.max_stop:
        raise bad_request(f"stop takes at most {config.max_stop} strings, got {len(stops(request))}", "stop")
    if request.bad_words is not None and len(request.bad_words) > 128:
        raise bad_request(f"bad_words takes at most 128 strings, got {len(request.bad_words)}", "bad_words")
    for field, ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", request.logit_bias)):
        if ids is not None and len(ids) > MAX_IDS:
            raise bad_request(f"{field} takes at most {MAX_IDS} token ids, got {len(ids)}", field)
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs cannot be had with stream: true", "prompt_logprobs")
    if request.cache_salt is not None and not SALT.fullmatch(request.cache_salt):
        raise bad_request("cache_salt must have 1 to 128 characters, none of them @, / or \\", "cache_salt")
    if request.request_id is not None and not REQUEST_ID.fullmatch(request.request_id):
        raise bad_request("request_id must have 1 to 128 printable ASCII characters", "request_id")
    if not -(2**63) <= either(request.priority, 0) < 2**63:
        raise bad_request(f"priority must fit in 64 bits, got {request.priority}", "priority")
    if request.priority and not priorities:
        raise bad_request("priority needs a server started with --scheduling-policy priority", "priority")
    if request.seed is not None and not -(2**63) <= request.seed < 2**63:
        code = "less_than_equal" if request.seed > 0 else "greater_than_equal"
        raise bad_request(f"seed must fit in 64 bits, got {request.seed}", "seed", code)
    if request.logprob_token_ids is not None and not request.logprob_token_ids:
        raise bad_request("logprob_token_ids must not be empty", "logprob_token_ids", "invalid_value")
    check_beams(request)


def check_beams(request: GenerationRequest) -> None:
    """Nothing is drawn in a beam search, so what says how it is drawn says nothing; what would change log-probabilities
    or end an output otherwise is refused."""
    if not request.use_beam_search:
        said: dict[str, object] = {"beam_width": request.beam_width, "early_stopping": request.early_stopping}
        said["length_penalty"] = None if request.length_penalty == 1 else request.length_penalty
        for field, value in said.items():
            if value:
                raise bad_request(f"{field} needs use_beam_search: true", field, "unsupported_parameter")
        return
    bends = {name: getattr(request, name) for name in BENDING}
    bends["echo"] = request.echo and getattr(request, "logprobs", None) is not None
    for field, value in bends.items():
        if value and not (field == "repetition_penalty" and value == 1):
            raise bad_request(f"{field} cannot be had with use_beam_search", field, "unsupported_parameter")


def beam_params(request: GenerationRequest, params: SamplingParams, mode: str) -> BeamSearchParams | None:
    """None: it asks for no beam search. params: of the request. mode: of the ranks' log-probabilities. ApiError 400."""
    if not request.use_beam_search:
        return None
    if params.structured_outputs is not None:
        message = "use_beam_search cannot be had where a grammar binds the output"
        raise bad_request(message, "use_beam_search", "unsupported_parameter")
    width = either(request.beam_width, max(either(getattr(request, "best_of", None), 1), params.n))
    beams = BeamSearchParams(
        width,
        max_tokens=either(params.max_tokens, 1),
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=either(request.length_penalty, 1.0),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        early_stopping=either(request.early_stopping, False),
        stop_token_ids=params.stop_token_ids,
    )
    try:
        validate_beams(beams, mode)
        if params.n > width:
            raise ValueError(f"n must be at most beam_width ({width}), not {params.n}")
    except ValueError as error:
        names = {} if request.beam_width is not None else {"beam_width": "n"}
        raise from_value_error(error, ("beam_width", "n", "length_penalty", "use_beam_search"), names) from None
    return beams


def token_biases(request: GenerationRequest) -> dict[int, float] | None:
    """logit_bias, clamped; None: there is none. ApiError 400 names the first keys that are no token ids."""
    given = request.logit_bias or {}
    wrong = [key[:40] for key in given if not TOKEN_ID.fullmatch(key)]
    if wrong:
        message = f"logit_bias: {', '.join(map(repr, wrong[:8]))}: keys are token ids, which are integers, as texts"
        raise bad_request(message, f"logit_bias.{wrong[0]}", "invalid_value")
    unknown = next((key for key, bias in given.items() if math.isnan(bias)), None)
    if unknown is not None:
        raise bad_request(f"logit_bias.{unknown} is not a number", f"logit_bias.{unknown}", "invalid_value")
    return {int(key): max(-100.0, min(100.0, bias)) for key, bias in given.items()} or None


def check_completion(request: CompletionRequest) -> None:
    if request.suffix is not None:
        raise not_yet("suffix")
    if request.best_of is not None and request.best_of != either(request.n, 1) and not request.use_beam_search:
        raise not_yet("best_of", "best_of other than n")
    if request.max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens may be 0 only with echo: true", "max_tokens")


def check_chat(request: ChatRequest) -> None:
    if not request.messages:
        raise bad_request("messages must not be empty", "messages")
    if request.functions is not None:
        raise not_yet("functions", "functions (tools have taken its place)")
    if request.chat_template is not None:
        raise not_yet("chat_template", "chat_template in a request")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")


def not_yet(field: str, what: str | None = None) -> ApiError:
    return bad_request(f"{what or field} is not supported yet", field, "unsupported_parameter")


def stops(request: GenerationRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def sampling_params(
    request: GenerationRequest,
    default: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Not yet validated. default: what the model recommends. max_tokens None: the rest of the context."""
    return SamplingParams(
        n=either(request.n, default.n),
        max_tokens=max_tokens,
        min_tokens=either(request.min_tokens, default.min_tokens),
        temperature=either(request.temperature, default.temperature),
        top_p=either(request.top_p, default.top_p),
        top_k=max(request.top_k, 0) if request.top_k == -1 else either(request.top_k, default.top_k),
        min_p=either(request.min_p, default.min_p),
        presence_penalty=either(request.presence_penalty, default.presence_penalty),
        frequency_penalty=either(request.frequency_penalty, default.frequency_penalty),
        repetition_penalty=either(request.repetition_penalty, default.repetition_penalty),
        seed=request.seed,
        stop=stops(request),
        stop_token_ids=tuple(either(request.stop_token_ids, [])),
        include_stop_str_in_output=either(request.include_stop_str_in_output, False),
        ignore_eos=either(request.ignore_eos, False),
        logit_bias=token_biases(request),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words=tuple(either(request.bad_words, [])),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=tuple(either(request.logprob_token_ids, [])),
        skip_special_tokens=either(request.skip_special_tokens, True),
        thinking_token_budget=request.thinking_token_budget,
        extra_args=request.vllm_xargs,
    )


def new_file(directory: Path, name: str, allowed: re.Pattern[str], field: str, rule: str, option: str) -> Path:
    """ApiError unless it would be a new file, right in the directory that the operator has set aside with `option`."""
    if not allowed.fullmatch(name):
        message = f"{field} must be a file name {rule}: it is written into the directory of {option}"
        raise bad_request(message, field, "invalid_value")
    path = directory / name
    if path.is_symlink() or path.exists():
        raise bad_request(f"{field}: {name} exists already; choose another name", field, "file_exists")
    return path
