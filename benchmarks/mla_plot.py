"""The plot of benchmarks/mla.py: what one attention layer holds for a moment against the context."""

from __future__ import annotations

from typing import Any

from context_plot import ContextPlot

X_TICKS = (4096, 8192, 20_480, 65_536, 139_264)
Y_TICKS = (0.5, 1, 2, 4, 8, 16, 32)
COLOURS = {"expanded": ("#b4540a", "#f0a35e"), "absorbed": ("#1f5fbf", "#7db3f5"), "all": ("#666", "#aaa")}
DASHES = {8192: "", 4096: "7 4", 1024: "2 3"}


def whole_context(context: int, chunk: int) -> float:
    """Bytes that transformers' attention of DeepSeek-V3 takes, which expands keys and values of all tokens at once (bfloat16)."""
    heads, nope, rope, value = 128, 128, 64, 128
    return 2.0 * heads * (context * (2 * nope + rope + value) + min(chunk, context) * (2 * (nope + rope) + value))


def memory_plot(rows: list[dict[str, Any]]) -> str:
    """Lines of the rows that are absorbed and expanded, by chunk, and of attention that expands the whole context."""
    plot = ContextPlot(
        "Memory of one DeepSeek-V3 attention layer while a chunk of a prompt is read",
        "GB held for a moment by one attention layer of DeepSeek-V3, bfloat16, against the context",
        X_TICKS,
        Y_TICKS,
        COLOURS,
    )
    for way in ("absorbed", "expanded"):
        for chunk in DASHES:
            points = [(row["context"], row["measured"] / 1e9) for row in rows if row["way"] == way and row["chunk"] == chunk]
            plot.line(points, way, DASHES[chunk], f"{way}, chunk {chunk:,}")
    plot.line([(t, whole_context(t, 8192) / 1e9) for t in X_TICKS], "all", "", "whole context expanded")
    return plot.svg()
