"""What a model gets once all its tensors are placed, or when placing them failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ktopt.config import Config, ModelSettings, settled
from ktopt.diagnostics import KtoptError
from ktopt.plan import Plan


def finish(root: Any, plan: Plan) -> Any:
    """Set what the rest of transformers asks a model for: eval mode, dtype, where its parts are; and the plan itself."""
    root.eval()
    root.requires_grad_(False)
    if getattr(root, "config", None) is not None:
        root.config.dtype = getattr(torch, plan.dtype)
    root.ktopt_plan = plan
    _set_long_context(root, plan)
    _set_device_map(root)
    return root


def _set_long_context(root: Any, plan: Plan) -> None:
    """Have attention that keeps its cache in blocks do so as the plan's sections say: `ktopt_long_context`, a Config."""
    if not (plan.long_context or plan.kvc2):
        return
    long, kvc2 = settled({"long_context": plan.long_context, "kvc2": plan.kvc2})
    root.ktopt_long_context = Config(ModelSettings(name_or_path=plan.model.source), long, kvc2)
    for module in root.modules():
        if hasattr(module, "use_long_context"):
            module.use_long_context(long, kvc2)


def _set_device_map(root: Any) -> None:
    """Say where the parts are where that matters: `pipeline` moves a model without a map to the first accelerator, and `generate`
    asks it whether layers share a device. With a CPU alone, a map would make `save_pretrained` think the model offloaded."""
    devices: dict[nn.Module, torch.device] = {}
    for module in root.modules():
        own = next((t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None), None)
        if own is not None:
            devices[module] = own.device
    if not torch.accelerator.is_available() and all(d.type == "cpu" for d in devices.values()):
        return
    names = {module: path for path, module in root.named_modules()}
    embedding = root.get_input_embeddings() if hasattr(root, "get_input_embeddings") else None
    first = [embedding] if embedding in devices else []
    root.hf_device_map = {names[module]: str(devices[module]) for module in dict.fromkeys([*first, *devices])}


def load_generation_config(root: Any, folder: Path) -> bool:
    """Take the folder's generation_config.json; False where there is none, and the model's own stays."""
    if not (folder / "generation_config.json").is_file() or not hasattr(root, "generation_config"):
        return False
    from transformers import GenerationConfig

    root.generation_config = GenerationConfig.from_pretrained(str(folder))
    return True


def make_unusable(root: nn.Module, tensor: str) -> None:
    """Make the model's forward raise: it holds some of its weights only."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise KtoptError(f"this model is incomplete: loading stopped at {tensor}. Apply the plan again to a fresh model")

    root.forward = refuse
