"""One line a finding, as compilers print it: file:line:column: code severity: message."""

from __future__ import annotations

from collections.abc import Sequence

from ktopt.diagnostics import Diagnostic
from ktopt.render.style import SEVERITY_COLOUR, Style, printable


def concise(diagnostics: Sequence[Diagnostic], style: Style) -> str:
    return "".join(_line(d, style) for d in diagnostics)


def _line(d: Diagnostic, style: Style) -> str:
    start = d.span.start
    place = style.paint(f"{printable(d.file)}:{start.line}:{start.column}:", "bold")
    message = " ".join(printable(d.message).splitlines())
    on = f" (on {', '.join(printable(model) for model in d.models)})" if d.models else ""
    return f"{place} {style.paint(f'{d.code} {d.severity}', SEVERITY_COLOUR[d.severity])}: {message}{on}\n"
