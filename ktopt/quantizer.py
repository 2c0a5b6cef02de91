"""ktopt inside `AutoModelForCausalLM.from_pretrained(folder)`, for folders that folder.py wrote.

transformers builds the model on the meta device and hands it to its quantizer twice: before and after it loads weights. Before,
the plan is checked and its operators put in; then the model's tensors are hidden, so that transformers has nothing to load, report
missing or initialise. After, they are shown again and the plan's loader fills them, one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "ktopt"
logger = logging.get_logger(__name__)


@dataclass
class KtoptConfig(QuantizationConfigMixin):
    """`quantization_config` in config.json.

    plan      the plan's file, relative to the folder
    dtype     the plan's dtype
    weights   {path, size, fingerprint, sha256} of each weight file: path is relative to the folder, fingerprint as
              folder.fingerprint makes it, sha256 of the whole file
    """

    quant_method: str = METHOD
    plan: str = "plan.json"
    dtype: str = "bfloat16"
    weights: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As the base class, for what a damaged config.json may hold too: KtoptError names the field that is wrong."""
        from ktopt.folder import check_quantization

        check_quantization(config_dict, "config.json")
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)


class KtoptQuantizer(HfQuantizer):
    """Carries out a plan while transformers loads a model."""

    requires_calibration = False
    is_trainable = False

    def is_serializable(self) -> bool:
        """True: what is loaded is saved as a plain checkpoint, in the dtypes that it has now."""
        return True

    def update_dtype(self, dtype: Any) -> Any:
        import torch

        planned = getattr(torch, self.quantization_config.dtype)
        if dtype is not None and dtype != planned:
            logger.warning("dtype=%s is ignored: the plan in the folder was made for %s", dtype, planned)
        return planned

    def update_device_map(self, device_map: Any) -> None:
        if device_map is not None:
            logger.warning("device_map is ignored: the plan in the folder says where each module goes")

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        from ktopt.applying import Application
        from ktopt.applying.checks import check_devices, prepare
        from ktopt.diagnostics import KtoptError
        from ktopt.folder import open_folder

        if not checkpoint_files:
            raise KtoptError("this config's quantization_config is ktopt's: load its whole folder by from_pretrained(folder)")
        plan, source = open_folder(Path(checkpoint_files[0]).parent, self.quantization_config)
        check_devices(plan)
        self._application = Application(prepare(plan, model, source), source)
        if self._application.swap() is not model:
            raise KtoptError("a plan that replaces the whole model can't be loaded by from_pretrained; use ktopt.load_model")
        self._hidden = HiddenTensors(model)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._hidden.show()
        application = self._application
        del self._hidden, self._application
        try:
            application.load()
        finally:
            application.tensors.close()
        self.remove_quantization_config(model)  # what `save_pretrained` writes of it is a plain checkpoint
        model.config._is_quantized = False
        return model


class HiddenTensors:
    """Takes every parameter and buffer out of a model, and marks its modules as initialised, until `show` puts all back."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._saved = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
        self._tied = model.all_tied_weights_keys
        self._unexpected = model._keys_to_ignore_on_load_unexpected
        model.all_tied_weights_keys = {}
        model._keys_to_ignore_on_load_unexpected = {".*"}  # a copy of the weights in the folder is for ktopt to read
        for module, parameters, buffers in self._saved:
            module._parameters.update(dict.fromkeys(parameters))
            module._buffers.update(dict.fromkeys(buffers))
            module._is_hf_initialized = True

    def show(self) -> None:
        for module, parameters, buffers in self._saved:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
            del module._is_hf_initialized
        self._model.all_tied_weights_keys = self._tied
        self._model._keys_to_ignore_on_load_unexpected = self._unexpected


def register() -> None:
    """Register with transformers; again is no error."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(KtoptConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(KtoptQuantizer)
