"""Long contexts on SmolLM2: how fast they are decoded, read and attended to, and what memory they take, beside llama.cpp.

    python benchmarks/long_context.py [--parts NAME ...] [--rounds N] [--contexts N ...] [--llama-python PYTHON]
                                      [--json FILE] [--plot FILE.svg]

decode     tokens/s after each context with the same budget of blocks; llama.cpp's after 16K on the same file
attention  ms of one layer at the longest context, choosing included, beside dense attention by ktopt, torch's sdpa and two products
prefill    exact at 4K and 16K beside llama.cpp; sparse at 16K and the longest context, to 21 blocks
memory     the process's peak when it has read a text with budgets of 0.25 GB and 0.5 GB, the rest on disk, and whether it says
           what it says with all in RAM
disk       decode with 95 % of the chosen blocks in memory and the rest read from disk, past the page cache, beside all in RAM

Each measurement is a process of its own; medians of --rounds count. llama.cpp runs with flash attention and without, and the
faster counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import PYTHON, ROOT, demo_weights, machine, run
from context_plot import ContextPlot
from cpu_engines import engines_for, memory_gb_per_s, run_engine
from cpu_models import MODELS

from ktopt.cli.table import Column, layout
from ktopt.runtime.foreign_load import ForeignLoad
from ktopt.runtime.threads import SHORT_SPIN
from ktopt.weights.tokenizer import find_tokenizer

ENGINE = ROOT / "benchmarks" / "engines" / "long_context_engine.py"
CALM = ("env", f"GOMP_SPINCOUNT={SHORT_SPIN}")
"""What `ktopt run` and `ktopt bench` set for themselves before they import torch."""
PARTS = ("decode", "attention", "prefill", "memory", "disk")
BLOCKS, FEW_BLOCKS = 124, 16
"""Chosen ones: with the sink and a window of 512 tokens, 129 and 21 blocks are attended to."""
LOCAL_TOKENS = 512
DEVICE_GB, HOST_GB = 0.25, 0.5
SLACK = 1.1
RESIDENT = 0.95
TARGETS = {"decode, longest to 16K": 0.8, "decode, to llama.cpp at 16K": 3.0, "129 blocks": 5.0, "21 blocks": 15.0, "disk": 0.5}


def settings(context: int, **others: Any) -> dict[str, Any]:
    """kwargs of KDynamicAttention: room for a context and a little more."""
    return {
        "max_seq_len": (context // 128 + 2) * 128, "block_size": 128, "local_windows_len": LOCAL_TOKENS, "chunk_size": 512,
        "second_select_num": BLOCKS, "anchor_type": "KEY_INT4", "dense_layer_num": 0, "preselect_block": False,
        "cpu_memory_size_GB": 16, **others,
    }  # fmt: skip


class Bench:
    """Runs tasks, and says what is known of each: a table of rows, and whether others used the machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows, self.record = options, [], {}
        self.longest = max(options.contexts)
        self.busy = 0.0

    def ask(self, what: str, context: int, rounds: int | None = None, **task: Any) -> list[dict[str, Any]]:
        """What the engine said, once for each round."""
        given = {"what": what, "threads": self.options.threads, "context": context, "model": str(demo_weights())}
        given |= {"rules": str(ROOT / "rules" / "smollm2" / "cpu.yaml"), "decode": self.options.decode, **task}
        said = []
        for _ in range(rounds or self.options.rounds):
            load = ForeignLoad()
            finished = run([*CALM, PYTHON[0], str(ENGINE), json.dumps(given)], Path.home() / ".cache")
            said.append(json.loads(finished.stdout.strip().splitlines()[-1]))
            self.busy = max(self.busy, load.cores() or 0.0)
        self.record.setdefault(what, []).append({"task": given, "said": said})
        return said

    def speed(self, what: str, context: int, **task: Any) -> float:
        return median(said["tokens_per_s"] for said in self.ask(what, context, **task))

    def say(self, what: str, found: str, note: str = "", target: float | None = None, value: float | None = None) -> None:
        verdict = "" if target is None or value is None else f"{'met' if value >= target else 'MISSED'} {target:g}"
        self.rows.append([what, found, verdict, note])
        print("  ".join(self.rows[-1]), flush=True)

    def plot(self) -> str:
        """Decoding against the context, as far as it was measured."""
        plot = ContextPlot(
            "Decoding speed of SmolLM2 against the context",
            "tokens a second of SmolLM2, two threads, against the context",
            tuple(self.options.contexts),
            (8, 16, 32, 64, 128, 256),
            COLOURS,
        )
        for name, speeds in self.record.get("speeds", {}).items():
            blocks, _, way = name.partition(" blocks, ")
            plot.line(list(speeds.items()), WAYS[way]["kind"], DASHES[int(blocks)], name)
        if peer := self.record.get("peer"):
            plot.line([(16_384, peer)], "peer", "", "llama.cpp, whole context")
        return plot.svg()


