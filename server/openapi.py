"""GET /openapi.json: what this server answers, in OpenAPI 3.1, made from the types that decode and encode it; and
GET /docs, a page that shows it and loads nothing from elsewhere."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from server.admin import RankTable
from server.api.messages import MessagesRequest
from server.api.openai import (
    AbortRequest,
    BatchChatRequest,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    Model,
    ModelList,
    ResizeRequest,
    Tokenized,
    TokenizeRequest,
)
from server.api.responses import ResponsesRequest
from server.api.shapes import (
    Counted,
    InputItems,
    LoadReport,
    MessageObject,
    ResponseObject,
    StateReport,
    VersionReport,
)
from server.api.tokens import TokensRequest


class Operation(NamedTuple):
    """request, answer: types of the bodies; None: no body, or one without a fixed form."""

    text: str
    request: type | None = None
    answer: type | None = None


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation("Continue a prompt.", CompletionRequest, Completion),
    ("POST", "/v1/chat/completions"): Operation("Continue a conversation.", ChatRequest, ChatCompletion),
    ("POST", "/v1/chat/completions/batch"): Operation("Continue several.", BatchChatRequest, ChatCompletion),
    ("POST", "/inference/v1/generate"): Operation("Continue token ids.", TokensRequest),
    ("POST", "/v1/completions/render"): Operation("Such bodies of a request's prompts.", CompletionRequest),
    ("POST", "/v1/chat/completions/render"): Operation("Such a body of a conversation.", ChatRequest),
    ("POST", "/v1/messages/render"): Operation("Such a body of a message.", MessagesRequest),
    ("POST", "/invocations"): Operation("As /v1/chat/completions or /v1/completions, by what the body has."),
    ("POST", "/v1/responses"): Operation("OpenAI's Responses.", ResponsesRequest, ResponseObject),
    ("POST", "/v1/responses/input_tokens"): Operation("The tokens of such a prompt.", ResponsesRequest, Counted),
    ("POST", "/v1/responses/compact"): Operation("The conversation, summed up in one item.", ResponsesRequest),
    ("GET", "/v1/responses/{response_id}"): Operation("A response that is kept.", None, ResponseObject),
    ("DELETE", "/v1/responses/{response_id}"): Operation("Forget it."),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation("What it answered.", None, InputItems),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        "End one that runs in the background.", None, ResponseObject
    ),
    ("POST", "/v1/messages"): Operation("Anthropic's Messages.", MessagesRequest, MessageObject),
    ("POST", "/v1/messages/count_tokens"): Operation("The tokens of a message's prompt.", MessagesRequest, Counted),
    ("POST", "/tokenize"): Operation("Text or messages to token ids.", TokenizeRequest, Tokenized),
    ("POST", "/v1/tokenize"): Operation("Text or messages to token ids.", TokenizeRequest, Tokenized),
    ("POST", "/detokenize"): Operation("Token ids to text.", DetokenizeRequest, Detokenized),
    ("POST", "/v1/detokenize"): Operation("Token ids to text.", DetokenizeRequest, Detokenized),
    ("GET", "/tokenizer_info"): Operation("The tokenizer's configuration."),
    ("GET", "/v1/models"): Operation("The served names.", None, ModelList),
    ("GET", "/v1/models/{model}"): Operation("One of them.", None, Model),
    ("GET", "/health"): Operation("Whether the server is alive.", None, StateReport),
    ("GET", "/ping"): Operation("As /health.", None, StateReport),
    ("POST", "/ping"): Operation("As /health.", None, StateReport),
    ("GET", "/live"): Operation("Whether the process answers.", None, StateReport),
    ("GET", "/ready"): Operation("Whether requests are served.", None, StateReport),
    ("GET", "/load"): Operation("How much is in flight.", None, LoadReport),
    ("GET", "/debug/waits"): Operation("Which ranks wait for which."),
    ("GET", "/metrics"): Operation("Prometheus metrics."),
    ("GET", "/version"): Operation("The server's version.", None, VersionReport),
    ("GET", "/openapi.json"): Operation("This document."),
    ("GET", "/docs"): Operation("This document, as a page."),
    ("GET", "/admin/ranks"): Operation("The live table of ranks.", None, RankTable),
    ("POST", "/admin/ranks"): Operation("How many ranks shall serve.", ResizeRequest, RankTable),
    ("POST", "/abort_requests"): Operation("End requests.", AbortRequest),
    ("POST", "/reset_prefix_cache"): Operation("Forget the prefix cache."),
    ("GET", "/eplb/status"): Operation("How the experts' load is spread."),
    ("GET", "/eplb/placement"): Operation("Which slot has which expert."),
    ("GET", "/eplb/load"): Operation("Tokens of each expert in the last window."),
    ("POST", "/eplb/plan"): Operation("A plan for these loads; nothing moves."),
    ("POST", "/eplb/rebalance"): Operation("Take that plan."),
    ("POST", "/eplb/record"): Operation("Write the loads to a file."),
    ("POST", "/start_profile"): Operation("Begin a timeline of all ranks."),
    ("POST", "/stop_profile"): Operation("End it, and write it."),
}
_JSON = "application/json"
_TEXTS = {"/metrics": "text/plain", "/docs": "text/html"}  # the answers that are no JSON
_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Moesaic: the API</title><style>
body{font:15px/1.45 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color-scheme:light dark}
code,summary{font-family:ui-monospace,monospace}summary{cursor:pointer;padding:.25em 0}
table{border-collapse:collapse;margin:.3em 0 1em 1em}td{padding:.1em .8em .1em 0;vertical-align:top}
b{display:inline-block;width:4em}</style><h1>Moesaic: the API</h1><p>The same for programs:
<a href="openapi.json">openapi.json</a>.</p>"""


