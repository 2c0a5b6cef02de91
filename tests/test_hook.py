"""`import ktopt` registers the quantizer with transformers, before or after it is loaded, and costs next to nothing."""

from __future__ import annotations

import subprocess
import sys

REGISTERED = "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m; assert 'ktopt' in m, list(m)"


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quantizer_is_registered_when_ktopt_comes_first_and_the_module_is_loaded_as_it_would_be():
    run(
        "import sys, ktopt, ktopt.hook\n"
        "ktopt.hook.install()\n"
        "hooks = lambda: sum(type(f).__name__ == 'QuantizerHook' for f in sys.meta_path)\n"
        "assert hooks() == 1\n"
        f"{REGISTERED}\n"
        "assert hooks() == 0\n"
        "import transformers.quantizers.auto as auto\n"
        "assert auto.__file__.endswith('auto.py')\n"
        "assert auto.__spec__.loader.get_source(auto.__name__).count('class AutoHfQuantizer')"
    )


def test_the_quantizer_is_registered_when_transformers_comes_first_and_installing_again_is_no_error():
    run(f"import transformers.quantizers.auto, ktopt, ktopt.hook; {REGISTERED}; ktopt.hook.install(); {REGISTERED}")


def test_the_quantizer_is_registered_when_transformers_loads_its_quantizers_itself():
    run(f"import ktopt; from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_config; {REGISTERED}")


def test_importing_ktopt_imports_neither_torch_nor_transformers():
    heavy = run("import sys, ktopt; print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'transformers', 'numpy'}))")
    assert heavy.strip() == "[]"


def test_installing_the_hook_takes_less_than_a_millisecond():
    code = "import time; t = time.process_time(); from ktopt.hook import install; install(); print(time.process_time() - t)"
    assert min(float(run("import sys, ktopt; sys.modules.pop('ktopt.hook'); " + code)) for _ in range(5)) < 1e-3
