"""The tools of a chat request: checked, and as the template, the parser and the grammar of forced calls want them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from configs.server import ServerConfig
from front.chat.families import HARMONY, chosen_families
from front.chat.forced import forced_calls
from front.chat.format import OutputFormat, output_format
from front.params import StructuredOutputsParams
from front.structured.grammar import checked_grammar
from front.structured.tags import either_of
from front.text.tokenizer import Tokenizer
from server.api.openai import ChatRequest
from server.api.params import either
from server.api.structured import after_reasoning, asked_for
from server.errors import bad_request

MAX_TOOLS = 1024
WHITESPACE = " ?"  # between the tokens of JSON in forced calls: what models write, and no room to go on with spaces
NAME = re.compile(r"[^\s<>{}\"'`\\]{1,256}")


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """tools: as the request gives them. mode: whether calls are looked for, and whether there must be one. callable:
    functions that may be called. limited: these are fewer than the tools, or are named. named: one function was."""

    tools: list[dict[str, Any]] = []
    mode: Literal["none", "auto", "required"] = "none"
    callable: tuple[dict[str, Any], ...] = ()
    limited: bool = False
    named: bool = False
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """Calls must be made by a grammar: one is required, some are excluded, or arguments must be what a schema
        says."""
        strict = any(function.get("strict") for function in self.callable)
        return self.mode == "required" or (self.mode == "auto" and (strict or self.limited))

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of the parameters, by name."""
        return {function["name"]: function.get("parameters") or {} for function in self.callable}


class OutputFormats:
    """How outputs of this server's model are read."""

    def __init__(self, tokenizer: Tokenizer, config: ServerConfig) -> None:
        """ValueError where the parsers do not go together."""
        self._tokenizer = tokenizer
        self._config = config
        template = tokenizer.format_marks if config.chat_template is None else config.chat_template
        self._families = chosen_families(template, config.tool_call_parser, config.reasoning_parser)

    @property
    def reasoning(self) -> str:
        """The family of its reasoning; "": none is known."""
        return self._families[1]

    def check(self, use: ToolUse) -> None:
        """ApiError 400 where calls could not be told from text."""
        if use.mode == "none":
            return
        if not self._families[0]:
            message = (
                "tools: the format in which this model calls them is not known; the server needs --tool-call-parser"
            )
            raise bad_request(message, "tools", "unsupported_parameter")
        if use.mode == "auto" and not self._config.enable_auto_tool_choice:
            message = 'tool_choice "auto" needs a server started with --enable-auto-tool-choice'
            raise bad_request(message, "tool_choice", "unsupported_parameter")

    def grammar(self, use: ToolUse, format: OutputFormat | None, body: ChatRequest) -> StructuredOutputsParams | None:
        """What holds the calls, and the answer that the request wants where the model calls nothing. None: it is not
        needed. ApiError 400."""
        answer, field = asked_for(body)
        if use.named and field not in ("", "response_format"):  # a format is of an answer, which need not come
            raise bad_request(f"{field} and tool_choice each say what the output must be; one may", field)
        if use.mode == "required":
            answer = None
        if format is None or not (use.forced or (use.mode == "auto" and answer is not None)):
            return None
        if answer is not None and format.calls == HARMONY:
            return None  # what is wanted is said of the channel in which the model answers
        return self._forced(use, format, answer)

    def _forced(
        self, use: ToolUse, format: OutputFormat, answer: StructuredOutputsParams | None
    ) -> StructuredOutputsParams:
        """Arguments are what the schemas say. Where the grammar cannot hold all of them, those that are not strict are
        any objects. ApiError 400."""
        after = after_reasoning(format, self._tokenizer)
        loose = [function if function.get("strict") else _loose(function) for function in use.callable]
        message = ""
        for functions in (list(use.callable), loose):
            try:
                required = use.mode == "required" or answer is not None
                tag = forced_calls(functions, format, required=required)
                params = StructuredOutputsParams(structural_tag=tag, whitespace_pattern=WHITESPACE)
                if answer is not None:
                    params = either_of(tag, answer)
                params = msgspec.structs.replace(params, after_token_ids=after)
                checked_grammar(params, self._tokenizer)
            except ValueError as error:
                message = message or str(error)
            else:
                return params
        raise bad_request(f"tools: {message}", "tools", "invalid_value")

    def of(self, use: ToolUse, prompt: str, goes_on: str | None) -> OutputFormat | None:
        """goes_on: the text of the message that the output goes on with. A function that is named is called once."""
        schemas = None if use.mode == "none" else use.schemas
        return output_format(self._families, schemas, prompt, goes_on, 1 if use.named or not use.parallel else 0)


