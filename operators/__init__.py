"""The operators that ktopt ships. A file here declares (no torch); `modules/` holds what runs.

Each declaring module is listed below; scripts/generate.py writes the catalogue (schemas/catalogue.json) from it.
"""

DECLARATIONS = (
    "ktopt.operators.default",
    "ktopt.operators.linear",
    "ktopt.operators.embedding",
    "ktopt.operators.experts",
    "ktopt.operators.moe",
    "ktopt.operators.router",
    "ktopt.operators.norm",
    "ktopt.operators.mlp",
    "ktopt.operators.rope",
    "ktopt.operators.attention",
    "ktopt.operators.dynamic",
    "ktopt.operators.layer",
    "ktopt.operators.model",
    "ktopt.operators.ascend",
    "ktopt.operators.xpu",
)
