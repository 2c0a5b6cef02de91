"""The tokenizer in a GGUF file, as a transformers tokenizer.

Built straight on the tokenizers library from the vocabulary, merges or scores, token types and chat template in the metadata:
byte-level BPE ("gpt2"), and SentencePiece's BPE with byte fallback ("llama"), which is what models of the known architectures use.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.weights.gguf import GGUFFile, open_gguf
from ktopt.weights.pretokenizers import ADDS_BOS, COMPOSED, STEPS, WHOLE_WORDS_FIRST, pre_tokenizer
from ktopt.weights.source import WeightError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
SPACE = "\u2581"
GEMMA = ("gemma", "gemma2", "gemma3")


class _Vocabulary:
    """What the metadata says of the tokens. WeightError where it is missing or doesn't fit together."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.tokens: list[str] = self.strings("tokens")
        self.types: list[int] = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(self.tokens)
        if not isinstance(self.types, list) or len(self.types) != len(self.tokens):
            raise self.fail("token_type has not one entry a token")
        self.ids = {token: index for index, token in enumerate(self.tokens)}

    def fail(self, what: str) -> WeightError:
        return WeightError(f"{self.file.path}: the tokenizer can't be built: tokenizer.ggml.{what}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not default and type(value) is not kind:
            raise self.fail(f"{key} is {str(value)[:60]!r}, not a {kind.__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise self.fail(f"{key} is missing or no list of texts")
        return value

    def token(self, key: str) -> str | None:
        """The token whose id is under that key."""
        index: int | None = self.get(key, int)
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise self.fail(f"{key} is {index}, and there are {len(self.tokens)} tokens")
        return self.tokens[index]

    def of_type(self, kind: int) -> list[str]:
        return [token for token, found in zip(self.tokens, self.types, strict=True) if found == kind]

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self.strings("merges"):
            left, space, right = merge.partition(" ")
            if not space or not right or left + right not in self.ids or left not in self.ids or right not in self.ids:
                raise self.fail(f"merges has the entry {merge[:60]!r}, which joins no two tokens to a third")
            pairs.append((left, right))
        return pairs


def tokenizer_from_gguf(source: str | Path | GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF model (a path, or a file already open), with its special tokens and chat template.

    WeightError for a kind of tokenizer that is not known, or metadata that doesn't fit together.
    """
    if not isinstance(source, GGUFFile):
        opened = open_gguf(source)
        try:
            return tokenizer_from_gguf(opened)
        finally:
            opened.close()
    from transformers import PreTrainedTokenizerFast

    vocabulary = _Vocabulary(source)
    kind = vocabulary.get("model", str, "")
    if kind not in ("gpt2", "llama"):
        raise vocabulary.fail(f"model is {kind!r}; gpt2 (byte-level BPE) and llama (SentencePiece) can be read")
    built, adds_bos = _byte_level(vocabulary) if kind == "gpt2" else _sentence_piece(vocabulary)
    _add_special(built, vocabulary)
    _add_ends(built, vocabulary, adds_bos)
    named = {
        "bos_token": vocabulary.token("bos_token_id"),
        "eos_token": vocabulary.token("eos_token_id"),
        "unk_token": vocabulary.token("unknown_token_id"),
        "pad_token": vocabulary.token("padding_token_id"),
    }
    template = source.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise WeightError(f"{source.path}: tokenizer.chat_template is no text")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=built,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )
    tokenizer.chat_template = template
    length = source.metadata.get(f"{source.architecture}.context_length")
    if isinstance(length, int):
        tokenizer.model_max_length = length
    return tokenizer


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    name = vocabulary.get("pre", str, "")
    if name not in STEPS:
        raise vocabulary.fail(
            f"pre is {name!r}, a way of splitting text that is not known; known are {', '.join(filter(None, STEPS))}"
        )
    model = models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=name in WHOLE_WORDS_FIRST)
    built = Tokenizer(model)
    if name in COMPOSED:
        built.normalizer = normalizers.NFC()
    built.pre_tokenizer = pre_tokenizer(name)
    built.decoder = decoders.ByteLevel()
    return built, name in ADDS_BOS


def _sentence_piece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    gemma = vocabulary.file.architecture in GEMMA
    ids = {_spaced(token) if gemma else token: index for token, index in vocabulary.ids.items()}
    unknown = vocabulary.token("unknown_token_id") or vocabulary.tokens[0]
    model = models.BPE(
        vocab=ids, merges=_merges_from(vocabulary, ids, gemma), unk_token=unknown, fuse_unk=True,
        byte_fallback=BYTE in vocabulary.types,
    )  # fmt: skip
    built = Tokenizer(model)
    leading = bool(vocabulary.get("add_space_prefix", bool, not gemma))
    steps = [normalizers.Prepend(SPACE)] if leading else []
    built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if leading else undo)
    return built, True


def _spaced(token: str) -> str:
    """Gemma's runs of spaces are stored as spaces, and looked up with the visible one."""
    return SPACE * len(token) if token and not token.strip(" ") else token


def _merges_from(vocabulary: _Vocabulary, ids: dict[str, int], gemma: bool) -> list[tuple[str, str]]:
    """SentencePiece's merges, which the file leaves to be found: every way to cut a token in two tokens, best token first.

    The best is the one with the highest score; in Gemma's files, whose scores say nothing of the order, the first.
    """
    if "tokenizer.ggml.merges" in vocabulary.file.metadata:
        return vocabulary.merges()
    scores = vocabulary.file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise vocabulary.fail("scores has not one entry a token")
    ordered = [t for t, _ in sorted(ids.items(), key=lambda item: item[1] if gemma else -scores[item[1]])]
    merges: list[tuple[str, str]] = []
    for token in ordered:
        merges += sorted(_cuts(token, ids), key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    return merges


def _cuts(token: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    for place in range(1, len(token)):
        left, right = token[:place], token[place:]
        if left in ids and right in ids:
            yield left, right


def _add_special(built: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are special; user-defined ones are only kept whole."""
    from tokenizers import AddedToken

    known = built.get_vocab(with_added_tokens=False)
    built.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in vocabulary.of_type(CONTROL) if t in known])
    built.add_tokens([AddedToken(t, normalized=False) for t in vocabulary.of_type(USER_DEFINED) if t in known])


def _add_ends(built: Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    """The begin and end tokens that every text gets."""
    from tokenizers.processors import TemplateProcessing

    before = vocabulary.token("bos_token_id") if vocabulary.get("add_bos_token", bool, adds_bos) else None
    after = vocabulary.token("eos_token_id") if vocabulary.get("add_eos_token", bool, False) else None
    if not before and not after:
        return
    special = [(token, vocabulary.ids[token]) for token in (before, after) if token]
    single = [token for token in (before, "$A", after) if token]
    pair = single + [f"{token}:1" for token in (before, "$B", after) if token]
    built.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special)
