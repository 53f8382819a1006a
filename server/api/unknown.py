"""Fields of a request that this server does not know: none that would change the answer is ignored in silence.

Those of other servers that change what is generated are refused; those that say something about the request, and
nothing about its answer, are let through; all others are named in the answer's header `x-ignored-fields`.
"""

from __future__ import annotations

import re

import msgspec

from server.errors import bad_request

HEADER = b"x-ignored-fields"
MAX_NAMED = 16
MAX_NAME = 64  # characters
NOT_PRINTABLE = re.compile(r"[^ -~]")  # what a header may not hold

# OpenAI's, and those that have no effect where there are no images, sounds or searches.
HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "parallel_tool_calls", "modalities", "verbosity", "spaces_between_special_tokens", "rid", "session_id",
        "stream_interval", "include_reasoning", "separate_reasoning", "stream_reasoning", "mm_processor_kwargs",
        "media_io_kwargs",
        "client_metadata", "betas", "context_management", "container", "mcp_servers", "cache_control", "inference_geo",
    }
)  # fmt: skip
# vLLM's, SGLang's, llama.cpp's and OpenAI's that change the answer.
REFUSED = frozenset(
    {
        "kv_transfer_params", "ec_transfer_params", "features", "content_parts", "logits_processors",
        "logit_processors", "use_beam_search", "beam_width", "length_penalty", "early_stopping", "repetition_detection",
        "prompt_embeds", "audio", "web_search_options", "function_call", "custom_logit_processor", "regex",
        "ebnf", "json_schema", "grammar", "stop_regex", "no_stop_trim", "lora_path", "lora_id", "samplers", "mirostat",
        "mirostat_tau", "mirostat_eta", "typical_p", "tfs_z", "top_a", "dry_multiplier", "dry_base",
        "dry_allowed_length", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "n_predict",
        "repeat_penalty", "repeat_last_n", "penalty_alpha", "epsilon_cutoff", "eta_cutoff", "guidance_scale",
        "negative_prompt", "banned_tokens", "dynamic_temperature", "smoothing_factor", "min_new_tokens",
        "max_new_tokens", "sampling_params", "image_data", "input_ids", "generate",
    }
)  # fmt: skip

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_unknown(body: bytes, form: type[msgspec.Struct]) -> list[str]:
    """The names of unknown fields that are ignored, at most MAX_NAMED. body: has been decoded as `form`. ApiError
    400."""
    known = form.__struct_fields__
    ignored: list[str] = []
    for name, value in _fields.decode(body).items():
        if name in known or bytes(value) == b"null":
            continue
        if name == "modalities" and b'"audio"' in bytes(value):
            raise bad_request("modalities: only text is made here", name, "unsupported_parameter")
        if name in HARMLESS:
            continue
        if name in REFUSED:
            message = f"{name} is not supported: to ignore it would change what the answer means"
            raise bad_request(message, name, "unsupported_parameter")
        if len(ignored) < MAX_NAMED:
            ignored.append(NOT_PRINTABLE.sub("?", name[:MAX_NAME]))
    return ignored
