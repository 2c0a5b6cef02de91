"""A web page as one HTML document: its style sheets and scripts put into it, and the hashes by which a policy allows these and
nothing else, whatever a model, a prompt or a plan by a stranger may hold."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

_LINK = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">|<script src="(\w+\.js)"></script>')


def put_together(folder: Path, more: Mapping[str, str] | None = None) -> tuple[str, str]:
    """index.html of a folder with the parts that it names in it, from that folder or from this one, or from `more` by their names;
    and the script-src and style-src of its policy."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def put_in(link: re.Match[str]) -> str:
        kind, name = ("style", link[1]) if link[1] else ("script", link[2])
        text = (more or {}).get(name)
        if text is None:
            at = folder / name
            text = (at if at.exists() else Path(__file__).parent / name).read_text(encoding="utf-8")
        hashes[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{kind}>{text}</{kind}>"

    html = _LINK.sub(put_in, (folder / "index.html").read_text(encoding="utf-8"))
    return html, f"script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}"
