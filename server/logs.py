"""What the server writes about itself: one line per finished request; never a prompt, never a key."""

from __future__ import annotations

import logging
import time
from typing import TextIO

import msgspec
from msgspec import Struct, field

from front.params import SamplingParams
from front.sequences import FinishedRequest

REQUESTS = "moesaic.requests"
_FIELDS = "moesaic_fields"


class Record(Struct):
    """What one HTTP request came to. Times are seconds of time.monotonic(); gaps are seconds between deltas.

    The generating fields stay at their defaults for the other requests.
    """

    request_id: str
    method: str
    route: str = "unmatched"
    status: int = 0
    start: float = field(default_factory=time.monotonic)
    model: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    reasoning_tokens: int = 0
    first_token: float | None = None
    finish: str | None = None
    ignored: list[str] = []  # unknown fields of its body
    params: SamplingParams | None = None
    num_choices: int = 0
    finished: list[FinishedRequest] = []  # its prompts, as the engine saw them

    def fields(self) -> dict[str, str | int | float]:
        """For the log line: what is not known is left out."""
        result: dict[str, str | int | float] = {
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
        }
        if self.model is not None:
            result |= {
                "model": self.model,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "output_tokens": self.output_tokens,
            }
        if self.first_token is not None:
            result["ttft_ms"] = round((self.first_token - self.start) * 1000, 1)
        result["e2e_ms"] = round((time.monotonic() - self.start) * 1000, 1)
        if self.finish is not None:
            result["finish"] = self.finish
        return result


def log_request(record: Record) -> None:
    logging.getLogger(REQUESTS).info("request", extra={_FIELDS: record.fields()})


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = record.__dict__.get(_FIELDS)
        return line if not fields else f"{line} " + " ".join(f"{key}={value}" for key, value in fields.items())


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str | int | float] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= record.__dict__.get(_FIELDS) or {}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(log_format: str, log_requests: bool, stream: TextIO) -> None:
    """Send this process's log lines to `stream`. log_format: "text" or "json"; ValueError otherwise."""
    handler = logging.StreamHandler(stream)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    elif log_format == "text":
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    else:
        raise ValueError(f"log_format must be text or json, got {log_format!r}")
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are about what clients send: too many to log
    logging.getLogger(REQUESTS).setLevel(logging.INFO if log_requests else logging.WARNING)
