"""A picture as an HTML page: one file that asks for nothing else, opens without a server, and runs no script but its own, whatever
names a plan by a stranger may hold."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

from ktopt.picture.colours import colours
from ktopt.picture.page_data import page_data
from ktopt.picture.picture import Picture
from ktopt.picture.svg import drawing
from ktopt.render.style import printable
from ktopt.web.document import put_together

POLICY = (
    "default-src 'none'; {sources}; img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_PLACE = re.compile("<!-- (policy|title|drawing|data) -->")


def to_html(picture: Picture) -> str:
    """The page of a folded picture. It has every module of the plan, folded where they are alike."""
    svg, fonts = drawing(picture)
    html, sources = put_together(Path(__file__).parent / "page", {"colours.css": fonts + _colours(picture)})
    filled = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(sources=sources)}">',
        "title": escape(printable(f"{picture.plan.model.source}, {Path(picture.plan.rule_file).name} · ktopt graph")),
        "drawing": svg,
        "data": _inert(json.dumps(page_data(picture), separators=(",", ":"), allow_nan=False)),
    }
    return _PLACE.sub(lambda found: filled[found[1]], html)


def _inert(data: str) -> str:
    """JSON that ends no script element and begins no comment, wherever it stands."""
    return data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _colours(picture: Picture) -> str:
    """Classes of the devices in both schemes: dN of boxes, bN of bars and swatches."""
    return "".join(
        f".d{n}{{fill:light-dark({c.fill},{c.dark_fill});stroke:light-dark({c.line},{c.dark_line})}}"
        f".b{n}{{fill:light-dark({c.line},{c.dark_line});background-color:light-dark({c.line},{c.dark_line})}}\n"
        for n, c in enumerate(colours([device.name for device in picture.devices]).values())
    )
