"""How soon the language server answers an edit: from the keystroke sent to the findings received, over a real connection.

    python benchmarks/lsp.py [--runs N] [--json FILE] [--model NAME]

Two files of 60 rules for DeepSeek-V3, one in each form, spread over eight GPUs. Each run types one character into a pattern, or
deletes it, and waits for the findings of just that version. Between edits there is a pause, as between keystrokes.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, Row, arguments, show, stopwatch

sys.path.insert(0, str(ROOT / "tests"))

from lsp_client import Doc, LspClient

from ktopt.pattern.numbers import number_regex

LAYERS = ((0, 7), (8, 15), (16, 23), (24, 31), (32, 39), (40, 47), (48, 54), (55, 60))
MOE = "ktransformers.models.modeling_deepseek_v3.DeepseekV3MoE"
MODULES = (
    (r"\.self_attn$", "self_attn", "", "KDeepseekV2Attention", {}),
    (
        r"\.(?!self_attn\.kv_b_proj).*_proj$",
        "**.*_proj - name=kv_b_proj",
        "torch.nn.Linear",
        "KTransformersLinear",
        {"generate_op": "KLinearMarlin", "prefill_op": "KLinearTorch"},
    ),
    (r"\.mlp$", f"mlp & class={MOE}", MOE, "KDeepseekV3MoE", {}),
    (r"\.mlp\.gate$", "mlp.gate", "", "KMoEGate", {}),
    (r"\.mlp\.experts$", "mlp.experts", "", "KTransformersExperts", {"generate_op": "KExpertsCPU", "generate_device": "cpu"}),
    (r"\.(input|post_attention)_layernorm$", "*_layernorm", "", "default", {}),
    (r"\.", "**", "", "default", {}),
)
"""Of each kind of module: the end of a regex, a glob below the layer, a class, the operator and its kwargs."""
OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head", "model.layers")
WORDS = ("layers", "mlp", "self_attn", "layernorm")
"""What is edited: parts of patterns, so that the file still compiles and everything is checked."""
PAUSE_S = 0.03


def list_form() -> str:
    """60 rules, a copy of each for every GPU, as upstream's files have them."""
    rules = []
    for name, _, cls, operator, options in MODULES:
        for gpu, (first, last) in enumerate(LAYERS):
            pattern = rf"^model\.layers\.{number_regex(range(first, last + 1))}{name}"
            kwargs = {"generate_device": f"cuda:{gpu}", "prefill_device": f"cuda:{gpu}", **options}
            rules.append(_rule(pattern, cls, operator, kwargs))
    return "".join([*rules, *(_rule(rf"^{path}$", "", "default", {"generate_device": "cuda:0"}) for path in OUTSIDE)])


def _rule(pattern: str, cls: str, operator: str, kwargs: dict[str, str]) -> str:
    options = "".join(f'      {key}: "{value}"\n' for key, value in kwargs.items())
    of_class = f"    class: {cls}\n" if cls else ""
    return f"- match:\n    name: '{pattern}'\n{of_class}  replace:\n    class: {operator}\n    kwargs:\n{options}"


def native_form() -> str:
    """60 rules with selectors, and the device map."""
    lets = "".join(f'  gpu{i}: "layer in {a}..{b}"\n' for i, (a, b) in enumerate(LAYERS))
    places = "".join(f'  "cuda:{i}": "$gpu{i}"\n' for i in range(len(LAYERS)))
    rules = [
        f'  - id: {operator}-{number}-{gpu}\n    match: "$gpu{gpu} & @model.layers.*.{glob}"\n    replace: {operator}\n'
        for number, (_, glob, _, operator, _) in enumerate(MODULES)
        for gpu in range(len(LAYERS))
    ]
    rules += [f'  - match: "@{path}"\n    replace: default\n' for path in OUTSIDE]
    return f"version: 1\nlet:\n{lets}place:\n{places}rules:\n{''.join(rules)}"


def time_edits(editor: LspClient, uri: str, text: str, runs: int, seed: int = 1) -> list[float]:
    """Milliseconds from an edit to its findings."""
    doc, chance = Doc(editor, uri, text), random.Random(seed)
    editor.diagnostics(uri)
    taken: list[float] = []
    for run in range(runs // 2 + 2):
        word = WORDS[run % len(WORDS)]
        typed = f"{word}{chr(97 + chance.randrange(26))}"
        for old, new in ((word, typed), (typed, word)):
            time.sleep(PAUSE_S)
            with stopwatch(taken):
                doc.replace(old, new)
                editor.diagnostics(uri)
    return sorted(taken[4:])


def main() -> None:
    parser = arguments("How soon the language server answers an edit.", runs=200)
    parser.add_argument("--model", default="deepseek-v3")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, LspClient() as editor:
        started: list[float] = []
        with stopwatch(started):
            editor.initialize(folder, {"models": [options.model]})
        rows.append(Row("start, to the answer to initialize", started[0]))
        for what, text in (("list form", list_form()), ("native form", native_form())):
            taken = time_edits(editor, (Path(folder) / f"{what[:4]}.yaml").as_uri(), text, options.runs)
            p95 = taken[int(len(taken) * 0.95)]
            rows.append(Row(f"{what}, median", taken[len(taken) // 2], "ms", taken[0], taken[-1], len(taken), target=50))
            rows.append(Row(f"{what}, 95th percentile", p95))
        editor.stop()
    show(f"ktopt lsp: an edit of 60 rules on {options.model}", rows, options.json)


if __name__ == "__main__":
    main()
