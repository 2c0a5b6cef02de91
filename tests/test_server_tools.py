"""Tool calls: the forms in which models write them, read from text in pieces, and the whole way through OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

import openai
from fake_engine import FakeEngine
from server_fixtures import running

from ktopt.server.template import learn
from ktopt.server.tools.formats import DEEPSEEK, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, Format
from ktopt.server.tools.reader import CallArguments, CallBegins, CallEnds, CallReader, Content, form_of

SHOWS = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
ENDS = "\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
EACH = "{% for c in m.tool_calls or [] %}"
QWEN = (
    f"{SHOWS}{{{{ m.content or '' }}}}{EACH}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}' + ENDS
)
LLAMA_3 = (
    f"{SHOWS}{EACH}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}<|eot_id|>{% endfor %}'
    "{{ m.content or '' }}"
) + ENDS
MISTRAL_3 = (
    f"{SHOWS}{{% if m.tool_calls %}}[TOOL_CALLS] [{EACH}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% endfor %}]</s>'
    "{% else %}{{ m.content }}{% endif %}"
) + ENDS
MISTRAL_13 = (
    f"{SHOWS}{{{{ m.content or '' }}}}{EACH}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
) + ENDS
CALLS, CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
CALL_ENDS, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
SEP = "<｜tool▁sep｜>"
DEEPSEEK_3 = (
    f"{SHOWS}{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{CALLS}{EACH}{CALL}function{SEP}"
    "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}"
    + CALL_ENDS
    + "{% endfor %}"
    + CALLS_END
    + "{% endif %}"
) + ENDS
DEEPSEEK_31 = (
    f"{SHOWS}{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{CALLS}{EACH}{CALL}"
    "{{ c.function.name + '" + SEP + "' + c.function.arguments }}" + CALL_ENDS + "{% endfor %}" + CALLS_END + "{% endif %}"
) + ENDS
XML = (
    f"{SHOWS}{EACH}<tool_call>\n<function={{{{ c.function.name }}}}>\n</function>\n</tool_call>{{% endfor %}}{{{{ m.content }}}}"
    + ENDS
)

TWO = [("weather", '{"city": "Oslo", "braces": "}{\\""}'), ("time", "{}")]
TEXTS: dict[str, tuple[str, Format, str]] = {
    "qwen": (
        QWEN, HERMES,
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "braces": "}{\\""}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    ),
    "llama": (
        LLAMA_3, LLAMA,
        '{"name": "weather", "parameters": {"city": "Oslo", "braces": "}{\\""}}; {"name": "time", "parameters": {}}',
    ),
    "mistral": (
        MISTRAL_3, MISTRAL,
        'Let me see.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "braces": "}{\\""}, "id": "abcdefghi"}, '
        '{"name": "time", "arguments": {}}]',
    ),
    "mistral args": (
        MISTRAL_13, MISTRAL_ARGS,
        'Let me see.[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "braces": "}{\\""}[TOOL_CALLS]time[ARGS]{}',
    ),
    "deepseek": (
        DEEPSEEK_3, DEEPSEEK,
        f'Let me see.{CALLS}{CALL}function{SEP}weather\n```json\n{TWO[0][1]}\n```{CALL_ENDS}\n'
        f"{CALL}function{SEP}time\n```json\n{{}}\n```{CALL_ENDS}{CALLS_END}",
    ),
    "deepseek 3.1": (
        DEEPSEEK_31, DEEPSEEK,
        f"Let me see.{CALLS}{CALL}weather{SEP}{TWO[0][1]}{CALL_ENDS}{CALL}time{SEP}{{}}{CALL_ENDS}{CALLS_END}",
    ),
}  # fmt: skip
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]


def read(form: Format, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that comes in pieces of this size."""
    reader, content, calls = CallReader(form), "", []
    deltas = [delta for at in range(0, len(text), size) for delta in reader.feed(text[at : at + size])]
    for delta in [*deltas, *reader.end()]:
        if isinstance(delta, Content):
            content += delta.text
        elif isinstance(delta, CallBegins):
            calls.append((delta.name, ""))
        elif isinstance(delta, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return content, calls


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_read_whatever_pieces_they_come_in(name: str, size: int) -> None:
    _, form, text = TEXTS[name]
    content, calls = read(form, text, size)
    assert content == ("" if name == "llama" else "Let me see.")
    assert calls == TWO


@pytest.mark.parametrize("name", TEXTS)
def test_a_model_s_form_is_known_by_its_template(name: str) -> None:
    template, form, _ = TEXTS[name]
    found = learn(FakeEngine(template=template).tokenizer)
    assert found.tools
    assert found.arguments_text == name.startswith("deepseek")
    assert form_of(found.call) is form


def test_a_form_that_is_not_known_is_refused() -> None:
    with running(FakeEngine(template=XML)) as server, pytest.raises(openai.BadRequestError, match="doesn't read"):
        server.chat(tools=TOOLS)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 1000])
def test_text_without_calls_is_content(name: str, size: int) -> None:
    form = TEXTS[name][1]
    for text in ("Hello", "a < b, [1] {x} <tool", "  indented\n\n  text ", "é<｜tool", "", "{}", '{"a": 1}'):
        content, calls = read(form, text, size)
        assert (content, calls) == (text, [])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_what_is_no_call_between_the_marks_stays_text(size: int) -> None:
    for text in (
        "<tool_call>\nnonsense\n</tool_call> and more",
        "<tool_call>\n{broken",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    ):
        assert read(HERMES, text, size) == (text, [])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_call_s_keys_may_come_in_another_order(size: int) -> None:
    text = '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>'
    assert read(HERMES, text, size) == ("", [("weather", '{"city": "Oslo"}')])
    assert read(LLAMA, '{"parameters": {"a": 1}, "name": "f"}', size) == ("", [("f", '{"a": 1}')])


