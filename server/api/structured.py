"""What a request wants its output to be, in every form that clients know: response_format (OpenAI), structured_outputs
(vLLM), guided_json and the like (older vLLMs)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from configs.server import STRUCTURED_BACKENDS
from front.chat.families import HARMONY
from front.chat.format import OutputFormat
from front.params import StructuredOutputsParams
from front.structured.grammar import checked_grammar
from front.text.tokenizer import Tokenizer
from server.api.openai import GenerationRequest, ResponseFormat
from server.errors import bad_request, from_value_error

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
}
ANSWER_OF_HARMONY = "<|channel|>final<|message|>"


async def structured_outputs(
    request: GenerationRequest,
    forced: StructuredOutputsParams | None,
    format: OutputFormat | None,
    tokenizer: Tokenizer,
    backend: str,
) -> tuple[StructuredOutputsParams | None, str]:
    """And the field that says it. forced: for calls of tools, which holds the rest too. backend: of the server, where
    the request names none. The grammar is checked on a thread: a large one takes longer than other streams may wait.
    ApiError 400."""
    params, field = asked_for(request)
    if forced is not None:
        return forced, "tools"
    if params is not None:
        after = () if format is None else _before_answer(format, tokenizer)
        if params.backend == "xgrammar" != backend:
            message = f"{field}: the back end xgrammar needs a server started with --structured-outputs-config"
            raise bad_request(message, field, "unsupported_parameter")
        own = backend if params.backend == "auto" else params.backend
        params = msgspec.structs.replace(params, after_token_ids=after, backend=own)
        try:
            await asyncio.to_thread(checked_grammar, params, tokenizer)
        except ValueError as error:
            raise from_value_error(error, ("structured_outputs",), {"structured_outputs": field}) from None
    return params, field


def after_reasoning(format: OutputFormat, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end the reasoning with which the output begins; (): it begins with none."""
    if format.starts_with_reasoning:
        return tuple(tokenizer.encode(format.end_of_reasoning, add_special_tokens=False))
    return ()


def _before_answer(format: OutputFormat, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens behind which an answer begins; (): it begins at once."""
    if HARMONY in (format.calls, format.reasoning):
        return tuple(tokenizer.encode(ANSWER_OF_HARMONY, add_special_tokens=False))
    return after_reasoning(format, tokenizer)


def asked_for(request: GenerationRequest) -> tuple[StructuredOutputsParams | None, str]:
    """Not yet checked. ApiError 400: several fields say what the output must be, or one says it wrongly."""
    found: dict[str, StructuredOutputsParams] = {}
    if request.response_format is not None:
        params = _of_format(request.response_format)
        if params is not None:
            found["response_format"] = params
    given = request.structured_outputs
    if given is not None:
        backend = _backend("structured_outputs.backend", given.backend)
        found["structured_outputs"] = StructuredOutputsParams(
            json=given.json,
            regex=given.regex,
            choice=None if given.choice is None else tuple(given.choice),
            grammar=given.grammar,
            json_object=given.json_object,
            structural_tag=given.structural_tag,
            disable_any_whitespace=bool(given.disable_any_whitespace),
            disable_additional_properties=bool(given.disable_additional_properties),
            whitespace_pattern=given.whitespace_pattern,
            backend=backend,
        )
    backend = _backend("guided_decoding_backend", request.guided_decoding_backend)
    for field, kind in GUIDED.items():
        value = getattr(request, field)
        if value is not None and value is not False:
            said: dict[str, Any] = {kind: tuple(value) if isinstance(value, list) else value}
            said.update(whitespace_pattern=request.guided_whitespace_pattern, backend=backend)
            found[field] = StructuredOutputsParams(**said)
    if len(found) > 1:
        message = f"{' and '.join(found)} each say what the output must be; one may"
        raise bad_request(message, [*found][-1], "invalid_value")
    for field, params in found.items():
        return params, field
    return None, ""


def _of_format(form: ResponseFormat) -> StructuredOutputsParams | None:
    kind = form.type
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        field = "response_format.json_schema"
        if form.json_schema is None:
            raise bad_request(f"{field} is missing", field, "invalid_value")
        schema = form.json_schema.schema
        if not isinstance(schema, Mapping | bool):
            raise bad_request(f"{field}.schema must be a JSON schema, which is an object", field, "invalid_value")
        return StructuredOutputsParams(json=schema if isinstance(schema, bool) else dict(schema))
    if kind == "structural_tag":
        fields: dict[str, Any] = {
            name: value
            for name, value in (
                ("format", form.format),
                ("structures", form.structures),
                ("triggers", form.triggers),
            )
            if value is not None
        }
        return StructuredOutputsParams(structural_tag={"type": kind, **fields})
    message = f"response_format.type must be text, json_object, json_schema or structural_tag, not {kind[:40]!r}"
    raise bad_request(message, "response_format", "invalid_value")


def _backend(field: str, given: str | None) -> str:
    """What is before a colon: vLLMs once took options behind it."""
    name = "auto" if given is None else given.split(":")[0]
    if name not in STRUCTURED_BACKENDS:
        message = f"{field} must be one of {', '.join(STRUCTURED_BACKENDS)}, not {name[:40]!r}"
        raise bad_request(message, field, "invalid_value")
    return name
