"""Counting how often a model's experts are chosen while it reads a text: a profile for `ktopt place --popularity`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ktopt.diagnostics import KtoptError
from ktopt.graph import ModuleGraph
from ktopt.popularity import Popularity, experts_in, layers_of

PIECE_TOKENS = 512
"""Tokens of a text that pass the model at a time; what stands before a piece is not seen from it."""


def count_experts(
    model: Any, token_ids: list[int], piece_tokens: int = PIECE_TOKENS, say: Callable[[int, int], None] = lambda done, of: None
) -> Popularity:
    """How often each expert is chosen while a model reads a text, piece by piece.

    The experts modules are watched, transformers' own as well as ktopt's; a fused layer computes in parts meanwhile. `say` is told
    how many tokens of how many have been read. KtoptError for a model whose experts aren't called so, or has none.
    """
    graph = _tree(model)
    paths = {module.path: module for module in layers_of(graph)}
    if not paths:
        raise KtoptError(
            "this model has no layers whose experts are one module: there is nothing to count"
            if not any(module.role == "experts" for module in graph.modules)
            else "this model has a module for each expert, which can't be split by popularity"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    if not token_ids:
        raise KtoptError("the text has no tokens")
    device = model.get_input_embeddings().weight.device
    body = getattr(model, "base_model", model)  # the head has no part in it
    with watched({path: modules[path] for path in paths}) as counts, torch.inference_mode():
        for start in range(0, len(token_ids), piece_tokens):
            piece = torch.tensor([token_ids[start : start + piece_tokens]], device=device)
            body(input_ids=piece, use_cache=False)
            say(min(start + piece_tokens, len(token_ids)), len(token_ids))
    missing = [path for path in paths if path not in counts]
    if missing:
        raise KtoptError(f"{missing[0]} was never called with its tokens' experts, so they can't be counted")
    found = {path: _padded(counts[path], experts_in(module)) for path, module in paths.items()}
    return Popularity(graph.name, graph.model_type, graph.digest, len(token_ids), found)


def _tree(model: Any) -> ModuleGraph:
    """The model's tree as it is without ktopt's operators, by which a profile is checked."""
    from ktopt.trees import graph_from_module, load_tree

    plan = getattr(model, "ktopt_plan", None)
    return graph_from_module(model) if plan is None else replace(load_tree(plan.model.config), name=plan.model.source)


@contextmanager
def watched(experts: dict[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Within, what experts modules are called with is counted: how often each expert is chosen, by path."""
    counts: dict[str, torch.Tensor] = {}

    def seen(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
        if chosen is None:
            return
        found = torch.bincount(chosen.detach().reshape(-1).cpu().long())
        before = counts.get(path)
        if before is not None:
            size = max(len(before), len(found))
            found = nn.functional.pad(found, (0, size - len(found))) + nn.functional.pad(before, (0, size - len(before)))
        counts[path] = found

    hooks = [
        module.register_forward_pre_hook(lambda _, args, kwargs, path=path: seen(path, args, kwargs), with_kwargs=True)
        for path, module in experts.items()
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _padded(counts: torch.Tensor, size: int) -> tuple[int, ...]:
    return (*counts.tolist(), *[0] * (size - len(counts)))
