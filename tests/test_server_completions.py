"""/v1/completions, by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

import openai
from server_fixtures import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as made:
        made.engine.says = lambda request, choice: f"{chr(request.prompt_ids[0])}{choice}!"
        yield made


def complete(server: Running, **given: Any) -> Any:
    return server.openai.completions.create(model="fake", **given)


def test_a_text_is_continued(server: Running) -> None:
    made = complete(server, prompt="abc")
    assert made.object == "text_completion"
    assert made.id.startswith("cmpl-")
    assert [(choice.index, choice.text, choice.finish_reason, choice.logprobs) for choice in made.choices] == [
        (0, "a0!", "stop", None)
    ]
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 3)
    assert server.engine.requests[-1].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["ab", "c"], ["a0!", "a1!", "c0!", "c1!"]),
        ([97, 98], ["a0!", "a1!"]),
        ([[97, 98], [99]], ["a0!", "a1!", "c0!", "c1!"]),
    ],
)
def test_prompts_may_be_several_and_tokens(server: Running, prompt: Any, texts: list[str]) -> None:
    made = complete(server, prompt=prompt, n=2)
    assert [choice.text for choice in made.choices] == texts
    assert [choice.index for choice in made.choices] == list(range(len(texts)))
    assert made.usage.prompt_tokens == (3 if len(texts) == 4 else 2)
    assert made.usage.completion_tokens == 3 * len(texts)
    streamed = [""] * len(texts)
    for chunk in complete(server, prompt=prompt, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_echo_gives_the_prompt_too(server: Running) -> None:
    assert complete(server, prompt="abc", echo=True).choices[0].text == "abca0!"
    assert complete(server, prompt=[97, 98], echo=True).choices[0].text == "aba0!"
    assert "".join(chunk.choices[0].text for chunk in complete(server, prompt="abc", echo=True, stream=True)) == "abca0!"


def test_log_probabilities_have_the_older_shape(server: Running) -> None:
    found = complete(server, prompt="a", logprobs=2).choices[0].logprobs
    assert found.tokens == ["a", "0", "!"]
    assert found.token_logprobs == [-0.5] * 3
    assert found.text_offset == [0, 1, 2]
    assert found.top_logprobs[1] == {"0": -0.5, "é": -9999.0}
    parts = [chunk.choices[0].logprobs for chunk in complete(server, prompt="a", logprobs=0, stream=True)]
    assert [part.text_offset for part in parts if part] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"),
        ({"prompt": ["x"] * 9, "n": 2}, "n"),
        ({"prompt": "x", "extra_body": {"messages": []}}, "messages"),
    ],
)
def test_what_is_wrong_is_said_of_the_parameter(server: Running, given: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, **given)
    assert str(caught.value.param).startswith(param)
