"""Who may call: whoever has the key, where there is one; no web page but this server's own and those allowed; and no page of
another site that a name leads here (DNS rebinding). All in plain ASGI, before anything of a request is read."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ktopt.server.errors import ApiError
from ktopt.server.settings import Settings

_WITH_PORT = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^:@\[\]]+?))\.?(:[0-9]*)?")
OPEN = ("/", "/health", "/favicon.ico")
"""Paths that need no key: the page is the same for everyone, and asks for the key itself."""


class Guard:
    """Lets a request through, or answers it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._key = _digest(settings.api_key.encode()) if settings.api_key is not None else None
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            message = "a request has Content-Length or Transfer-Encoding, not both: a proxy might read another request of it"
            raise ApiError(400, message, code="invalid_http", headers={"Connection": "close"})
        host = headers.get("host", "")
        if self._key is None and not self._is_mine(host):
            raise ApiError(
                403,
                f"this server isn't called {_name_of(host)[:200]!r}; start it with --allowed-hosts to take requests by that name",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin, host):
            raise ApiError(
                403,
                f"pages of {origin[:200]!r} may not call this server; start it with --allowed-origins to let them",
                code="origin_not_allowed",
            )
        if self._key is not None and path not in OPEN:
            self._check_key(headers.get("authorization", ""))

    def _check_key(self, given: str) -> None:
        """The digests are compared, so that neither the key's length nor where it differs shows in the time taken."""
        kind, _, key = given.partition(" ")
        assert self._key is not None
        if not hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._key) or kind.lower() != "bearer":
            what = "Incorrect API key provided." if given else "You didn't provide an API key: send Authorization: Bearer KEY."
            raise ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_mine(self, host: str) -> bool:
        """Whether a Host header can't come from a page of another site: an address, or a name that is this machine's."""
        name = _name_of(host)
        return not name or "*" in self._names or name in self._names or name.endswith(".localhost") or _is_address(name)

    def _allows(self, origin: str, host: str) -> bool:
        allowed = self._settings.allowed_origins
        return "*" in allowed or origin in allowed or origin.partition("://")[2].lower() == host.lower()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _name_of(host: str) -> str:
    """A Host header without its port."""
    host = host.strip().lower()
    found = _WITH_PORT.fullmatch(host)
    return (found["address"] or found["name"]) if found is not None else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
