"""The OpenAPI description: bodies are read by this server itself, so their schemas are added here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ktopt.server.protocol.chat import ChatRequest
from ktopt.server.protocol.completions import CompletionRequest
from ktopt.server.protocol.responses import ErrorResponse

BODIES: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
_ERRORS = {
    400: "The request can't be answered as it is",
    401: "No key, or another than the server's",
    403: "From a page, or to a name, that this server doesn't allow",
    404: "No such model",
    408: "The body didn't arrive in time",
    413: "The body is too long",
    415: "The body isn't application/json",
    429: "Too many requests; try again after Retry-After seconds",
    500: "The server failed; its log says why",
    503: "The server is shutting down",
}


def errors_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in statuses}


def stream_too(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The response of a route that streams where the request says so."""
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"model": model, "content": stream, "description": "The answer; with stream: true, its chunks"}}


def description(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """What makes the description, once."""
    plain = app.openapi

    def made() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = plain()
            _, schemas = models_json_schema(
                [(body, "validation") for body in BODIES.values()], ref_template="#/components/schemas/{model}"
            )
            made.setdefault("components", {}).setdefault("schemas", {}).update(schemas.get("$defs", {}))
            for path, body in BODIES.items():
                schema = {"$ref": f"#/components/schemas/{body.__name__}"}
                made["paths"][path]["post"]["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            app.openapi_schema = made
        return app.openapi_schema

    return made
