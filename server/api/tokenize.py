"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.intake import Answered, Kind
from server.service import Service


class Tokenization:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, "detokenize")

    async def _answer(self, request: Request, kind: Kind) -> Response:
        taken = await self._service.take(request, kind)
        assert isinstance(taken, Answered)
        return Response(taken.body, media_type="application/json")
