"""The outermost layer: who may come in and with how much, request ids, and errors turned into answers.

A plain ASGI layer around the router. Everything is denied by default: when keys are configured, only the probes,
/metrics and /version are open; administration needs an administrator's key, and none configured means that no client
has one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.server import ServerConfig
from server.api.params import REQUEST_ID
from server.api.unknown import HEADER
from server.errors import ApiError, unavailable
from server.logs import Record, log_request
from server.service import Service
from server.web import FILES

OPEN = frozenset(
    {"/health", "/live", "/ready", "/ping", "/metrics", "/version", "/load", "/openapi.json", "/docs", *FILES}
)
ADMIN = frozenset(
    {
        "/abort_requests",
        "/reset_prefix_cache",
        "/admin/ranks",
        "/debug/waits",
        "/eplb/plan",
        "/eplb/rebalance",
        "/eplb/record",
        "/start_profile",
        "/stop_profile",
    }
)

LOAD_FORMAT = b"endpoint-load-metrics-format"
FREE_BYTES = 64 << 10  # of each body; the HTTP protocol holds as many before they are read

log = logging.getLogger("moesaic.server")


def digest(key: str) -> str:
    """A key as ServerConfig holds it."""
    return hashlib.sha256(key.encode()).hexdigest()


class Keys:
    """Which keys open what. Compared by digest, in constant time, against all of them."""

    def __init__(self, api_key_digests: Sequence[str], admin_key_digests: Sequence[str]) -> None:
        self._admin = tuple(admin_key_digests)
        self._api = tuple(api_key_digests)

    def check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """ApiError 401 or 403."""
        if path in OPEN:
            return
        given = [key for key in (_bearer(headers.get(b"authorization", b"")), headers.get(b"x-api-key", b"")) if key]
        admin = self._any(given, self._admin)
        if path in ADMIN:
            if not self._admin:
                message = (
                    "no administrator key is configured: start the server with --admin-api-key or MOESAIC_ADMIN_KEY"
                )
                raise ApiError(403, message, code="no_admin_key")
            if not given:
                raise _unauthorized("this route needs an administrator's key")
            if not admin:
                raise ApiError(403, "this route needs an administrator's key", code="not_admin")
        elif self._api and not admin and not self._any(given, self._api):
            raise _unauthorized("incorrect API key" if given else "an API key is needed (Authorization: Bearer KEY)")

    @staticmethod
    def _any(given: Sequence[bytes], digests: Sequence[str]) -> bool:
        found = False
        for key in given:
            sha = hashlib.sha256(key).hexdigest()
            for known in digests:
                found |= hmac.compare_digest(sha, known)
        return found


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers=[(b"www-authenticate", b"Bearer")])


class BytePool:
    """A bound on the bodies of all requests in flight, from their first byte to the end of their answer: what is made
    of them lives as long. The first FREE_BYTES of each are not counted, so that large bodies never keep small ones
    out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    def check(self, size: int) -> None:
        """ApiError 503 when a body of this size has no room now."""
        if self._used + size - FREE_BYTES > self._limit:
            raise self._full()

    def take(self, count: int) -> None:
        """ApiError 503, and nothing is taken."""
        if count and self._used + count > self._limit:
            raise self._full()
        self._used += count

    def give_back(self, count: int) -> None:
        self._used -= count

    def _full(self) -> ApiError:
        message = f"the bodies of requests in flight fill max_inflight_bytes ({self._limit}); try again later"
        return unavailable(message)


class _Held:
    """What one request has of the pool."""

    __slots__ = ("_count", "_pool")

    def __init__(self, pool: BytePool) -> None:
        self._pool = pool
        self._count = 0

    def grow(self, total: int) -> None:
        """Its body has so many bytes by now. ApiError 503."""
        more = max(0, total - FREE_BYTES) - self._count
        if more > 0:
            self._pool.take(more)
            self._count += more

    def give_back(self) -> None:
        self._pool.give_back(self._count)
        self._count = 0


