"""The Python API that mirrors the commands `ktopt apply`, `ktopt run` and `ktopt plan --context`. `check` and `compile` are
compiler.py's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.arguments import OPTIONS, known_options, model_given, options_given, rules_given, weights_given
from ktopt.compiler import compile
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.plan import Plan
from ktopt.plan_options import LONG_CONTEXT, check_mode
from ktopt.source import SourceFile

if TYPE_CHECKING:
    from ktopt.applying import ProgressEvent
    from ktopt.working_memory.asked import Memory

UNCHANGED = SourceFile("(no rules)", "- match: {name: '.*'}\n  replace: {class: default}\n")
"""Leaves every module as it is."""


def apply(
    plan: Plan | SourceFile | str | os.PathLike[str],
    model: Any = None,
    weights: Any = None,
    *,
    force: bool = False,
    progress: Callable[[ProgressEvent], None] | None = None,
    **options: Any,
) -> Any:
    """An optimized transformers model.

    plan      a Plan, a plan.json, or a rule file, which is compiled for `model`
    model     a model in hand, which is changed and returned; or what names one: a shipped name, a folder, a config.json, a GGUF
              file
    weights   a GGUF file, a safetensors file or folder, or an open WeightSource; by default those of the model or its folder
    force     go on although the plan holds errors, or was made by other versions
    progress  called with a ProgressEvent after every tensor
    options   of `compile`, where `plan` is a rule file: device, dtype, hardware, remap

    The model comes back in eval mode, and its parameters ask for no gradient. A model in hand keeps the dtypes that it has unless
    one is asked for. KtoptError says what stands in the way; a model in hand is then as it was. Refused are a module to be replaced
    that has hooks, a forward set on it, or parameters that its operator doesn't know (of `torch.nn.utils.parametrize`, say), a plan
    of another model, and weights of another model.
    """
    known_options(options, [name for name in OPTIONS if name != "weights"])
    plan = plan if isinstance(plan, Plan) else _rules_or_plan(plan)
    model, weights = model_given(model), weights_given(weights)
    _check_progress(progress)
    from ktopt.applying import apply_plan

    was_plan = isinstance(plan, Plan) or str(plan).endswith(".json")
    in_hand = model if hasattr(model, "_modules") else None
    if in_hand is None and weights is None:
        weights = _own_weights(model)
    if not isinstance(plan, Plan):
        plan = _plan(plan, model if model is not None else weights, weights, options, force)
    elif options:
        raise UsageError(f"a plan settles {', '.join(sorted(options))} already; give them to compile instead")
    if was_plan and in_hand is None and _names_model(model):
        from ktopt.plan_check import verify_model

        verify_model(plan, model)
    return apply_plan(plan, in_hand, weights, force=force, progress=progress)


def _rules_or_plan(given: Any) -> str | Path | SourceFile:
    if given is None:
        raise UsageError("what is to be applied? Give a Plan, the path of a plan.json, or that of a rule file")
    return rules_given(given)


def _names_model(model: Any) -> bool:
    """Whether this says which model it is: weights alone, which `load_model` takes for one, may not."""
    if model is None or not isinstance(model, (str, os.PathLike)) or not Path(model).exists():
        return model is not None
    path = Path(model)
    return path.suffix != ".safetensors" and (not path.is_dir() or (path / "config.json").is_file() or any(path.glob("*.gguf")))


def _check_progress(progress: Any) -> None:
    if progress is not None and not callable(progress):
        raise UsageError("progress is a function, which is called with a ProgressEvent after every tensor")


def _plan(given: SourceFile | str | os.PathLike[str], model: Any, weights: Any, options: dict[str, Any], force: bool) -> Plan:
    if isinstance(given, (str, os.PathLike)) and os.fspath(given).endswith(".json"):
        from ktopt.plan_check import open_plan

        if options:
            raise UsageError(f"{os.fspath(given)} settles {', '.join(sorted(options))} already; give them to compile instead")
        if hasattr(model, "_modules"):
            return open_plan(given, force, rebuild=False)  # it is compared with the module itself
        return open_plan(given, force)
    if model is None:
        raise UsageError("a rule file needs a model: one in hand, a name, a folder, a config.json or a GGUF file")
    return compile(given if isinstance(given, SourceFile) else Path(given), model, weights=weights, **options)


def _own_weights(model: Any) -> Path | None:
    """The weights that what names a model holds itself."""
    if not isinstance(model, (str, os.PathLike)) or not Path(model).exists():
        return None
    path = Path(model)
    return path.parent if path.name == "config.json" else path


def memory(
    plan: Plan | str | os.PathLike[str],
    context: int,
    *,
    batch: int = 1,
    chunk_size: int | None = None,
    weights: Any = None,
    hardware: Any = None,
) -> Memory:
    """What a plan takes on each device, before anything is loaded: `ktopt plan --context`.

    plan        a Plan, or a plan.json
    context     tokens of a context
    batch       sequences of so many tokens at once
    chunk_size  tokens of a prompt that pass at a time, instead of what the plan says
    weights     a weight file or folder, whose headers say what is mapped while it is read
    hardware    as `compile` takes it: what the devices have

    UsageError for numbers that can't be meant; KtoptError for a cache of blocks that has more than its settings allow.
    """
    from ktopt.trees import load_tree
    from ktopt.weights.storage import stored_in
    from ktopt.working_memory.asked import memory_of

    if not isinstance(plan, Plan):
        from ktopt.plan_check import open_plan

        plan = open_plan(plan)
    config: Any = plan.model.config
    graph = load_tree(config) if config.get("model_type") else None
    stored = stored_in(weights_given(weights), graph) if weights is not None and graph is not None else None
    machine = options_given({"hardware": hardware}).get("hardware")
    return memory_of(plan, context, batch, chunk_size=chunk_size, hardware=machine, graph=graph, stored=stored)


def load_model(
    model: str | os.PathLike[str],
    rules: Plan | SourceFile | str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    mode: str = "normal",
    config: Any = None,
    force: bool = False,
    progress: Callable[[ProgressEvent], None] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """A model and its tokenizer, ready to generate.

    model    a folder that `ktopt apply` wrote; or, as `apply` takes it, a name, a folder, a config.json or a GGUF file
    rules    a rule file, a plan or a plan.json; by default the folder's own plan, or no change at all
    weights  as `apply` takes them
    device   where modules go that no rule places; without rules, all of them
    mode     "long_context" has attention keep its cache in blocks: that which rules leave as it is, and without rules all of it,
             the rest by the operators that ktopt has for it. The model's `ktopt_session` is then a LongContextSession, on which
             `chunk_prefill` and `decode_wrapper` work (ktopt.util.utils)
    config   a config.yaml, or a Config, for that mode; by default one that lies where configs are looked for

    The tokenizer is the one beside the weights or the model, or the GGUF file's own; its end token is one of those that the model's
    `generate` stops at. KtoptError where there is none.
    """
    from ktopt.folder import is_optimized
    from ktopt.weights.tokenizer import find_tokenizer, stop_tokens

    if model is None:
        raise UsageError("which model? Give a folder that `ktopt apply` wrote, a name, a folder, a config.json or a GGUF file")
    model = model_given(model)
    known_options(options, [name for name in OPTIONS if name != "weights"])
    folder = Path(model) if isinstance(model, str | os.PathLike) else None
    check_mode(mode)
    if config is not None:
        options["config"] = config
    if mode == LONG_CONTEXT:
        if rules is None and folder is not None and is_optimized(folder):
            raise UsageError(f"{folder} has a plan of its own: give its rules, and mode='long_context', beside its weights")
        rules, options = _for_long_contexts(rules, model, weights, device, options, force), {}
        device = None
    if rules is None and folder is not None and is_optimized(folder):
        _check_progress(progress)
        loaded = _load_folder(folder, {**options, **({"device": device} if device else {})}, force, progress)
    else:
        if device is not None:
            options["device"] = device
        elif rules is None:
            options["device"] = "cpu"
        loaded = apply(UNCHANGED if rules is None else rules, model, weights, force=force, progress=progress, **options)
    tokenizer = find_tokenizer((model, weights, loaded.ktopt_plan.model.source))
    if tokenizer is None:
        raise KtoptError(
            f"no tokenizer beside {weights or model}: put tokenizer.json there, or name a folder that has it as the model"
        )
    if getattr(loaded, "generation_config", None) is not None:
        loaded.generation_config.eos_token_id = stop_tokens(loaded.generation_config.eos_token_id, tokenizer)
    if mode == LONG_CONTEXT:
        from ktopt.long_context.current import set_current
        from ktopt.long_context.session import LongContextSession

        loaded.ktopt_session = LongContextSession(loaded, tokenizer, weights=weights if weights is not None else model)
        set_current(loaded.ktopt_session)
    return loaded, tokenizer


def _for_long_contexts(rules: Any, model: Any, weights: Any, device: Any, options: dict[str, Any], force: bool) -> Plan:
    """The plan of mode long_context."""
    from ktopt.long_context.loading import long_context_plan

    settled = {name: value for name, value in options.items() if name != "config"}
    if isinstance(rules, str | os.PathLike) and os.fspath(rules).endswith(".json"):
        from ktopt.plan_check import open_plan

        rules = open_plan(rules, force)
    if isinstance(rules, Plan) and (settled or device):
        names = ", ".join(sorted({*settled, *(["device"] if device else [])}))
        raise UsageError(f"a plan settles {names} already; give them to compile instead")
    return long_context_plan(rules, model, weights, options.get("config"), device=device, **settled)


def _load_folder(folder: Path, options: dict[str, Any], force: bool, progress: Callable[[ProgressEvent], None] | None) -> Any:
    from ktopt.applying import apply_plan
    from ktopt.applying.finish import load_generation_config
    from ktopt.folder import open_folder

    if options:
        raise UsageError(f"the plan in {folder} settles {', '.join(sorted(options))} already; make the folder again to change that")
    plan, source = open_folder(folder, force=force)
    try:
        model = apply_plan(plan, weights=source, force=force, progress=progress)
    finally:
        source.close()
    load_generation_config(model, folder)
    return model
