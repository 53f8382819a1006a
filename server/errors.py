"""Errors as OpenAI clients expect them: `{"error": {message, type, param, code}}` with every status."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

MAX_MESSAGE = 1000  # characters: a small bad request must not earn a huge answer
RETRY_AFTER = (b"retry-after", b"1")

# The names are those of the classes that the openai client raises, where it has one.
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

encode = msgspec.json.Encoder().encode
_WHERE = re.compile(r"^(?P<what>.*) - at (`key` in )?`\$\.?(?P<path>[^`]*)`$", re.DOTALL)


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

    def body(self) -> bytes:
        """The JSON body. The message is bounded; `code` is a string or null, never the status number."""
        message = self.message
        if len(message) > MAX_MESSAGE:
            message = message[: MAX_MESSAGE - 1] + "…"
        param = self.param if self.param is None else self.param[:200]
        error = {"message": message, "type": TYPES.get(self.status, "ApiError"), "param": param, "code": self.code}
        return encode({"error": error})


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
        return bad_request(str(error) or "JSON is malformed", code="invalid_json")
    match = _WHERE.match(str(error))
    if match is None:
        return bad_request(str(error), code="invalid_value")
    path = match["path"]
    return bad_request(f"{path or 'body'}: {match['what']}", path or None, "invalid_value")


def from_value_error(error: ValueError, fields: Sequence[str]) -> ApiError:
    """400 from a ValueError of the engine, whose message begins with the field or names it first."""
    message = str(error)
    words = re.findall(r"[a-z_0-9]+", message)
    param = next((word for word in words if word in fields), None)
    code = "context_length_exceeded" if "context length" in message or "max_model_len" in message else "invalid_value"
    return bad_request(message, param, code)
