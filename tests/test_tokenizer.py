"""Tokenizers built from GGUF metadata give transformers' tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from gguf_fixtures import make_gguf, tiny_model
from tokenizers import Tokenizer, pre_tokenizers

from ktopt.weights import WeightError
from ktopt.weights.gguf_tokenizer import tokenizer_from_gguf
from ktopt.weights.pretokenizers import STEPS, pre_tokenizer

CASES = json.loads((Path(__file__).parent / "data" / "smollm2_tokens.json").read_text())


@pytest.fixture(scope="module")
def demo(smollm2: Path) -> Any:
    return tokenizer_from_gguf(smollm2)


@pytest.mark.parametrize("case", range(len(CASES["texts"])))
def test_the_demo_models_tokens_are_transformers(case: int, demo: Any) -> None:
    text, ids = CASES["texts"][case]
    assert demo(text).input_ids == ids
    assert demo.decode(ids) == text


def test_the_demo_models_special_tokens_and_chat_template(demo: Any) -> None:
    assert {name: getattr(demo, name) for name in CASES["special"]} == CASES["special"]
    assert len(demo) == CASES["size"]
    assert demo.apply_chat_template(CASES["chat"], tokenize=False, add_generation_prompt=True) == CASES["prompt"]
    assert demo.decode(demo("<|im_start|>a<|im_end|>").input_ids, skip_special_tokens=True) == "a"
    assert demo.model_max_length == 8192


def test_the_demo_models_tokenizer_loads_quickly(smollm2: Path) -> None:
    start = time.process_time()
    tokenizer_from_gguf(smollm2)
    assert time.process_time() - start < 2


def test_it_saves_and_loads_as_a_tokenizer_folder(demo: Any, tmp_path: Path) -> None:
    demo.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = CASES["texts"][3][0]
    assert again(text).input_ids == demo(text).input_ids
    assert again.chat_template == demo.chat_template
    assert again.eos_token_id == demo.eos_token_id


def test_the_fixtures_tokenizer_round_trips(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(make_gguf(tmp_path / "m.gguf", tiny_model("llama", num_hidden_layers=1)))
    assert tokenizer("the the<|end|>").input_ids == [259, 260, 257]
    assert tokenizer.decode(tokenizer("naïve 🌍").input_ids) == "naïve 🌍"


# --- pre-tokenizers

TEXTS = [text for text, _ in CASES["texts"]] + [
    "x1234567 8",
    "d'Où  L'État\n \n9",
    "A\u10d0\u10d1 𝔘b ʕ",
    "価格は１２３円です",
    "#include<a>",
]


def pieces(built: Any, text: str) -> list[str]:
    return [piece for piece, _ in built.pre_tokenize_str(text)]


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2s_rule_is_the_tokenizers_packages(text: str) -> None:
    assert pieces(pre_tokenizer("gpt-2"), text) == pieces(pre_tokenizers.ByteLevel(add_prefix_space=False), text)


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_rules_are_transformers_where_it_has_them(name: str, text: str) -> None:
    splits = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    from tokenizers import Regex

    split = pre_tokenizers.Split(Regex(splits[name]), behavior="isolated")
    theirs = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    assert pieces(pre_tokenizer(name), text) == pieces(theirs, text)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("llama-bpe", "a1234", ["a", "123", "4"]),
        ("qwen2", "a12", ["a", "1", "2"]),
        ("deepseek-llm", "We cost 12,\nyes", ["We", "Ġcost", "Ġ", "1", "2", ",", "Ċ", "yes"]),
        ("deepseek-v3", "Total 1234 (x)", ["Total", "Ġ", "123", "4", "Ġ(", "x", ")"]),
    ],
)
def test_numbers_and_lines_are_split_as_each_model_learnt_them(name: str, text: str, expected: list[str]) -> None:
    assert pieces(pre_tokenizer(name), text) == expected


@pytest.mark.parametrize("name", STEPS)
def test_no_rule_loses_text(name: str) -> None:
    decoder = Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}')
    from tokenizers import decoders

    decoder.decoder = decoders.ByteLevel()
    for text in TEXTS:
        assert decoder.decoder.decode(pieces(pre_tokenizer(name), text)) == text


# --- SentencePiece


def sentence_piece(path: Path, arch: str = "gemma3", **changes: Any) -> Path:
    """A small SentencePiece vocabulary with byte fallback, as Gemma's and Llama 2's files have it."""
    space = "\u2581"
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = [space, "a", "b", "c", "l", "o", "w", "e", "r", "é", space + "l", "lo", "er", space + "lo", "low", space + "low", "ab"]
    runs = ["  ", "   "] if arch == "gemma3" else [space * 2]
    tokens = special + [f"<0x{i:02X}>" for i in range(256)] + runs + ["<tool>"] + pieces
    types = [3, 3, 3, 2] + [6] * 256 + [1] * len(runs) + [4] + [1] * len(pieces)
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(i) for i in range(len(pieces))]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(changes.get("tokens", tokens))
    writer.add_token_scores(changes.get("scores", scores))
    writer.add_token_types(changes.get("types", types))
    writer.add_bos_token_id(changes.get("bos", 2))
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(changes.get("prefix", arch != "gemma3"))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


@pytest.mark.parametrize("arch", ["gemma3", "llama"])
def test_sentence_piece_tokens_are_transformers(arch: str, tmp_path: Path) -> None:
    path = sentence_piece(tmp_path / "m.gguf", arch)
    ours, theirs = tokenizer_from_gguf(path), transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    texts = ["lower low", "abc  lo", "a   b", "é lower 世", "low<eos>", "x"] + ["<tool>low"] * (arch == "gemma3")
    for text in texts:
        assert ours(text).input_ids == theirs(text).input_ids, text
        assert ours.decode(ours(text, add_special_tokens=False).input_ids) == text


def test_the_space_before_a_text_also_stands_after_a_special_token(tmp_path: Path) -> None:
    """As llama.cpp and Llama 2's published tokenizer have it; transformers v5 puts it at the very beginning only."""
    tokenizer = tokenizer_from_gguf(sentence_piece(tmp_path / "m.gguf", "llama"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("<tool>low").input_ids) == ["<bos>", "<tool>", "\u2581low"]


def test_sentence_piece_begins_with_bos_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(sentence_piece(tmp_path / "m.gguf"))
    ids = tokenizer("low世").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "low", "<0xE4>", "<0xB8>", "<0x96>"]


