"""`import ktopt` registers the quantizer with transformers, before or after it is loaded, and costs next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

REGISTERED = "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m; assert 'ktopt' in m, list(m)"


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        f"import ktopt; {REGISTERED}",
        f"import transformers.quantizers.auto, ktopt; {REGISTERED}",
        f"import transformers, ktopt; {REGISTERED}",
        f"import ktopt, ktopt.hook; ktopt.hook.install(); ktopt.hook.install(); {REGISTERED}; ktopt.hook.install(); {REGISTERED}",
        f"import ktopt; from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained; {REGISTERED}",
    ],
    ids=["ktopt first", "quantizers first", "transformers first", "twice", "through AutoModel"],
)
def test_the_quantizer_is_registered(code):
    run(code)


def test_importing_ktopt_imports_neither_torch_nor_transformers():
    heavy = run("import sys, ktopt; print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'transformers', 'numpy'}))")
    assert heavy.strip() == "[]"


def test_only_one_hook_is_installed_and_it_goes_once_it_has_served():
    count = "sum(type(f).__name__ == 'QuantizerHook' for f in sys.meta_path)"
    printed = run(
        f"import sys, ktopt, ktopt.hook; ktopt.hook.install(); print({count}); import transformers.quantizers.auto; print({count})"
    )
    assert printed.split() == ["1", "0"]


def test_installing_the_hook_takes_less_than_a_millisecond():
    code = "import time; t = time.perf_counter(); from ktopt.hook import install; install(); print(time.perf_counter() - t)"
    assert min(float(run("import sys, ktopt; sys.modules.pop('ktopt.hook'); " + code)) for _ in range(3)) < 1e-3


def test_the_wrapped_module_is_loaded_as_it_would_be():
    run(
        "import ktopt, transformers.quantizers.auto as auto\n"
        "assert auto.__spec__.loader.get_source(auto.__name__).count('class AutoHfQuantizer')\n"
        "assert auto.__file__.endswith('auto.py')"
    )
