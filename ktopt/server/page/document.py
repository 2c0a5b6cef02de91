"""The page as the server sends it: one document, and headers that allow its own style sheet and scripts and nothing else. No other
address is ever asked for, and no script that a model or a prompt could write would run.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.responses import Response

from ktopt.web.document import put_together


def page() -> Response:
    """The page, the same for everyone: it holds no secret, and what it asks for needs the key."""
    html, headers = document()
    return Response(html, media_type="text/html", headers=headers)


@cache
def document() -> tuple[bytes, dict[str, str]]:
    """The page's bytes, and its headers but for the type and the length."""
    html, sources = put_together(Path(__file__).parent)
    policy = (
        "default-src 'none'",
        sources,
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return html.encode(), {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