def tool_use(body: ChatRequest) -> ToolUse:
    """ApiError 400."""
    choice = body.tool_choice
    if body.tools is None:
        if choice not in (None, "none"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return ToolUse()
    if not 1 <= len(body.tools) <= MAX_TOOLS:
        raise bad_request(f"tools must hold from 1 to {MAX_TOOLS} tools, got {len(body.tools)}", "tools")
    functions: dict[str, dict[str, Any]] = {}
    for place, tool in enumerate(body.tools):
        function = _function(tool, f"tools[{place}]")
        if function["name"] in functions:
            field = f"tools[{place}].function.name"
            raise bad_request(f"{field}: {function['name']!r} is the name of another tool too", field)
        functions[function["name"]] = function
    mode, names = _choice(choice, functions)
    return ToolUse(
        tools=body.tools,
        mode=mode,
        callable=tuple(functions[name] for name in names),
        limited=len(names) < len(functions),
        named=isinstance(choice, Mapping) and choice.get("type") == "function",
        parallel=either(body.parallel_tool_calls, True),
    )


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type", "function")
    if kind != "function":
        raise bad_request(f"{where}.type: {str(kind)[:40]!r} is not supported, only function is", f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function must be an object", f"{where}.function", "invalid_value")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        field = f"{where}.function.name"
        message = f"{field} must have 1 to 256 characters, no spaces, quotes, <, >, {{ or }} among them"
        raise bad_request(message, field, "invalid_value")
    if parameters is not None and not isinstance(parameters, dict):
        field = f"{where}.function.parameters"
        raise bad_request(f"{field} must be a JSON schema, which is an object", field, "invalid_value")
    return function


def _loose(function: Mapping[str, Any]) -> dict[str, Any]:
    """The function with its parameters' names, of any type."""
    schema = function.get("parameters") or {}
    properties, required = schema.get("properties"), schema.get("required")
    parameters: dict[str, Any] = {"type": "object"}
    if isinstance(properties, Mapping):
        parameters["properties"] = {key: {} for key in properties}
        parameters["required"] = [key for key in required if key in properties] if isinstance(required, list) else []
    return {"name": function["name"], "parameters": parameters}


def _choice(choice: object, functions: Mapping[str, Any]) -> tuple[Literal["none", "auto", "required"], list[str]]:
    """The mode, and the names that may be called."""
    if choice in (None, "auto"):
        return "auto", [*functions]
    if choice == "none":
        return "none", []
    if choice == "required":
        return "required", [*functions]
    field = "tool_choice"
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return "required", [_known(choice, functions, field)]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)  # /v1/responses writes mode and tools here
        mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise bad_request(f"{field}.allowed_tools needs mode (auto or required) and tools", field, "invalid_value")
        names = [_known(tool, functions, f"{field}.allowed_tools.tools[{place}]") for place, tool in enumerate(tools)]
        return ("auto" if mode == "auto" else "required"), [*dict.fromkeys(names)]
    message = "must be none, auto, required, a function, or allowed_tools"
    raise bad_request(f"{field} {message}", field, "invalid_value")


def _known(choice: object, functions: Mapping[str, Any], field: str) -> str:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise bad_request(f"{field}.function.name is missing", f"{field}.function.name", "invalid_value")
    if not isinstance(name, str) or name not in functions:
        raise bad_request(f"{field}: {str(name)[:80]!r} is not the name of one of the tools", field, "invalid_value")
    return name
