"""What is wrong with a selector's syntax, what could stand there, and the fix where the mistake is a common one."""

from __future__ import annotations

import re
from typing import Any

EXPECTED = {
    "WORD": "a field such as class or layer",
    "GLOB": "a glob such as @model.layers.*.mlp",
    "REF": "a $name",
    "LPAR": "(",
    "RPAR": ")",
    "BANG": "!",
    "VBAR": "|",
    "AMPERSAND": "&",
    "MINUS": "-",
    "EQUAL": "= or !=",
    "TILDE": "~",
    "IN": "in",
    "ORDER": ">=, <=, > or <",
    "REGEX": "a /regex/",
    "RANGE": "a range such as 0..29",
    "VALUE": "a value",
    "STRING": "a quoted value",
    "NUMBER": "a number",
    "COMMA": ",",
    "$END": "the end",
}
_WORD = re.compile(r"[A-Za-z_]+")
OPERATORS = {"and": "&", "or": "|", "not": "!", "AND": "&", "OR": "|", "NOT": "!", "minus": "-", "except": "-", "without": "-"}


class SelectorError(Exception):
    """A selector that can't be read: why, from which offset, for how many characters, and what to write instead."""

    def __init__(self, message: str, offset: int, width: int = 1, help: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset
        self.width = width
        self.help = help


def explain(text: str, error: Any) -> SelectorError:
    """The parser's complaint (lark's UnexpectedInput) in plain words."""
    at = getattr(error, "pos_in_stream", None)
    token = getattr(error, "token", None)
    if at is None or at < 0 or (token is not None and token.type == "$END"):
        at = len(text)
    expected = getattr(error, "expected", None) or getattr(error, "accepts", None) or getattr(error, "allowed", None) or ()
    known = common_mistake(text, at)
    if known is not None:
        return known
    is_open = text[:at].count("(") > text[:at].count(")")
    words = [EXPECTED[name] for name in EXPECTED if name in expected and (is_open or name != "RPAR")]
    wanted = f"expected {', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else f"expected {words[0]}" if words else ""
    if at >= len(text):
        message = "it is empty" if not text.strip() else "it ends too early"
        bare = re.fullmatch(r"\s*([A-Za-z_]\w*(?:\.\w+)*)\s*", text)
        help = f"write @{bare[1]} for the module of that path, or name={bare[1].rpartition('.')[2]}" if bare else ""
        return SelectorError(f"{message}; {wanted}" if wanted else message, len(text), 1, help)
    found = re.match(r"\w+|.", text[at:])
    shown = found[0] if found else text[at]
    return SelectorError(f"{shown!r} can't stand here; {wanted}" if wanted else f"{shown!r} can't stand here", at, len(shown))


def common_mistake(text: str, at: int) -> SelectorError | None:
    """The mistake at or just before an offset, if it is one that people make."""
    if (start := text.rfind("==", max(0, at - 1), at + 2)) >= 0:
        return SelectorError("== is no operator here", start, 2, f"write one =: {_replaced(text, start, 2, '=')}")
    for double, single in (("&&", "&"), ("||", "|")):
        if (start := text.rfind(double, max(0, at - 1), at + 2)) >= 0:
            return SelectorError(f"{double} is no operator here", start, 2, f"write one {single}")
    for found in re.finditer(r"(\d+)\s*-\s*(\d+)", text):
        if found.start() <= at <= found.end():
            right = f"{found[1]}..{found[2]}"
            help = f"a range is written {right}: {_replaced(text, found.start(), len(found[0]), right)}"
            return SelectorError(f"{found[0]} is no range", found.start(), len(found[0]), help)
    for found in re.finditer(r"=\s*\d+\.\.\d*", text):
        if found.start() <= at <= found.end():
            right = f" in {found[0][1:].strip()}"
            return SelectorError("a range comes after `in`, not =", found.start(), 1, f"write{right} for {found[0]}")
    return _wrong_word(text, at) or _wrong_sign(text, at)


def _wrong_word(text: str, at: int) -> SelectorError | None:
    """and, or, not and the like, where the parser stopped or just before."""
    for found in _WORD.finditer(text):
        if found[0] in OPERATORS and found.start() <= at <= found.end() + 1:
            sign = OPERATORS[found[0]]
            return SelectorError(f"{found[0]!r} is no operator here", found.start(), len(found[0]), f"write {sign} for {found[0]}")
        if found[0] == "is" and found.start() == at:
            return SelectorError("'is' is no operator here", at, 2, "write = for is")
    return None


def _wrong_sign(text: str, at: int) -> SelectorError | None:
    before = text[:at].rstrip()
    if before.endswith("~") and text[at:].startswith("/"):
        help = rf"close it with /: {text.rstrip()}/; a / within it is written \/"
        return SelectorError("the regex isn't closed by a /", at, len(text) - at, help)
    if before.endswith("~"):
        return SelectorError("a regex stands between slashes", at, 1, "such as name ~ /q_.*/")
    if re.search(r"@[\w.*{},]*$", before) and text[at : at + 1] == "[":
        return SelectorError("a glob has no [...]", at, 1, "write {0..9} for numbers and {a,b} for choices")
    if re.search(r"(?:^|[\s(!])[A-Za-z_][\w.]*\.$", before) or (text[at : at + 1] in (".", "*") and re.search(r"[\w.]$", before)):
        return SelectorError("a path is written with @ before it", max(at - 1, 0), 1, "such as @model.layers.*.mlp")
    if text[at : at + 1] == "[" and re.search(r"(\bin|=)$", before):
        inner = re.match(r"\[([^\[\]]*)", text[at:])
        listed = inner[1].strip() if inner and inner[1].strip() else "0..3, 7"
        return SelectorError("values stand without brackets", at, 1, f"write in {listed}")
    if text[at : at + 1] == "^" or (text[at : at + 1] == "$" and at == len(text.rstrip()) - 1):
        pattern = text.strip().removeprefix("^").removesuffix("$").replace("/", r"\/")
        return SelectorError("a selector is no regex; one stands after ~, between slashes", at, 1, f"write path ~ /{pattern}/")
    if re.search(r"\bin\s*\($", text[: at + 1]):
        return SelectorError("values after `in` stand without parentheses", at, 1, "such as name in q_proj, k_proj")
    if text[at : at + 1] == "/" and "~" not in before[-3:]:
        return SelectorError("a regex comes after ~", at, 1, "such as path ~ /.*mlp/")
    return None


def _replaced(text: str, start: int, width: int, by: str) -> str:
    return text[:start] + by + text[start + width :]
