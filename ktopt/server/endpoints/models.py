"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from ktopt.server.errors import ApiError
from ktopt.server.service import Service


def models(service: Service) -> dict[str, Any]:
    """The names that the model goes by."""
    return {"object": "list", "data": [_model(service, name) for name in service.served.names]}


def model(service: Service, name: str) -> dict[str, Any]:
    """One of them. ApiError for another name."""
    if name not in service.served.names:
        raise ApiError(404, f"The model '{name[:200]}' does not exist.", param="model", code="model_not_found")
    return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    context = service.engine.context_tokens
    return {"id": name, "object": "model", "created": service.served.created, "owned_by": "ktopt", "max_model_len": context}
