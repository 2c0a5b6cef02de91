"""Writes data/smollm2_tokens.json: what transformers' own GGUF loader makes of some texts with the demo model's tokenizer.

    python -P tests/make_tokenizer_cases.py

That loader takes seconds, so the tests compare with this file. It splits text by GPT-2's rule alone, whereas SmolLM2's published
tokenizer sets every digit apart first; so its pre-tokenizer is replaced by the published one: Digits, then ByteLevel.
"""

from __future__ import annotations

import json
from pathlib import Path

from gguf_fixtures import smollm2_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

OUT = Path(__file__).parent / "data" / "smollm2_tokens.json"
TEXTS = (
    "", "Hello, world!", " leading and trailing ", "  two  spaces 1 23  456  7", "It's we'll I'd YOU'RE they've",
    "naïve café — “quoted” … 你好，世界。こんにちは 안녕하세요", "🌍🏳️‍🌈 👩‍👩‍👧 ﷽ e\u0301 \u200b\u00a0\u2028",
    "ΑΒΓ абв ١٢٣ 𝔘𝔫𝔦 ½ ²",
    "def f(x):\n    return x**2  # comment\n\n\n\tif a != b:\r\n\t\tpass\n", '{"key": [1, 2.5e-3, null], "nested": {"a": true}}',
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n", "text<|endoftext|>text", "a" * 300, "1234567890" * 5,
    "https://example.org/path?x=1&y=%20#frag",
    "\n\n\n", "\t \t", "ÀÉÎõü ß ſ ĳ", "The quick brown fox jumps over the lazy dog. " * 5,
)  # fmt: skip


def main() -> None:
    path = smollm2_file()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Why?"}]
    cases = {
        "texts": [[text, tokenizer(text).input_ids] for text in TEXTS],
        "chat": chat,
        "prompt": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
        "special": {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
        "size": len(tokenizer),
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(cases, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
