"""Kimi-K2: DeepSeek-V3's architecture under its own model_type, which transformers doesn't have."""

from __future__ import annotations

from ktopt.models import deepseek_v3
from ktopt.models.family import Family

FAMILY = Family(model_type="kimi_k2", builds_as="deepseek_v3", only=deepseek_v3.FAMILY.only)
