"""The pages that users read: their rule files check clean, their Python runs, their commands and links exist, and their tables list
what the code has.

A rule file names the model that it is checked on in a comment, as for the language server: `# ktopt: model=NAME`. A page's Python
blocks run in order, in one folder with small files of the names that they use.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import ktopt
from ktopt import hardware
from ktopt.cli import COMMANDS, main, parser_of
from ktopt.diagnostics import Report, Severity
from ktopt.plan import ModelRef, Plan, RuleRef, Step, Transfer
from ktopt.selector import parse_selector
from ktopt.selector.evaluate import RELATIONS
from ktopt.selector.fields import FIELDS, HARDWARE_FIELDS, NUMBER_FIELDS, TEXT_FIELDS
from ktopt.source import FILE_START, Origin, SourceFile
from ktopt.trees import load_tree
from ktopt.validate import keys

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"codes.md", "operators.md"}
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED)]
MODEL = re.compile(r"# ktopt: model=([\w.-]+)")
MACHINE = hardware.load_hardware("2x24GB")
STAND_INS = {"SmolLM2-135M-Instruct.Q4_1.gguf": "tiny.gguf", "DIR": "optimized"}
"""Names that the README uses for large files, and the small ones that are run in their place."""
RULES = """\
version: 1
dtype: float32
rules:
  - id: linears
    match: "@model.layers.*.** & class=Linear"
    replace: KTransformersLinear
    kwargs: {generate_op: KLinearTorch}
"""
LONG = """\
model: {name_or_path: tiny}
long_context: {max_seq_len: 256, block_size: 32, local_windows_len: 64, second_select_num: 2, preselect_block: false}
"""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)


def every_block(language: str) -> list[Any]:
    return [pytest.param(block, id=f"{p.relative_to(ROOT)}-{i}") for p in PAGES for i, block in enumerate(blocks(p, language), 1)]


def is_rule_file(block: str) -> bool:
    """Whether a block is a whole rule file, rather than a part of one or another program's file."""
    data = yaml.safe_load(block)
    if isinstance(data, list):
        return all(isinstance(rule, dict) and {"match", "replace"} <= rule.keys() for rule in data)
    return isinstance(data, dict) and "version" in data and "rules" in data


@pytest.mark.parametrize("block", every_block("yaml"))
def test_a_rule_file_checks_clean_on_the_model_that_it_names(block: str) -> None:
    if not is_rule_file(block):
        pytest.skip("not a rule file by itself")
    named = MODEL.search(block)
    report = ktopt.check(SourceFile("docs.yaml", block), named[1] if named else None)
    assert [str(d) for d in report if d.severity is not Severity.INFO] == []


def test_the_language_page_names_a_model_for_each_of_its_rule_files() -> None:
    found = blocks(ROOT / "docs" / "rules.md", "yaml")
    assert len(found) >= 2
    assert all(is_rule_file(block) and MODEL.search(block) for block in found)


def test_selectors_take_as_many_modules_as_the_page_says() -> None:
    (block,) = blocks(ROOT / "docs" / "rules.md", "text")
    named = MODEL.search(block)
    assert named
    graph, taken, said = load_tree(named[1]), {}, {}
    for line in block.splitlines()[1:]:
        text, count, _ = re.split(r"\s{2,}", line, maxsplit=2)
        report = Report()
        selector = parse_selector(text, Origin("docs", FILE_START), {}, report)
        assert selector, [str(d) for d in report]
        taken[text], said[text] = selector.evaluate(graph, MACHINE).bit_count(), int(count)
    assert taken == said


def test_the_page_s_parentheses_are_those_of_the_grammar() -> None:
    found = re.search(r"^So `(.+)` is `(.+)`\.$", text_of(ROOT / "docs" / "rules.md"), flags=re.MULTILINE)
    assert found
    without, written = (parse_selector(text, Origin("docs", FILE_START), {}, Report()) for text in found.groups())
    assert without
    assert written
    assert without.root == written.root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Python blocks find where they run: rules.yaml, long.yaml, a tiny model in three forms."""
    from apply_fixtures import make_model, make_tokenizer
    from gguf_fixtures import make_folder, make_gguf

    made = tmp_path_factory.mktemp("docs")
    (made / "rules.yaml").write_text(RULES)
    (made / "long.yaml").write_text(LONG)
    model = make_model("llama")
    make_tokenizer().save_pretrained(make_folder(made / "tiny", model))
    make_gguf(made / "tiny.gguf", model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        assert main(["apply", "rules.yaml", "--model", "tiny", "--weights", "tiny", "--out", "optimized"]) == 0
    return made


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES if blocks(p, "python")])
def test_the_page_s_python_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        if page.name == "README.md":
            block = with_small_files(block)
        exec(compile(block, page.name, "exec"), names)


def with_small_files(block: str) -> str:
    """A block with the tiny model's files for the large ones."""
    for name, small in STAND_INS.items():
        block = block.replace(f'"{name}"', f'"{small}"')
    return block.replace('"smollm2-135m"', '"tiny"') if "tiny.gguf" in block else block


