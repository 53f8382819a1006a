"""Token ids to continue: the body of vLLM's POST /inference/v1/generate, and the request for a completion that it
becomes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from front.params import SamplingParams
from server.api.openai import CompletionRequest, StreamOptions
from server.errors import bad_request

# by the front
_MADE = ("prediction", "prediction_token_ids", "bad_words_token_ids", "structured_outputs", "grammar", "reasoning")
SAMPLING = frozenset(SamplingParams.__struct_fields__).difference(_MADE) | {"structured_outputs"}


class TokensRequest(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] = "tokens"


def to_completion(body: TokensRequest) -> CompletionRequest:
    """ApiError 400 names what sampling_params may not hold."""
    asked = {name: value for name, value in body.sampling_params.items() if value is not None}
    detokenize = asked.pop("detokenize", False)
    wrong = next((name for name in asked if name not in SAMPLING), None)
    if wrong is not None or not isinstance(detokenize, bool):
        field = f"sampling_params.{(wrong or 'detokenize')[:64]}"
        raise bad_request(f"{field} is not supported", field, "unsupported_parameter")
    if "extra_args" in asked:
        asked["vllm_xargs"] = asked.pop("extra_args")
    shared = {name: getattr(body, name) for name in TokensRequest.__struct_fields__}
    for name in ("token_ids", "sampling_params", "output_mode"):
        del shared[name]
    options = shared.pop("stream_options")
    try:
        made = msgspec.convert({**asked, **shared}, CompletionRequest, strict=False)
    except msgspec.ValidationError as error:
        raise bad_request(f"sampling_params: {error}", "sampling_params", "invalid_value") from None
    made.prompt, made.stream_options = [body.token_ids], options
    return made
