"""POST /start_profile and /stop_profile: a timeline of what all ranks do, for an administrator (docs/dbo.md)."""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from front.profiling import EVENTS_PER_RANK, MAX_EVENTS, ProfileRefused
from server.api.params import new_file
from server.errors import ApiError, bad_request
from server.service import Service, json_response

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}\.json(\.gz)?")


class ProfileRequest(msgspec.Struct):
    """All may be left out, and so may the body. name: of a new file; events: the most that each rank keeps."""

    name: str | None = None
    events: int | None = None


_decoder = msgspec.json.Decoder(ProfileRequest)


class Profiles:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def start(self, request: Request) -> Response:
        """The file that will be written, and the ranks that record. 409 when a profile is being taken already."""
        self._service.require_ready()
        directory = self._service.config.profile_dir
        if directory is None:
            raise ApiError(403, "profiles need a directory: start the server with --profile-dir", code="no_profile_dir")
        body = await self._read(request)
        events = EVENTS_PER_RANK if body.events is None else body.events
        if not 1 <= events <= MAX_EVENTS:
            raise bad_request(f"events must be 1..{MAX_EVENTS}, got {events}", "events", "invalid_value")
        running = self._service.engine.front.profiling.path
        if running is not None:
            raise ApiError(409, f"a profile is being taken already, into {running}", code="profiling")
        path = _new_file(Path(directory), body.name)
        try:
            ranks = self._service.engine.start_profile(path, events)
        except ProfileRefused as error:
            raise ApiError(409, str(error), code="profile_refused") from None
        return json_response({"status": "started", "file": str(path), "ranks": ranks})

    async def stop(self, request: Request) -> Response:
        """What was written, once it is. 409 when no profile is being taken."""
        try:
            summary = await self._service.engine.stop_profile()
        except ProfileRefused as error:
            raise ApiError(409, str(error), code="not_profiling") from None
        except OSError as error:
            raise ApiError(500, f"the profile cannot be written: {error}", code="profile_lost") from None
        return json_response({"status": "stopped", **msgspec.structs.asdict(summary)})

    async def _read(self, request: Request) -> ProfileRequest:
        headers = request.headers
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return ProfileRequest()
        return await self._service.read(request, _decoder)


def _new_file(directory: Path, name: str | None) -> Path:
    if name is None:
        name = f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}.json.gz"
    rule = "that ends in .json or .json.gz, of letters, digits, '_', '-' and '.', at most 120 before the ending"
    return new_file(directory, name, NAME, "name", rule, "--profile-dir")
