"""What `ktopt plan --context` says that a plan takes, beside what a process that carries it out takes.

    python benchmarks/memory.py [--models smollm2,moe,mla] [--folder DIR] [--threads N] [--json FILE]

For SmolLM2, a random mixture of experts (Qwen3-MoE) and a random model with latent attention (DeepSeek-V3), by three plans each;
"tiny" has models of a few MB, which show what a process takes by itself. The prediction is `ktopt.memory`'s for the CPU, with the
weights' headers at hand. Measured is the peak resident set of a fresh process that loads the model, reads a prompt and decodes,
less that of one that made the same imports and one small matrix product (engines/memory_engine.py). Weights that stay in their file
are mapped, and their pages count on both sides. The last columns are what the process has resident when it has decoded, its own
pages and mapped ones, and the baseline: with nothing taken off.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import PYTHON, ROOT, demo_weights, machine, run

sys.path.insert(0, str(ROOT / "scripts"))
ENGINE = ROOT / "benchmarks" / "engines" / "memory_engine.py"
DECODE = 16
WITHIN = 0.05
OWN = 'version: 1\ndtype: {dtype}\nplace: {{cpu: "@**"}}\nrules: []\n'
LINEARS = """\
version: 1
dtype: {dtype}
place: {{cpu: "@**"}}
rules:
  - {{id: linears, match: "class=Linear", replace: KTransformersLinear, kwargs: {{generate_op: KLinearCPUInfer}}}}
  - {{id: embedding, match: "class=Embedding", replace: KEmbedding, kwargs: {{generate_op: KEmbeddingCPU}}}}
"""
EXPERTS = '  - {{id: experts, match: "name=experts", replace: KTransformersExperts, kwargs: {{generate_op: {op}}}}}\n'
LATENT = '  - {id: attention, match: "@model.layers.*.self_attn", replace: KDeepseekV2Attention, kwargs: {chunk_size: 512}}\n'


@dataclass(frozen=True)
class Mix:
    """A plan to be carried out: its rules, a shipped file's name or a text, and the tokens of the prompt."""

    name: str
    rules: str
    tokens: int


MODELS: dict[str, tuple[str, str, tuple[Mix, ...]]] = {
    "smollm2": ("SmolLM2 135M, Q4_1", "", (
        Mix("transformers in float32", "smollm2/reference", 2048),
        Mix("fused layers on blocks", "smollm2/cpu", 8192),
        Mix("linears on blocks, float32", LINEARS.format(dtype="float32"), 2048),
    )),
    "moe": ("Qwen3-MoE 0.4B, Q4_K", "qwen3moe-0.4b", (
        Mix("transformers in float32", OWN.format(dtype="float32"), 1024),
        Mix("fused layers on blocks", "qwen3-moe/cpu", 8192),
        Mix("grouped experts, linears on blocks", (LINEARS + EXPERTS).format(dtype="float32", op="KExpertsTorch"), 1024),
    )),
    "mla": ("DeepSeek-V3 0.3B, Q4_K", "deepseek2-0.3b", (
        Mix("transformers in float32", OWN.format(dtype="float32"), 1024),
        Mix("fused layers on blocks", "deepseek-v3/cpu", 8192),
        Mix("latent attention, experts on blocks", (LINEARS + EXPERTS).format(dtype="float32", op="KExpertsCPU") + LATENT, 2048),
    )),
    "tiny": ("Qwen3-MoE, 4 MB", "qwen3moe-tiny", (
        Mix("transformers in float32", OWN.format(dtype="float32"), 64),
        Mix("fused layers on blocks", "qwen3-moe/cpu", 64),
    )),
}  # fmt: skip
"""What the table calls a model, the preset that it is made of, and its plans."""


@dataclass(frozen=True)
class Row:
    """A mix's prediction and measurement, in bytes. Phases are measured over the baseline."""

    model: str
    mix: str
    tokens: int
    predicted: dict[str, int]
    measured: dict[str, int]
    anonymous: int
    mapped: int
    baseline: int

    @property
    def ratio(self) -> float:
        return self.predicted["peak"] / self.measured["peak"]

    @property
    def within(self) -> bool:
        return abs(self.ratio - 1) <= WITHIN