def llama(bench: Bench, phase: str, tokens: int) -> float | None:
    """llama.cpp's tokens a second on the same file, by the faster of its two ways; None where it isn't there."""
    options = argparse.Namespace(**vars(bench.options) | {"engines": ["llama"], "prefill": [tokens], "depths": [], "rules": None})
    if phase == "decode":
        options.prefill, options.depths = [], [tokens]
    engines, missing = engines_for(MODELS["smollm2"], options)
    for line in missing:
        print(f"missing: {line}")
    found = [run_engine(engine, MODELS["smollm2"], demo_weights(), options)["results"][0]["tokens_per_s"] for engine in engines]
    bench.record.setdefault("llama.cpp", []).append({"phase": phase, "tokens": tokens, "tokens_per_s": found})
    return max(found) if found else None


WAYS: dict[str, dict[str, Any]] = {
    "QUEST": {"kind": "quest", "settings": {"anchor_type": "QUEST"}},
    "KEY_INT4": {"kind": "int4", "settings": {"anchor_type": "KEY_INT4"}},
    "KEY_INT4 each 5 layers": {"kind": "steps", "settings": {"anchor_type": "KEY_INT4", "layer_step": 5}},
}
"""Ways to choose blocks that are decoded with: what their lines in the plot are, and their settings."""
COLOURS = {
    "quest": ("#1f5fbf", "#7db3f5"), "int4": ("#b4540a", "#f0a35e"), "steps": ("#2a7a3b", "#7fd094"), "peer": ("#666", "#aaa"),
}  # fmt: skip
DASHES = {BLOCKS + 5: "", FEW_BLOCKS + 5: "2 3"}


def decode(bench: Bench) -> None:
    peer = llama(bench, "decode", 16_384)
    if peer:
        bench.say("decode after 16,384, llama.cpp", f"{peer:.1f} tokens/s")
        bench.record["peer"] = peer
    for way, each in WAYS.items():
        for chosen in (BLOCKS, FEW_BLOCKS):
            decode_by(bench, f"{chosen + 5} blocks, {way}", {**each["settings"], "second_select_num": chosen}, peer)


def decode_by(bench: Bench, name: str, kind: dict[str, Any], peer: float | None) -> None:
    speeds = {context: bench.speed("decode", context, settings=settings(context, **kind)) for context in bench.options.contexts}
    bench.record.setdefault("speeds", {})[name] = speeds
    for context, speed in speeds.items():
        bench.say(f"decode after {context:,}, {name}", f"{speed:.1f} tokens/s")
    if 16_384 in speeds:
        ratio = speeds[bench.longest] / speeds[16_384]
        bench.say(f"  {bench.longest:,} to 16,384", f"{ratio:.2f}", "", TARGETS["decode, longest to 16K"], ratio)
    if peer:
        ratio = speeds[bench.longest] / peer
        bench.say(f"  {bench.longest:,} to llama.cpp at 16,384", f"{ratio:.2f}", "", TARGETS["decode, to llama.cpp at 16K"], ratio)


def attention(bench: Bench) -> None:
    rate = memory_gb_per_s(bench.options.threads)
    for anchors in ("KEY_INT4", "QUEST"):
        chosen = settings(bench.longest, anchor_type=anchors)
        said = bench.ask("attention", bench.longest, settings=chosen, blocks=[BLOCKS, FEW_BLOCKS])
        ms = {name: median(each["ms"][name] for each in said) for name in said[0]["ms"]}
        megabytes = ms.pop("bytes of a dense layer, MB")
        fastest = min(value for name, value in ms.items() if name.startswith("dense"))
        for name, value in ms.items():
            if name.startswith("dense"):
                share = megabytes / value / rate
                bench.say(name, f"{value:.2f} ms", f"{megabytes / value:.1f} GB/s, {share:.0%} of what memory gives")
                continue
            attended = f"{int(name.split()[0]) + 5} blocks"
            ratio = fastest / value
            bench.say(f"{attended}, {anchors}", f"{value:.2f} ms", f"{ratio:.1f} times the fastest dense", TARGETS[attended], ratio)


def prefill(bench: Bench) -> None:
    for context in (4096, 16_384):
        speed, peer = bench.speed("prefill", context, settings=settings(context)), llama(bench, "prefill", context)
        bench.say(f"exact prefill of {context:,}", f"{speed:.0f} tokens/s", f"llama.cpp {peer:.0f}" if peer else "", 1.0,
                  speed / peer if peer else None)  # fmt: skip
    taken = {}
    for context in (16_384, bench.longest):
        few = settings(context, prefill="sparse", second_select_num=FEW_BLOCKS)
        taken[context] = bench.ask("prefill", context, 1, settings=few)[0]["seconds"]
    times = taken[bench.longest] / taken[16_384]
    bench.say(f"sparse prefill of 16,384 and {bench.longest:,}", " and ".join(f"{s:.1f} s" for s in taken.values()),
              f"{times:.1f} times the time for {bench.longest / 16_384:.1f} times the tokens", 0.1, 1 / times)  # fmt: skip


