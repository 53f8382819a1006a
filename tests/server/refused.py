"""What every refusal of the server looks like."""

from __future__ import annotations

from typing import Any

import httpx

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    (key,) = answer.json()
    error = answer.json()[key]
    assert key == "error" and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == TYPES[status] and error["message"] and len(error["message"]) <= 1000
    assert error["code"] is None or isinstance(error["code"], str)
    assert "Traceback" not in answer.text
    return error  # type: ignore[no-any-return]