def weights_of(name: str, folder: Path) -> Path:
    """A model's file, made in the folder where it isn't there."""
    preset = MODELS[name][1]
    if not preset:
        return demo_weights()
    path = folder / f"{preset}.gguf"
    if not path.exists():
        from make_moe_gguf import make

        folder.mkdir(parents=True, exist_ok=True)
        make(path.with_suffix(".part"), preset, "Q4_K", vocab=2048).rename(path)
    return path


def rules_of(mix: Mix) -> str:
    return str(ROOT / "rules" / f"{mix.rules}.yaml") if "\n" not in mix.rules else mix.rules


def predict(rules: str, weights: Path, tokens: int) -> dict[str, int]:
    """What the plan says of the CPU: the peak of each phase, and of all."""
    import ktopt
    from ktopt.source import SourceFile

    source: Any = rules if rules.endswith(".yaml") else SourceFile("rules.yaml", rules)
    plan = ktopt.compile(source, str(weights), weights=str(weights))
    (cpu,) = ktopt.memory(plan, tokens, weights=str(weights)).devices
    kept = cpu.weight_bytes + cpu.cache_bytes + cpu.process_bytes
    phases = {"loading": cpu.loading.nbytes, "prefill": kept + cpu.prefill.nbytes, "decode": kept + cpu.decode.nbytes}
    return {"peak": cpu.together, **phases, "weights": cpu.weight_bytes, "cache": cpu.cache_bytes}


def measure(rules: str, weights: Path, tokens: int, threads: int, batch: int = 1) -> dict[str, int]:
    """What the engine says, in bytes."""
    task = {"rules": rules, "weights": str(weights), "tokens": tokens, "decode": DECODE, "threads": threads, "batch": batch}
    with tempfile.TemporaryDirectory() as cache:
        done = run([*PYTHON, str(ENGINE), json.dumps(task)], Path(cache))
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def row_of(name: str, mix: Mix, weights: Path, threads: int) -> Row:
    rules = rules_of(mix)
    found = measure(rules, weights, mix.tokens, threads)
    phases = {phase: found[phase] - found["baseline"] for phase in ("loading", "prefill", "decode")}
    measured = {"peak": max(phases.values()), **phases}
    predicted = predict(rules, weights, mix.tokens + DECODE)
    return Row(MODELS[name][0], mix.name, mix.tokens, predicted, measured, found["anonymous"], found["mapped"], found["baseline"])


def told(row: Row) -> str:
    """A line of the table, in MB: prediction, measurement, and by phase the same."""
    phases = "  ".join(
        f"{row.predicted[phase] / 1e6:7.1f} ({row.measured[phase] / 1e6:7.1f})" for phase in ("loading", "prefill", "decode")
    )
    verdict = "within 5 %" if row.within else "OFF"
    return (
        f"{row.model:<24}{row.mix:<38}{row.tokens:>6,}  {row.predicted['peak'] / 1e6:8.1f} {row.measured['peak'] / 1e6:8.1f} "
        f"{row.ratio:6.3f}  {verdict:<10}  {phases}  {row.anonymous / 1e6:8.1f} {row.mapped / 1e6:8.1f} {row.baseline / 1e6:8.1f}"
    )


HEADINGS = (
    f"{'model':<24}{'plan':<38}{'tokens':>6}  {'predicted':>8} {'measured':>8} {'ratio':>5}  {'':<10}  "
    f"{'loading':>17}  {'prefill':>17}  {'decode':>17}  {'own':>8} {'mapped':>8} {'baseline':>8}   MB, measured in brackets"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a plan says that it takes, beside what it takes.")
    parser.add_argument("--models", default="smollm2,moe,mla", help="of smollm2, moe, mla and tiny (default: all but the last)")
    parser.add_argument("--folder", type=Path, help="where the random models are made and kept (default: a temporary folder)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    options = parser.parse_args()
    rows = []
    print(HEADINGS)
    with tempfile.TemporaryDirectory() as made:
        for name in options.models.split(","):
            weights = weights_of(name, options.folder or Path(made))
            for mix in MODELS[name][2]:
                rows.append(row_of(name, mix, weights, options.threads))
                print(told(rows[-1]), flush=True)
    if options.json:
        record = {"machine": machine(), "rows": [{**asdict(row), "ratio": row.ratio, "within": row.within} for row in rows]}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if not all(row.within for row in rows):
        sys.exit("not every prediction is within 5 %")


if __name__ == "__main__":
    main()