# --- what is refused


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "bert", "model is 'bert'"),
        ("tokenizer.ggml.pre", "superbpe", "pre is 'superbpe', a way of splitting text that is not known"),
        ("tokenizer.ggml.bos_token_id", 99999, "bos_token_id is 99999, and there are 320 tokens"),
        ("tokenizer.ggml.merges", ["q zz"], "merges has the entry 'q zz'"),
        ("tokenizer.ggml.token_type", [1, 2], "token_type has not one entry a token"),
        ("tokenizer.ggml.tokens", 7, "tokens is missing or no list of texts"),
        ("tokenizer.chat_template", 7, "chat_template is no text"),
    ],
)
def test_metadata_that_does_not_fit_is_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    source = gguf.GGUFReader(make_gguf(tmp_path / "good.gguf", tiny_model("llama", num_hidden_layers=1)))
    writer = gguf.GGUFWriter(tmp_path / "bad.gguf", "llama")
    for name, field in source.fields.items():
        if name.startswith("tokenizer.") and name != key:
            content = field.contents()
            writer.add_array(name, content) if isinstance(content, list) else writer.add_key_value(name, content, field.types[0])
    add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
    add(key, value)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(WeightError, match=message) as caught:
        tokenizer_from_gguf(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(caught.value)


def test_scores_for_too_few_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="scores has not one entry a token"):
        tokenizer_from_gguf(sentence_piece(tmp_path / "m.gguf", scores=[0.0]))