class AuthMiddleware:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._config: ServerConfig = service.config
        self._pool = BytePool(service.config.max_inflight_bytes)
        self._keys = Keys(service.config.api_key_digests, service.config.admin_key_digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        headers: dict[bytes, bytes] = dict(scope["headers"])
        record = Record(_request_id(headers), scope["method"])
        root = self._config.root_path
        if root and scope["path"].startswith(f"{root}/"):  # others have it taken off by their proxy
            scope = {**scope, "path": scope["path"].removeprefix(root)}
        scope["moesaic.record"] = record
        scope["app"] = self  # tells the router to raise for what it does not know, so that we write the error
        load_format = headers.get(LOAD_FORMAT)
        started = False

        async def marked_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                self._add_headers(message, record, load_format)
                if scope["path"].startswith("/v1/messages"):  # where Anthropic's clients look for it
                    message["headers"].append((b"request-id", record.request_id.encode()))
            await send(message)

        error: ApiError | None = None
        held = _Held(self._pool)
        try:
            self._admit(scope, headers)
            await self._app(scope, self._limited(receive, held), marked_send)
        except ApiError as raised:
            error = raised
        except HTTPException as raised:  # the router's 404 and 405
            error = _from_router(raised, scope)
        except Exception as raised:
            log.exception("request %s failed", record.request_id, exc_info=raised)
            error = ApiError(500, "internal error; the server's log has the details", code="internal_error")
        finally:
            held.give_back()
        half_sent = started
        if error is not None and not half_sent:
            await _send_error(error, marked_send, scope["path"], record.request_id)
        if "route" in scope:
            record.route = scope["route"].path
        seconds = time.monotonic() - record.start
        self._service.metrics.count_http(record.method, record.route, record.status, seconds)
        if record.params is not None and self._service.traces is not None:
            self._service.traces.add(headers, record)
        if record.route not in OPEN:
            log_request(record)
        if error is not None and half_sent and error.status == 500:
            raise error  # the connection must end

    def _add_headers(self, message: Message, record: Record, load_format: bytes | None) -> None:
        headers = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode())]
        if record.ignored:
            headers.append((HEADER, ", ".join(record.ignored).encode()))
        if load_format is not None:
            headers += load_report(load_format, self._service.metrics.load())
        closing = (b"connection", b"close")
        if self._service.engine.draining and closing not in headers:
            headers.append(closing)
        message["headers"] = headers

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """ApiError for what needs no look at the body."""
        config = self._config
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size + len(scope.get("raw_path") or b"") + len(scope["query_string"]) > config.max_header_bytes:
            raise ApiError(
                431, f"the headers are larger than {config.max_header_bytes} bytes", code="headers_too_large"
            )
        self._keys.check(scope["path"], headers)
        length = headers.get(b"content-length", b"0")
        chunked = b"transfer-encoding" in headers
        if not length.isdigit():
            raise ApiError(400, "content-length is not a number", code="invalid_header")
        if int(length) > config.max_body_bytes:
            raise _too_large(config.max_body_bytes)
        self._pool.check(int(length))
        if scope["method"] == "POST" and (chunked or int(length) > 0):
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                raise ApiError(415, "content-type must be application/json", code="unsupported_content_type")
            if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                raise ApiError(415, "content-encoding is not supported", code="unsupported_content_encoding")

    def _limited(self, receive: Receive, held: _Held) -> Receive:
        """A body is measured as it comes: its length may be unknown, and what a slow client has not sent takes no
        room."""
        limit = self._config.max_body_bytes
        total = 0

        async def limited() -> Message:
            nonlocal total
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > limit:
                    raise _too_large(limit)
                held.grow(total)
            return message

        return limited


def load_report(wanted: bytes, load: Mapping[str, float]) -> list[tuple[bytes, bytes]]:
    """The header that answers `endpoint-load-metrics-format: TEXT` or `JSON` (ORCA); none for another format."""
    if wanted.upper() == b"TEXT":
        value = "TEXT " + ", ".join(f"named_metrics.{name}={number}" for name, number in load.items())
    elif wanted.upper() == b"JSON":
        value = "JSON " + json.dumps({"named_metrics": load})
    else:
        return []
    return [(b"endpoint-load-metrics", value.encode())]


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def _request_id(headers: dict[bytes, bytes]) -> str:
    """The client's, if it is fit to be repeated in headers and logs."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _from_router(error: HTTPException, scope: Scope) -> ApiError:
    if error.status_code == 405:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        message = f"{scope['method']} is not allowed here, only {allow}"
        return ApiError(405, message, code="method_not_allowed", headers=[(b"allow", allow.encode())])
    if error.status_code == 404:
        return ApiError(404, f"there is no {scope['method']} {scope['path'][:200]}", code="route_not_found")
    return ApiError(error.status_code, error.detail)


async def _send_error(error: ApiError, send: Send, path: str, request_id: str) -> None:
    """In the shape of the API whose route it is."""
    status, body = error.status, error.body()
    if path.startswith("/v1/messages"):
        status, body = error.anthropic_status, error.body("anthropic", request_id)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *error.headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
