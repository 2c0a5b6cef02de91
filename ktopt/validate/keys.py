"""The keys of both rule forms, and where a key belongs that stands in the wrong place."""

from __future__ import annotations

from collections.abc import Iterable

TOP = ("version", "architectures", "import", "let", "place", "rules", "dtype", "default_device", "long_context", "kvc2")
SECTIONS = ("long_context", "kvc2")
"""Those of the top that hold settings, as a config has them."""
LIST_RULE = ("match", "replace", "recursive")
NATIVE_RULE = ("id", "match", "replace", "kwargs", "when", "expect", "recursive")
MATCH = ("name", "class")
REPLACE = ("class", "kwargs")


def _all(keys: Iterable[str], where: str) -> dict[str, str]:
    return dict.fromkeys(keys, where)


_OPTIONS = ("device", "generate_device", "prefill_device", "generate_op", "prefill_op", "out_device")
_BESIDE = "it stands beside `match` and `replace`; check the indentation"
_IN_RULE = {
    **_all(_OPTIONS, "it is an option of the operator and goes into `kwargs`"),
    "class": "write it inside `match` (the module's class) or inside `replace` (the operator)",
    "name": "it goes inside `match`",
}

TOP_ELSEWHERE = _all(("match", "replace", "recursive"), "it is part of a rule: begin each rule with `- `, in a list")
LIST_RULE_ELSEWHERE = {
    **_IN_RULE,
    **_all(("id", "when", "expect"), "it is of the native form, a mapping that begins with `version: 1` and has `rules:`"),
    "kwargs": "`kwargs` goes inside `replace`",
}
NATIVE_RULE_ELSEWHERE = _IN_RULE
MATCH_ELSEWHERE = {
    **_all(_OPTIONS, "it is an option of the operator and goes into `kwargs`, inside `replace`"),
    **_all(("replace", "recursive", "kwargs", "when", "expect", "id"), _BESIDE),
}
REPLACE_ELSEWHERE = {
    **_all(_OPTIONS, "it is an option of the operator and goes into `kwargs`, one level deeper"),
    **_all(("match", "when", "expect", "id"), _BESIDE),
    "name": "it goes inside `match`",
}