def sources(tokens: int) -> list[int]:
    """The first tokens of Python's own library, module after module."""
    tokenizer: Any = find_tokenizer((demo_weights(),))
    ids: list[int] = []
    for file in sorted(Path(argparse.__file__).parent.glob("*.py")):
        ids += tokenizer.encode(file.read_text(encoding="utf-8"))
        if len(ids) >= tokens:
            break
    return ids[:tokens]


def memory(bench: Bench) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as text:
        json.dump(sources(bench.longest), text)
        text.flush()
        memory_of(bench, text.name)


def memory_of(bench: Bench, text: str) -> None:
    chosen = settings(bench.longest, second_select_num=FEW_BLOCKS, anchor_type="QUEST", prefill="sparse")
    free = bench.ask("decode", bench.longest, 1, settings=chosen, text=text)[0]
    with tempfile.TemporaryDirectory() as folder:
        tight = {**chosen, "gpu_memory_size_GB": DEVICE_GB, "cpu_memory_size_GB": HOST_GB, "disk_path": folder}
        held = bench.ask("decode", bench.longest, 1, settings=tight, text=text)[0]
    base, weights = held["baseline_bytes"], demo_weights().stat().st_size
    limit = (weights + (DEVICE_GB + HOST_GB) * 1e9) * SLACK
    for name, said in (("all in RAM", free), (f"{DEVICE_GB} + {HOST_GB} GB, the rest on disk", held)):
        bench.say(
            f"peak memory, {name}", f"{(said['peak_bytes'] - base) / 1e6:.0f} MB", f"over {base / 1e6:.0f} MB of the same imports"
        )
    over = (held["peak_bytes"] - base) / limit
    bench.say("  to weights, budgets and a tenth", f"{over:.2f}", f"{limit / 1e6:.0f} MB", 1.0, 1 / over)
    same = free["tokens"] == held["tokens"]
    bench.say("  the same tokens as with all in RAM", "yes" if same else "NO")
    bench.record["statistics"] = held["statistics"]


def disk(bench: Bench) -> None:
    chosen = settings(bench.longest)
    ram = bench.speed("decode", bench.longest, settings=chosen, forced=RESIDENT)
    with tempfile.TemporaryDirectory(dir=bench.options.disk) as folder:
        tight = {**chosen, "gpu_memory_size_GB": 0, "cpu_memory_size_GB": bench.options.disk_host_gb, "disk_path": folder}
        said = bench.ask("decode", bench.longest, settings=tight, forced=RESIDENT, direct=True)
    speed = median(each["tokens_per_s"] for each in said)
    reads = median(each["read_bytes_per_token"] for each in said)
    bench.say("decode, drawn blocks, all in RAM", f"{ram:.1f} tokens/s")
    bench.say("decode, 95 % in RAM, 5 % from disk", f"{speed:.1f} tokens/s", f"{reads / 1e6:.2f} MB read a token, O_DIRECT")
    bench.say("  to RAM", f"{speed / ram:.2f}", "", TARGETS["disk"], speed / ram)


def main() -> None:
    parser = argparse.ArgumentParser(description="Long contexts on SmolLM2, beside llama.cpp.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16_384, 65_536, 139_264])
    parser.add_argument("--rounds", type=int, default=3, help="processes of each measurement (default 3)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode", type=int, default=32, help="tokens to make (default 32)")
    parser.add_argument("--disk", type=Path, help="where the disk tier's folder is made (default: that of temporary files)")
    parser.add_argument("--disk-host-gb", type=float, default=1.8, help="memory of the cache in the part `disk` (default 1.8)")
    parser.add_argument("--llama-python", metavar="PYTHON", default=sys.executable, help="an interpreter with llama-cpp-python")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the part `decode`, as SVG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    options = parser.parse_args()
    bench = Bench(options)
    for part in options.parts:
        print(f"\n{part}")
        {"decode": decode, "attention": attention, "prefill": prefill, "memory": memory, "disk": disk}[part](bench)
    print("\n" + layout([Column("what"), Column("found", right=True), Column("target"), Column("")], bench.rows, 140))
    if bench.busy > 0.1:
        print(f"warning: others used {bench.busy:.1f} cores meanwhile")
    if options.plot:
        options.plot.write_text(bench.plot(), encoding="utf-8")
    if options.json:
        record = {"machine": machine(), "rows": bench.rows, "said": bench.record, "foreign_cores": bench.busy}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
