"""The page as the server sends it: index.html with its style sheet and scripts put into it, and headers that allow these and
nothing else. No other address is ever asked for, and no script that a model or a prompt could write would run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

_FOLDER = Path(__file__).parent
_LINK = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">|<script src="(\w+\.js)"></script>')


def page() -> Response:
    """The page, the same for everyone: it holds no secret, and what it asks for needs the key."""
    html, headers = document()
    return Response(html, media_type="text/html", headers=headers)


@cache
def document() -> tuple[bytes, dict[str, str]]:
    """The page's bytes, and its headers but for the type and the length."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def put_in(link: re.Match[str]) -> str:
        kind, text = ("style", link[1]) if link[1] else ("script", link[2])
        text = (_FOLDER / text).read_text(encoding="utf-8")
        hashes[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{kind}>{text}</{kind}>"

    html = _LINK.sub(put_in, (_FOLDER / "index.html").read_text(encoding="utf-8")).encode()
    policy = (
        "default-src 'none'",
        f"script-src {' '.join(hashes['script'])}",
        f"style-src {' '.join(hashes['style'])}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return html, {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
