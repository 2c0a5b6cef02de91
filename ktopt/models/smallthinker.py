"""SmallThinker: KTransformers ran it from a copy of its own; transformers has no code for it."""

from __future__ import annotations

from ktopt.models.family import Family

FAMILY = Family(
    model_type="smallthinker",
    refusal="transformers has no SmallThinker: its code comes with the weights, and ktopt runs no code from a model folder",
)
