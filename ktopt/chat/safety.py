"""What reaches the terminal of text that a model or a file wrote, and what reaches a model of text that was typed or pasted."""

from __future__ import annotations

_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]
_LINES = {0x2028: "\n", 0x2029: "\n"}
_OVERRIDES = dict.fromkeys([0x202D, 0x202E])
"""Characters that show text in another order than it has."""
_SHOWN = {**_CONTROLS, **_LINES, **_OVERRIDES}


def shown(text: str) -> str:
    """`text` without control characters other than line breaks and tabs, so that it can't drive the terminal: of an escape sequence
    its harmless rest is seen. Each character stands for itself, so that a text may come in pieces."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_SHOWN)


def typed(text: str) -> str:
    """What a person meant: line breaks of one kind, no other control characters, and no halves of surrogate pairs, as which bytes
    that aren't UTF-8 are read."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return lines.encode("utf-8", "replace").decode("utf-8").translate(_CONTROLS)
