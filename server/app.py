"""The ASGI application: its routes."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from server.admin import RankAdmin
from server.api.chat import ChatCompletions
from server.api.completions import Completions
from server.api.messages_answer import Messages
from server.api.openai import AbortRequest, Model, ModelList
from server.api.responses_routes import Responses
from server.api.shapes import MessagesModel, MessagesModelList
from server.api.tokenize import Tokenization
from server.api.tokens_answer import Tokens
from server.eplb import Eplb, refresh, trouble
from server.errors import RETRY_AFTER, ApiError
from server.metrics import CONTENT_TYPE
from server.middleware import AuthMiddleware
from server.openapi import document, page
from server.profile import Profiles
from server.service import Service, json_response
from server.sockets import Sockets
from server.web import FILES, Web

_VERSION_HEADER = "anthropic-version"  # of Anthropic's clients
_MESSAGES = re.compile(rb'"messages"\s*:')
Handler = Callable[[Request], Awaitable[Response]]

_abort_decoder = msgspec.json.Decoder(AbortRequest)


def build_app(service: Service) -> ASGIApp:
    """Its runner also runs `service.in_flight.clock()` beside it."""
    pages = Pages(service)
    responses = Responses(service)
    handlers = _handlers(service, pages, responses)
    pages.routes = [(method, path) for method, path, _ in handlers if path not in FILES]
    routes = [Route(path, Endpoint(handler), methods=[method]) for method, path, handler in handlers]
    app: ASGIApp = AuthMiddleware(Router(routes, redirect_slashes=False), service)
    origins = service.config.allowed_origins
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "x-ignored-fields", "retry-after"],
        )
    return Sockets(app, service, responses.store)


def _handlers(service: Service, pages: Pages, responses: Responses) -> list[tuple[str, str, Handler]]:
    """Method, path and handler of each route."""
    messages, tokenization = Messages(service), Tokenization(service)
    rank_admin, eplb, profiles = RankAdmin(service), Eplb(service), Profiles(service)
    get: dict[str, Handler] = {
        **dict.fromkeys(FILES, Web().file),
        "/v1/models": pages.models,
        "/v1/models/{model:path}": pages.model,
        "/v1/responses/{response_id}": responses.retrieve,
        "/v1/responses/{response_id}/input_items": responses.input_items,
        "/health": pages.health,
        "/ping": pages.health,
        "/live": pages.live,
        "/ready": pages.ready,
        "/metrics": pages.metrics,
        "/version": pages.version,
        "/load": pages.load,
        "/openapi.json": pages.openapi,
        "/docs": pages.docs,
        "/tokenizer_info": tokenization.info,
        "/admin/ranks": rank_admin.table,
        "/debug/waits": pages.waits,
        "/eplb/status": eplb.status,
        "/eplb/placement": eplb.placement,
        "/eplb/load": eplb.load,
    }
    completions, chat, tokens = Completions(service), ChatCompletions(service), Tokens(service)
    post: dict[str, Handler] = {
        "/v1/completions": completions.answer,
        "/v1/chat/completions": chat.answer,
        "/v1/chat/completions/batch": chat.batch,
        "/inference/v1/generate": tokens.generate,
        "/v1/completions/render": tokens.of_completion,
        "/v1/chat/completions/render": tokens.of_chat,
        "/v1/messages/render": tokens.of_messages,
        "/invocations": Invocations(service, chat, completions).answer,
        "/v1/responses": responses.answer,
        "/v1/responses/input_tokens": responses.input_tokens,
        "/v1/responses/compact": responses.compact,
        "/v1/responses/{response_id}/cancel": responses.cancel,
        "/v1/messages": messages.answer,
        "/v1/messages/count_tokens": messages.count_tokens,
        "/tokenize": tokenization.tokenize,
        "/v1/tokenize": tokenization.tokenize,
        "/detokenize": tokenization.detokenize,
        "/v1/detokenize": tokenization.detokenize,
        "/ping": pages.health,
        "/abort_requests": pages.abort_requests,
        "/reset_prefix_cache": pages.reset_prefix_cache,
        "/admin/ranks": rank_admin.resize,
        "/eplb/plan": eplb.plan,
        "/eplb/rebalance": eplb.rebalance,
        "/eplb/record": eplb.record,
        "/start_profile": profiles.start,
        "/stop_profile": profiles.stop,
    }
    delete: dict[str, Handler] = {"/v1/responses/{response_id}": responses.delete}
    tables = {"POST": post, "GET": get, "DELETE": delete}
    return [(method, path, handler) for method, table in tables.items() for path, handler in table.items()]


class Invocations:
    """SageMaker's route: a chat or a completion, by what the body has."""

    def __init__(self, service: Service, chat: ChatCompletions, completions: Completions) -> None:
        self._service = service
        self._chat = chat
        self._completions = completions

    async def answer(self, request: Request) -> Response:
        has_messages = _MESSAGES.search(await self._service.body(request)) is not None
        return await (self._chat if has_messages else self._completions).answer(request)