def test_arguments_come_before_the_call_has_ended() -> None:
    reader = CallReader(HERMES)
    assert reader.feed('<tool_call>\n{"name": "weather", "argu') == []
    assert reader.feed('ments": {"ci') == [CallBegins(0, "weather"), CallArguments(0, '{"ci')]
    assert reader.feed('ty": 1}') == [CallArguments(0, 'ty": 1}'), CallEnds(0)]


@pytest.mark.parametrize("name", TEXTS)
def test_the_client_gets_calls_whole_and_in_a_stream(name: str) -> None:
    template, form, text = TEXTS[name]
    with running(FakeEngine(text, template=template)) as server:
        made = server.chat(tools=TOOLS).choices[0]
        assert made.finish_reason == "tool_calls"
        assert [(call.function.name, call.function.arguments) for call in made.message.tool_calls] == TWO
        assert made.message.content == (None if name == "llama" else "Let me see.")
        assert len({call.id for call in made.message.tool_calls}) == 2
        assert server.engine.requests[-1].keep_special == form.special
        shown = "".join(map(chr, server.engine.requests[-1].prompt_ids))
        assert '"name": "weather"' in shown
        streamed: dict[int, list[str]] = {}
        finish = None
        for chunk in server.chat(tools=TOOLS, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                if call.id:
                    streamed[call.index] = [call.function.name, ""]
                streamed[call.index][1] += call.function.arguments
            finish = chunk.choices[0].finish_reason or finish
        assert [tuple(streamed[index]) for index in sorted(streamed)] == TWO
        assert finish == "tool_calls"


def test_the_openai_client_s_own_accumulation_of_a_stream_works() -> None:
    with running(FakeEngine(TEXTS["qwen"][2], template=QWEN)) as server:
        with server.openai.chat.completions.stream(
            model="fake", messages=[{"role": "user", "content": "x"}], tools=TOOLS
        ) as stream:
            final = stream.get_final_completion()
        assert [call.function.name for call in final.choices[0].message.tool_calls] == ["weather", "time"]


def test_answers_and_results_go_back_to_the_template() -> None:
    for template in (QWEN, DEEPSEEK_3):
        with running(FakeEngine(TEXTS["qwen"][2], template=template)) as server:
            call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
            messages: list[Any] = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ]
            server.openai.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
            shown = "".join(map(chr, server.engine.requests[-1].prompt_ids))
            assert '{"city": "Oslo"}' in shown
            assert "<tool>rain" in shown


def test_none_shows_no_tools_and_reads_no_calls() -> None:
    text = TEXTS["qwen"][2]
    with running(FakeEngine(text, template=QWEN)) as server:
        made = server.chat(tools=TOOLS, tool_choice="none").choices[0]
        assert (made.message.content, made.message.tool_calls, made.finish_reason) == (text, None, "stop")
        assert "weather" not in "".join(map(chr, server.engine.requests[-1].prompt_ids))


def test_one_call_where_no_more_are_wanted() -> None:
    with running(FakeEngine(TEXTS["qwen"][2], template=QWEN)) as server:
        for stream in (False, True):
            made = server.chat(tools=TOOLS, parallel_tool_calls=False, stream=stream)
            if stream:
                calls = {call.index for chunk in made for call in chunk.choices[0].delta.tool_calls or []}
                assert calls == {0}
            else:
                assert len(made.choices[0].message.tool_calls) == 1
                assert made.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("name", "begins", "rest"),
    [
        ("qwen", "<tool_call>\n", '{"name": "weather", "arguments": {"city": "Oslo"}}'),
        ("llama", "", '{"name": "weather", "parameters": {"city": "Oslo"}}'),
        ("mistral", "[TOOL_CALLS]", '[{"name": "weather", "arguments": {"city": "Oslo"}}]'),
        ("mistral args", "[TOOL_CALLS]weather[ARGS]", '{"city": "Oslo"}'),
        ("deepseek", f"{CALLS}{CALL}function{SEP}weather\n```json\n", '{"city": "Oslo"}'),
        ("deepseek 3.1", f"{CALLS}{CALL}weather{SEP}", '{"city": "Oslo"}'),
    ],
)
def test_a_tool_that_is_required_by_name(name: str, begins: str, rest: str) -> None:
    with running(FakeEngine(rest, template=TEXTS[name][0])) as server:
        made = server.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}).choices[0]
        (call,) = made.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments), made.finish_reason) == (
            "weather",
            {"city": "Oslo"},
            "stop",
        )
        request = server.engine.requests[-1]
        assert "".join(map(chr, request.prompt_ids)).endswith(f"<assistant>{begins}")
        assert request.grammar.kind == "json_schema"
        import jsonschema

        schema = json.loads(request.grammar.text)
        jsonschema.validate(json.loads(rest), schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(rest.replace("Oslo", "5").replace('"5"', "5")), schema)


def test_one_of_several_tools_is_required() -> None:
    with running(FakeEngine('{"name": "time", "arguments": {}}', template=QWEN)) as server:
        made = server.chat(tools=TOOLS, tool_choice="required").choices[0]
        assert [call.function.name for call in made.message.tool_calls] == ["time"]
        assert made.finish_reason == "tool_calls"
        schema = json.loads(server.engine.requests[-1].grammar.text)
        assert [branch["properties"]["name"]["const"] for branch in schema["anyOf"]] == ["weather", "time"]
        with pytest.raises(openai.BadRequestError, match="no tool has the name"):
            server.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "nope"}})