def document(routes: Sequence[tuple[str, str]], version: str) -> dict[str, Any]:
    """routes: (method, path in starlette's form) of all that is served."""
    kinds = [kind for operation in OPERATIONS.values() for kind in (operation.request, operation.answer) if kind]
    refs, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(kinds, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, route in routes:
        path = re.sub(r":\w+}", "}", route)
        operation = OPERATIONS[method, path]
        answer = {"schema": schema_of[operation.answer]} if operation.answer else {}
        entry: dict[str, Any] = {
            "summary": operation.text,
            "responses": {
                "200": {"description": "The answer.", "content": {_TEXTS.get(path, _JSON): answer}},
                "default": {"description": "What is wrong.", "content": {_JSON: {"schema": _ERROR}}},
            },
        }
        if operation.request:
            entry["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema_of[operation.request]}}}
        names = re.findall(r"{(\w+)}", path)
        if names:
            entry["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths.setdefault(path, {})[method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "Moesaic", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def page(description: dict[str, Any]) -> str:
    """The document as HTML without scripts."""
    parts = [_HEAD]
    for path, methods in description["paths"].items():
        for method, entry in methods.items():
            text = html.escape(entry["summary"])
            parts.append(f"<details><summary><b>{method.upper()}</b>{html.escape(path)}</summary><p>{text}")
            for title, content in (
                ("Request", entry.get("requestBody", {}).get("content", {})),
                ("Answer", entry["responses"]["200"]["content"]),
            ):
                name = content.get(_JSON, {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
                if name:
                    parts += [f"<p>{title}: <a href='#{name}'><code>{name}</code></a>"]
            parts.append("</details>")
    parts.append("<h2>Types</h2>")
    for name, schema in description["components"]["schemas"].items():
        parts.append(f"<h3 id='{name}'>{name}</h3><table>")
        needed = schema.get("required", ())
        for field, kind in schema.get("properties", {}).items():
            star = " (needed)" if field in needed else ""
            parts.append(f"<tr><td><code>{html.escape(field)}</code>{star}<td>{html.escape(_kind(kind))}")
        parts.append("</table>")
    return "".join(parts)


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_kind(item) for item in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(repr, schema["enum"]))
    kind = schema.get("type", "anything")
    return f"list of {_kind(schema.get('items') or {})}" if kind == "array" else str(kind)
