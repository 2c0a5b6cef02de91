"""The application: routes, and the layers around them. `create_app(engine, settings, served)` is all that others need.

A request passes, from the outside in: the access log, CORS, the guard (names, origins, the key), its route. A route reads the body
within limits, has its endpoint make the engine's request, and returns a response that waits for the engine (answering.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from ktopt import __version__
from ktopt.engine.engine import Engine
from ktopt.server.access_log import NOTE, AccessLog
from ktopt.server.answering import WaitingResponse
from ktopt.server.body import read_json
from ktopt.server.endpoints import models, status
from ktopt.server.endpoints.chat import chat
from ktopt.server.endpoints.completions import complete
from ktopt.server.errors import ApiError, first_problem
from ktopt.server.guard import Guard
from ktopt.server.openapi import description, errors_of, stream_too
from ktopt.server.page.document import page
from ktopt.server.protocol import responses
from ktopt.server.protocol.chat import ChatRequest
from ktopt.server.protocol.common import Strict
from ktopt.server.protocol.completions import CompletionRequest
from ktopt.server.service import Service
from ktopt.server.settings import Served, Settings

R = TypeVar("R", bound=Strict)
Endpoint = Callable[[Service, R, str], Awaitable[WaitingResponse]]


def create_app(engine: Engine, settings: Settings, served: Served) -> FastAPI:
    """The application over an engine, whose end is its caller's. `app.state.service` has its parts."""
    service = Service(engine, settings, served)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="ktopt serve", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.state.service = service
    _add_routes(app, service)
    app.openapi = description(app)  # type: ignore[method-assign]
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Guard, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    paths = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    app.add_middleware(AccessLog, metrics=service.metrics, paths=paths)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    posts = errors_of(400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
    gets = errors_of(401, 403)

    @app.post(
        "/v1/chat/completions", tags=["openai"], responses={**stream_too(responses.ChatCompletion), **posts}, response_model=None
    )
    async def chat_completions(request: Request) -> Response:
        return await _answered(service, request, ChatRequest, chat)

    @app.post("/v1/completions", tags=["openai"], responses={**stream_too(responses.Completion), **posts}, response_model=None)
    async def completions(request: Request) -> Response:
        return await _answered(service, request, CompletionRequest, complete)

    @app.get("/v1/models", tags=["openai"], responses={200: {"model": responses.Models}, **gets})
    async def list_models() -> dict[str, Any]:
        return models.models(service)

    @app.get("/v1/models/{name:path}", tags=["openai"], responses={200: {"model": responses.Model}, **errors_of(401, 403, 404)})
    async def get_model(name: str) -> dict[str, Any]:
        return models.model(service, name)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["state"], responses={200: {"model": responses.Health}, 503: {"model": responses.Health}})
    async def health() -> Response:
        return status.health(service)

    @app.get("/metrics", tags=["state"], responses={200: {"content": {"text/plain": {}}}, **gets}, response_class=Response)
    async def metrics() -> Response:
        return status.metrics(service)

    @app.get("/api/status", tags=["state"], responses={200: {"model": responses.Status}, **gets})
    async def engine_status() -> dict[str, Any]:
        return status.status(service)

    @app.get("/api/plan", tags=["state"], responses={200: {"model": responses.PlanSummary}, **gets})
    async def plan() -> dict[str, Any]:
        return status.plan(service)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def the_page() -> Response:
        return page()


async def _answered(service: Service, request: Request, kind: type[R], endpoint: Endpoint[R]) -> Response:
    """Read a request's body and have an endpoint answer it."""
    with service.traffic.enter():
        body = await read_json(request, service.settings.max_body_bytes, service.settings.body_timeout_s)
        try:
            asked = kind.model_validate(body)
        except ValidationError as error:
            raise first_problem(error) from None
        return await endpoint(service, asked, request.client.host if request.client else "")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope[NOTE]["error"] = error.code
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: paths and methods that there aren't."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {str(error.detail).lower()}"
    return ApiError(error.status_code, message, code="unknown_url", headers=error.headers).response()