def command_lines(page: Path) -> Iterator[str]:
    """The `ktopt` lines of a page's code blocks, without prompt, redirection and comment."""
    text = re.sub(r"^```(?:yaml|python|toml|json|lua)\n.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    for line in re.findall(r"^\s*(?:\$ )?(ktopt .*)$", text, flags=re.MULTILINE):
        yield re.split(r"\s[|>]\s", line)[0]


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_commands_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in command_lines(page):
        _, name, *rest = shlex.split(line, comments=True)
        parser = parser_of(name, import_module(f"ktopt.cli.{COMMANDS[name].module}"))
        if "--help" not in rest:
            assert parses(parser, rest), f"{line}\n{capsys.readouterr().err}"


def parses(parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
    try:
        parser.parse_args(arguments)
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_commands_within_sentences_and_their_options_exist(page: Path) -> None:
    for name, rest in re.findall(r"`ktopt ([a-z]+)\b([^`]*)`", text_of(page)):
        assert name in COMMANDS, name
        parser = parser_of(name, import_module(f"ktopt.cli.{COMMANDS[name].module}"))
        assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", rest)) <= parser._option_string_actions.keys(), f"ktopt {name}{rest}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", text_of(index)))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def table(page: str, heading: str) -> list[str]:
    """The code names in the first column of the table on a page that has this heading cell; an example's arguments left out."""
    text = text_of(ROOT / "docs" / page)
    rows = text[text.index(f"\n| {heading} |") :].split("\n\n")[0].strip().splitlines()[2:]
    return [found[1] for row in rows if (found := re.match(r"\| `([^`(]+)", row))]


def test_the_language_page_lists_the_keys_of_files_and_rules() -> None:
    assert set(table("rules.md", "key of the file")) == set(keys.TOP)
    assert table("rules.md", "key of a rule") == list(keys.LIST_RULE)
    native = text_of(ROOT / "docs" / "rules.md").split("\n## The native form\n")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", native[native.index("| key of a rule |") :].split("\n\n")[0], re.MULTILINE)) == set(
        keys.NATIVE_RULE
    )


def test_the_language_page_lists_the_fields_and_functions_of_selectors() -> None:
    assert table("rules.md", "field") == [
        *TEXT_FIELDS[:4],
        *NUMBER_FIELDS[:2],
        *TEXT_FIELDS[4:],
        *NUMBER_FIELDS[2:],
        "shape[0]",
        "config.KEY",
        "hw.KEY",
    ]
    assert table("rules.md", "field of the machine") == [*(f"hw.{name}" for name in HARDWARE_FIELDS), "hw.cpu.FEATURE"]
    assert {*table("rules.md", "field"), *table("rules.md", "field of the machine")} == {*FIELDS, "hw.KEY"}
    assert table("rules.md", "function") == list(RELATIONS)


def test_the_page_on_plans_lists_the_fields_of_a_plan() -> None:
    assert table("plans.md", "field") == ["format", *(f.name for f in fields(Plan))]
    step = text_of(ROOT / "docs" / "plans.md").split("\n### A step\n")[1].split("\n### ")[0]
    assert re.findall(r"^\| `(\w+)` \|", step, flags=re.MULTILINE) == list(Step._fields)
    for heading, kind in {"field of `model`": ModelRef, "field of a rule": RuleRef, "field of a transfer": Transfer}.items():
        assert table("plans.md", heading) == [f.name for f in fields(kind)]


def test_the_hardware_file_of_the_page_is_read_as_the_page_says(tmp_path: Path) -> None:
    (block,) = blocks(ROOT / "docs" / "hardware.md", "yaml")
    (tmp_path / "machine.yaml").write_text(block)
    machine = hardware.load_hardware(str(tmp_path / "machine.yaml"))
    assert machine.name == "my workstation"
    assert [d.name for d in machine.devices] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]
    assert machine.devices[0].sm == 89
    assert machine.ram_bytes == 128 << 30
    written = yaml.safe_load(block)
    assert table("hardware.md", "key") == list(written)
    assert set(table("hardware.md", "key of a device")) == {key for device in written["devices"] for key in device}


def test_presets_have_the_memory_and_the_capability_that_the_page_says() -> None:
    text = text_of(ROOT / "docs" / "hardware.md")
    assert hardware.preset("8x80GB+512GB") == hardware.load_hardware("8x80GB+512GB")
    for sizes, sm in re.findall(r"^\| (\d.*) \| (\d+) \|$", text, flags=re.MULTILINE):
        for size in re.findall(r"\d+", sizes):
            made = hardware.preset(f"2x{size}GB")
            assert made
            assert [(d.memory_bytes, d.sm) for d in made.devices] == [(int(size) << 30, int(sm))] * 2
    other = re.search(r"^\| any other \| (\d+) \|$", text, flags=re.MULTILINE)
    made = hardware.preset("1x32GB")
    assert made
    assert other
    assert made.devices[0].sm == int(other[1])


def test_the_page_on_chat_lists_its_commands_and_ktransformers_options() -> None:
    from ktopt import local_chat
    from ktopt.chat.commands import COMMANDS as CHAT

    assert [name.split()[0] for name in table("chat.md", "command")] == list(CHAT)
    theirs = {option for option in local_chat._parser()._option_string_actions if option.startswith("--") and "-" not in option[2:]}
    assert set(table("chat.md", "local_chat.py")) == theirs - {"--help"} | {"--mode", "--prompt_file"}
    (line,) = re.findall(r"^    python -m ktopt.local_chat (.*)$", text_of(ROOT / "docs" / "chat.md"), re.MULTILINE)
    assert local_chat.arguments(shlex.split(line))[0] == "rules.yaml"
