"""Whether FlashInfer can be used on a device, which all attention that it computes asks first."""

from __future__ import annotations

from importlib.util import find_spec

import torch

WORKSPACE_BYTES = 128 << 20
"""Of a wrapper, as FlashInfer recommends it."""
LEAST_CAPABILITY = (8, 0)


def refuses_device(device: torch.device) -> str:
    """Why FlashInfer computes nothing there, or ""."""
    if device.type != "cuda":
        return f"it runs on NVIDIA GPUs, not on {device.type}"
    if find_spec("flashinfer") is None:
        return 'it isn\'t installed: pip install "ktopt[cuda]"'
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "the GPU is older than compute capability 8.0"
    return ""
