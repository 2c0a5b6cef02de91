"""What a plan takes while it is loaded and while it runs on a context: weights, cache and the most that is held for a moment.

Operators say what their modules take (`OperatorSpec.footprint`, `working`, `loading`); `default` says it of transformers' own. Here
it is added up: parts.py finds the modules that run, passing.py the worst moment of a pass, loading.py that of loading, blocks.py a
cache of blocks, devices.py all of it by device, fitting.py what would fit; asked.py is the answer to users.
"""

from ktopt.working_memory.blocks import DISK, block_bytes, block_settings
from ktopt.working_memory.devices import DeviceMemory, Reckoning, attention_working, working_memory
from ktopt.working_memory.fitting import LEAST_CHUNK, fitting_chunk, fitting_context, over_limits
from ktopt.working_memory.passing import Peak
from ktopt.working_memory.pieces import keeps_blocks, layer_number, prompt_piece

__all__ = [
    "DISK", "LEAST_CHUNK", "DeviceMemory", "Peak", "Reckoning", "attention_working", "block_bytes", "block_settings",
    "fitting_chunk", "fitting_context", "keeps_blocks", "layer_number", "over_limits", "prompt_piece",
    "working_memory",
]  # fmt: skip
