"""The dotted names under which KTransformers' rule files call an operator."""

from __future__ import annotations


def upstream_names(module: str, name: str, *others: str) -> tuple[str, ...]:
    """Aliases of operator `name`, which stands in ktransformers.operators.`module`, and in the further modules `others`.

    KTransformers' fine-tuning tree uses the same package name, so the same dotted names serve both.
    """
    return tuple(f"ktransformers.operators.{place}.{name}" for place in (module, *others))
