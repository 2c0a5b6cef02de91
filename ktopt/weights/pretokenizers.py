"""How a byte-level BPE splits text before merging, by GGUF's `tokenizer.ggml.pre`.

A GGUF names the rule, it does not hold it; each entry here restates the pre_tokenizer of the published tokenizer.json that the
name stands for, as a list of steps applied one after the other: a regular expression whose matches stand alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
DIGIT = r"\p{N}"

# DeepSeek's list of cased letters, said as Unicode's cased letters less those that the list leaves out (and with U+0295 in it).
_CASED = (
    r"\u0295[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560\u0588\u10C7\u10CD\u10D0-\u10FF\u1C80-\u1C8A\u2D00-\u2D2D\uA790-\uA7FA\uAB30-\uAB6D"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016ed3\U0001d400-\U0001df96]]"
)
_CJK = r"\u4E00-\u9FA5"
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
    r"\s+$",
    rf"[{_CJK}\u0800-\u4E00\uAC00-\uD7FF]+",
    DIGIT,
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    rf"[{_CJK}\u3040-\u309F\u30A0-\u30FF]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)

STEPS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,), "default": (GPT2,), "": (GPT2,),
    "smollm": (DIGIT, GPT2), "starcoder": (DIGIT, GPT2), "refact": (DIGIT, GPT2), "command-r": (DIGIT, GPT2),
    "llama-bpe": (LLAMA3,), "llama3": (LLAMA3,), "llama-v3": (LLAMA3,), "smaug-bpe": (LLAMA3,), "dbrx": (LLAMA3,),
    "glm4": (LLAMA3,), "chatglm-bpe": (LLAMA3,),
    "qwen2": (QWEN2,), "deepseek-r1-qwen": (QWEN2,), "stablelm2": (QWEN2,),
    "deepseek-llm": DEEPSEEK_LLM, "deepseek-v3": DEEPSEEK_V3,
}  # fmt: skip
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx")  # a word that is a token is taken whole, merges or not
ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "deepseek-llm", "deepseek-v3")  # unless the file says otherwise
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is brought to NFC first


def pre_tokenizer(name: str) -> PreTokenizer:
    """The tokenizers object for that name. KeyError for one that is not known."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    steps = [Split(Regex(pattern), behavior="isolated") for pattern in STEPS[name]]
    return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])
