"""Errors as OpenAI clients expect them: `{"error": {message, type, param, code}}` with every status."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from front.front import EngineBusy, EngineDraining, EngineFailed
from front.params import SamplingParams

MAX_MESSAGE = 1000  # characters: a small bad request must not earn a huge answer
RETRY_AFTER = (b"retry-after", b"1")

# The names are those of the classes that the openai client raises, where it has one.
TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowedError", 408: "RequestTimeoutError", 409: "ConflictError", 413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError", 429: "RateLimitError", 431: "HeadersTooLargeError", 500: "InternalServerError",
    503: "ServiceUnavailableError",
}  # fmt: skip

OVERLOADED = 529  # Anthropic's 503
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "invalid_request_error", 413: "request_too_large",
    415: "invalid_request_error", 429: "rate_limit_error", 431: "request_too_large", OVERLOADED: "overloaded_error",
}  # fmt: skip

encode = msgspec.json.Encoder().encode
_WHERE = re.compile(r"^(?P<what>.*?)( - at (`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")


class ApiError(Exception):
    """A request cannot be served as asked. param: the field at fault; code: a word for programs.

    headers: more response headers (lower-case names).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = list(headers)

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same about a request in which fields have other names: name here -> name there, which may have dots."""
        field, dot, rest = (self.param or "").partition(".")
        if field in names:
            self.param = names[field] + dot + rest
            self.message = self.message.replace(field, names[field], 1)
        return self

    def body(self, shape: Literal["openai", "anthropic"] = "openai", request_id: str | None = None) -> bytes:
        """The JSON body. The message is bounded; `code` is a string or null, never the status number."""
        message = self.message
        if len(message) > MAX_MESSAGE:
            message = message[: MAX_MESSAGE - 1] + "…"
        if shape == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.anthropic_status, "api_error")
            return encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})
        param = self.param if self.param is None else self.param[:200]
        error = {"message": message, "type": TYPES.get(self.status, "ApiError"), "param": param, "code": self.code}
        return encode({"error": error})

    @property
    def anthropic_status(self) -> int:
        return OVERLOADED if self.status == 503 else self.status


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, close: bool = False) -> ApiError:
    """503: try again soon. close: this server is going away, so the next try should open a new connection."""
    headers = [RETRY_AFTER, (b"connection", b"close")] if close else [RETRY_AFTER]
    return ApiError(503, message, code="unavailable", headers=headers)


def from_decode_error(error: msgspec.DecodeError | RecursionError | UnicodeError) -> ApiError:
    """400 from what msgspec says: its `$.path` becomes `param`."""
    if isinstance(error, RecursionError):
        return bad_request("JSON is nested too deeply", code="invalid_json")
    if not isinstance(error, msgspec.ValidationError):
        message = str(error)
        return bad_request(
            message if message.startswith("JSON") else f"JSON is malformed: {message}", code="invalid_json"
        )
    match = _WHERE.match(str(error))
    assert match is not None
    path, what = match["path"] or "", match["what"]
    missing = _MISSING.fullmatch(what)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"{path} is missing", path, "invalid_value")
    return bad_request(f"{path or 'body'}: {what}", path or None, "invalid_value")


def from_value_error(error: ValueError, fields: Sequence[str], names: Mapping[str, str]) -> ApiError:
    """400 from a ValueError of the engine, whose message begins with the field or names it first. names: what fields
    are called in this request, where that is not the engine's name."""
    message = str(error)
    words = re.findall(r"[a-z_0-9]+", message)
    param = next((word for word in words if word in fields), None)
    if param is not None and param in names:
        if message.startswith(param):
            message = names[param] + message.removeprefix(param)
        param = names[param]
    code = "context_length_exceeded" if "context length" in message or "max_model_len" in message else "invalid_value"
    return bad_request(message, param, code)


def unfinished(params: SamplingParams) -> ApiError:
    """What the engine could not go on with: a grammar asks for too much where one was given, and nothing else of the
    request's could have failed."""
    if (params.grammar is None and params.structured_outputs is None) or params.extra_args:
        return ApiError(500, "the engine could not finish this request", code="engine_error")
    message = "the grammar of the output allows nothing more, or asks for more work at a step than may be done"
    return bad_request(message, None, "grammar_too_complex")


def as_api_error(error: Exception) -> ApiError:
    """What the engine says to a request that cannot be served."""
    if isinstance(error, EngineDraining):
        return unavailable("the server is shutting down", close=True)
    if isinstance(error, EngineBusy):
        return unavailable(str(error))
    if isinstance(error, EngineFailed):
        return ApiError(503, f"the engine has failed: {error}", code="engine_failed", headers=[RETRY_AFTER])
    assert isinstance(error, ApiError)
    return error