class Endpoint:
    """A handler as an ASGI application, without starlette's layers around it: each costs something with every token."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


class Pages:
    """Everything that does not generate."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._version = metadata.version("moesaic")
        self.routes: list[tuple[str, str]] = []  # method and path of all there are

    async def models(self, request: Request) -> Response:
        self._require_loaded()
        found = [self._model(name, request) for name in self._service.plan.served_model_names]
        if _VERSION_HEADER in request.headers:
            return json_response(MessagesModelList(data=found, first_id=found[0].id, last_id=found[-1].id))
        return json_response(ModelList(data=found))

    async def model(self, request: Request) -> Response:
        self._require_loaded()
        return json_response(self._model(self._service.model_name(request.path_params["model"]), request))

    def _model(self, name: str, request: Request) -> Any:
        """As Anthropic's clients read it where one asks."""
        service, limit = self._service, self._service.plan.max_model_len
        if _VERSION_HEADER in request.headers:
            created = datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return MessagesModel(
                id=name, display_name=name, created_at=created, max_input_tokens=limit, max_tokens=limit
            )
        return Model(id=name, created=service.created, root=service.plan.served_model_names[0], max_model_len=limit)

    def _require_loaded(self) -> None:
        """ApiError 503 until all ranks have been ready once: what waits for 200 sends requests then."""
        state, why = self._service.state()
        if state == "loading":
            raise ApiError(503, f"{state}: {why}", code=state, headers=[RETRY_AFTER])

    async def live(self, request: Request) -> Response:
        """The process answers: also while it loads."""
        return json_response({"status": "alive"})

    async def health(self, request: Request) -> Response:
        """Alive, once the model has been loaded: also while draining or short of ranks. The body of a failure names
        the rank."""
        self._require_loaded()
        failed = self._service.engine.failed
        if failed is not None:
            raise ApiError(503, failed, code="engine_failed", headers=[RETRY_AFTER])
        return json_response({"status": "alive", **self._waiting(), **trouble(self._service)})

    async def ready(self, request: Request) -> Response:
        state, why = self._service.state()
        if state != "ready":
            raise ApiError(503, f"{state}: {why}", code=state, headers=[RETRY_AFTER])
        members = self._service.engine.members
        states = [state.value for state in members.states[: members.count]]
        answer = {"status": "ready", "mode": members.mode, "ranks": states, **self._waiting(), **trouble(self._service)}
        return json_response(answer)

    def _waiting(self) -> dict[str, dict[str, str]]:
        """Why ranks do not go on or do not come back, as they said themselves; empty when none has said so."""
        troubles = self._service.engine.members.troubles
        return {"waiting": {str(rank): reason for rank, reason in sorted(troubles.items())}} if troubles else {}

    async def waits(self, request: Request) -> Response:
        """Which ranks wait for which, from the threshold on (docs/surviving.md)."""
        waits = self._service.engine.front.waits
        threshold = self._service.plan.wait_warning_seconds
        return json_response({"threshold_seconds": threshold, "now": waits.now, "past": list(waits.past)})

    async def metrics(self, request: Request) -> Response:
        await refresh(self._service)
        return Response(self._service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._version})

    async def load(self, request: Request) -> Response:
        """server_load: generating requests in flight; beside it what the ranks say."""
        return json_response({"server_load": len(self._service.in_flight), **self._service.metrics.load()})

    async def openapi(self, request: Request) -> Response:
        return json_response(document(self.routes, self._version))

    async def docs(self, request: Request) -> Response:
        text = page(document(self.routes, self._version))
        policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(text, media_type="text/html", headers=policy)

    async def abort_requests(self, request: Request) -> Response:
        """Aborted requests answer with what they have and finish_reason "abort"."""
        service = self._service
        body = await service.read(request, _abort_decoder)
        aborted = [service.engine.abort(name) for name in service.in_flight.prompt_ids(body.request_ids)]
        return json_response({"aborted": sum(aborted)})

    async def reset_prefix_cache(self, request: Request) -> Response:
        self._service.require_ready()
        self._service.engine.reset_prefix_cache()
        return json_response({"status": "ok"})
