"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.service import Service, json_response
from server.taken import Answered, Kind


class Tokenization:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, "detokenize")

    async def info(self, request: Request) -> Response:
        """vLLM's: tokenizer_config.json, with the class and the chat template."""
        return json_response(self._service.tokenizer.info())

    async def _answer(self, request: Request, kind: Kind) -> Response:
        taken = await self._service.take(request, kind)
        assert isinstance(taken, Answered)
        return Response(taken.body, media_type="application/json")
