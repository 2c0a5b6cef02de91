"""Weight files behind one protocol: lazily mapped tensors by the model's own parameter names.

gguf.py and safetensors.py read headers, names.py and checkpoint_names.py know what a model's parameters are made of, open.py opens.
Opening a source reads headers only and imports no torch; `read` does.
"""

from ktopt.weights.source import MissingTensor, StoredTensor, WeightError, WeightSource

__all__ = ["MissingTensor", "StoredTensor", "WeightError", "WeightSource"]
