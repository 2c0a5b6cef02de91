"""Weight files behind one protocol: lazily mapped tensors by the model's own parameter names.

gguf.py reads GGUF, safetensors.py reads safetensors; names.py maps parameter names to what the file calls them. Opening a source reads
headers only and imports no torch; `read` does.
"""

from ktopt.weights.source import MissingTensor, StoredTensor, WeightError, WeightSource

__all__ = ["MissingTensor", "StoredTensor", "WeightError", "WeightSource"]
