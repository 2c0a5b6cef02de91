"""DynamicScaledDotProductAttention, where KTransformers has it: `from ktopt.operators.dynamic_attention import ...`. This declares
no operator, and imports torch."""

from __future__ import annotations

from ktopt.operators.modules.scaled_dot_product import DynamicScaledDotProductAttention

__all__ = ["DynamicScaledDotProductAttention"]
