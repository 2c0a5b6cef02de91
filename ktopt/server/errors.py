"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, and what the engine's and pydantic's become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from ktopt.engine.request import Refused

if TYPE_CHECKING:
    from pydantic import ValidationError

INVALID = "invalid_request_error"
RETRY_AFTER_S = 1
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_REFUSED = {"queue_full": 429, "shutting_down": 503}


class ApiError(Exception):
    """What a client is told instead of an answer. `kind` is OpenAI's `type`, by default that of the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or _KINDS.get(status, INVALID)
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def unsupported(param: str, why: str) -> ApiError:
    """The refusal of a parameter that OpenAI's API has and this server doesn't do."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def invalid(param: str, why: str) -> ApiError:
    """The refusal of a parameter's value."""
    return ApiError(400, f"{param}: {why}", param=param, code="invalid_value")


def refused(error: Refused, params: Mapping[str, str]) -> ApiError:
    """What the engine's refusal is as an answer. `params` has the request's parameter that a code is about."""
    return ApiError(_REFUSED.get(error.code, 400), str(error), param=params.get(error.code), code=error.code)


def internal() -> ApiError:
    """What a client is told of a failure of the server's own; the log has the rest."""
    return ApiError(500, "the server failed to answer this request; its log says why", code="internal_error")


def first_problem(error: ValidationError) -> ApiError:
    """What is wrong with a request, of what pydantic found: the first unknown parameter, or else what is wrong with the first
    parameter; of a union's branches that which fits best, whose error is the deepest."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    of_first = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    deepest = max(of_first, key=lambda one: len(one["loc"]))
    problem = next((one for one in found if one["type"] == "extra_forbidden"), deepest)
    param = path_of(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if problem["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    code = "invalid_type" if problem["type"].endswith("_type") else "invalid_value"
    return ApiError(400, f"Invalid value for '{param}': {message}." if param else f"{message}.", param=param or None, code=code)


def path_of(places: Sequence[int | str]) -> str:
    """A pydantic location as OpenAI writes it: messages[0].content. Names of a union's branches are no part of it."""
    path = ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        elif place not in BRANCHES and place.isidentifier():
            path += f".{place}" if path else place
    return path


BRANCHES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "str", "int", "float", "bool", "text", "json_object", "json_schema")
)
"""What pydantic calls the branches of the unions in requests; no field of those is called so, but `text` and `json_schema`, whose
path is then one word short."""
