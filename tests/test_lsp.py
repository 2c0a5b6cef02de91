"""`ktopt lsp` as an editor sees it: a real server process, spoken to over its standard input and output."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

pytest.importorskip("pygls", reason="the language server needs pygls")

from lsp_client import CAPABILITIES, Doc, LspClient, LspError

from ktopt.models.shipped import model_config
from ktopt.trees import load_tree

MODEL = "deepseek-v3"
LAYERS = 61
MOE_LAYERS = 58
"""Of DeepSeek-V3: its config has num_hidden_layers 61, of which the first 3 are dense."""

LINEAR = """\
- match:
    name: '^model\\.layers\\.'
    class: torch.nn.Linear
  replace:
    class: KTransformersLinear
    kwargs:
      generate_device: cuda:0
      generate_op: KLinearTorch
"""
EXPERTS = """\
- match:
    name: '^model\\.layers\\.\\d+\\.mlp\\.experts$'
  replace:
    class: KTransformersExperts
    kwargs:
      generate_device: cuda:0
"""
SHADOWED = LINEAR + LINEAR.replace("'^model\\.layers\\.'", "'^model\\.layers\\.\\d+\\.self_attn\\.o_proj$'")
WRONG_OP = LINEAR.replace("KLinearTorch", "KLinearTroch")
WRONG_DEVICE = LINEAR.replace("generate_device: cuda:0", "generate_device: gpu")
NATIVE = """\
version: 1
let:
  experts: "@model.layers.*.mlp.experts"
rules:
  - id: experts
    match: $experts
    replace: KTransformersExperts
    kwargs: {generate_device: cpu}
  - id: rest
    match: "@model.layers.*.** & class=Linear"
    replace: default
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("work space")
    (root / "pyproject.toml").write_text(f'[tool.ktopt]\nmodels = ["{MODEL}"]\n')
    return root


@pytest.fixture(scope="module")
def editor(workspace: Path) -> Iterator[LspClient]:
    """One session with a project that names a model."""
    with LspClient() as client:
        client.initialize(workspace)
        yield client
        assert client.stop() == 0
        assert "Traceback" not in json.dumps(client.messages)


@pytest.fixture
def doc(editor: LspClient, workspace: Path, request: pytest.FixtureRequest) -> Any:
    """Opens a text as a file of the workspace that is nowhere on disk; closed after the test."""
    made: list[str] = []

    def open_(text: str, name: str = "") -> Doc:
        uri = (workspace / f"{name or request.node.name[:40]}-{len(made)}.yaml").as_uri()
        made.append(uri)
        return Doc(editor, uri, text)

    yield open_
    for uri in made:
        editor.notify("textDocument/didClose", {"textDocument": {"uri": uri}})


class TestFindings:
    def test_a_finding_has_its_place_code_page_and_remedy(self, doc: Any) -> None:
        rules = doc(WRONG_OP)
        (found,) = rules.findings
        assert (found["code"], found["severity"], found["source"]) == ("KT402", 1, "ktopt")
        assert rules.shown(found) == "KLinearTroch"
        assert "did you mean KLinearTorch" in found["message"]
        page = urlparse(found["codeDescription"]["href"])
        line = Path(unquote(page.path)).read_text().splitlines()[int(page.fragment.removeprefix("L")) - 1]
        assert line.startswith("# KT402 ")

    def test_an_edit_is_answered_with_the_findings_of_the_new_text(self, doc: Any) -> None:
        rules = doc(WRONG_OP)
        assert rules.codes == ["KT402"]
        rules.replace("Troch", "Torch")
        assert rules.codes == []
        rules.replace("kwargs", "kwarg")
        assert rules.codes == ["KT202"]

    def test_edits_in_one_message_are_made_in_order(self, doc: Any, editor: LspClient) -> None:
        rules = doc(WRONG_OP)
        line = rules.place("KLinearTroch")
        word = {"start": line, "end": {**line, "character": line["character"] + 12}}
        here = {"start": line, "end": line}
        version = editor.change(rules.uri, {"range": word, "text": "Torch"}, {"range": here, "text": "KLinear"})
        assert editor.diagnostics(rules.uri, version) == []

    def test_a_model_of_the_project_makes_selection_checked_and_the_shadowing_rule_related(self, doc: Any) -> None:
        rules = doc(SHADOWED)
        found = next(d for d in rules.findings if d["code"] == "KT302")
        assert found["range"]["start"]["line"] == LINEAR.count("\n")
        assert found["tags"] == [1]
        (related,) = found["relatedInformation"]
        assert related["location"]["uri"] == rules.uri
        assert related["location"]["range"]["start"]["line"] == 1
        assert "61 of them" in related["message"]

    def test_columns_count_utf16_units_where_characters_take_two(self, doc: Any) -> None:
        rules = doc('- {match: {name: "\U0001f600\U0001f600"}, replace: {class: KTransfromersLinear}} # \u4e2d\u6587\n')
        found = next(d for d in rules.findings if d["code"] == "KT401")
        assert rules.shown(found) == "KTransfromersLinear"
        rules.replace("KTransfromersLinear", "KTransformersLinear")
        assert "KT401" not in rules.codes

    def test_lines_end_where_the_protocol_ends_them(self, doc: Any) -> None:
        rules = doc("# a \u2028# separator\u0085\r\n" + WRONG_OP.replace("\n", "\r\n"))
        found = next(d for d in rules.findings if d["code"] == "KT402")
        assert rules.shown(found) == "KLinearTroch"

    def test_a_tab_that_indents_is_found_on_its_line(self, doc: Any) -> None:
        rules = doc("- match:\n\tname: x\n")
        (found,) = rules.findings
        assert (found["code"], found["range"]["start"]["line"]) == ("KT101", 1)

    def test_comments_silence_findings_as_in_ktopt_check(self, doc: Any) -> None:
        rules = doc(WRONG_DEVICE.replace("gpu", "gpu  # ktopt: ignore[KT501] on purpose"))
        assert rules.codes == []
        stopped = doc(WRONG_OP.replace("KLinearTroch", "KLinearTroch  # ktopt: ignore[KT402] on purpose"), "stopped")
        assert set(stopped.codes) == {"KT402", "KT111"}

    def test_findings_in_an_imported_file_stand_at_the_import(self, doc: Any, workspace: Path) -> None:
        (workspace / "common.yaml").write_text('version: 1\nrules:\n  - match: "@lm_head"\n    replace: KTransfromersLinear\n')
        rules = doc("version: 1\nimport: [common.yaml]\n")
        found = next(d for d in rules.findings if d["code"] == "KT401")
        assert rules.shown(found) == "common.yaml"
        assert found["message"].startswith("in common.yaml, line 4: ")
        assert found["relatedInformation"][0]["location"]["uri"] == (workspace / "common.yaml").as_uri()
        assert found["relatedInformation"][0]["location"]["range"]["start"] == {"line": 3, "character": 13}

    def test_a_pattern_that_backtracks_is_a_finding_and_holds_nobody_up(self, doc: Any) -> None:
        slow = doc(LINEAR.replace("'^model\\.layers\\.'", "'^(?:[a-z_]+|[a-z_.0-9]|[a-z])+[A-Z]$'"), "slow")
        quick = doc(WRONG_OP, "quick")
        start = time.monotonic()
        assert "generate_device" in quick.labels("KTransformersLinear\n    kwargs:\n      ")
        assert time.monotonic() - start < 5
        assert "KT304" in slow.codes
        assert quick.codes == ["KT402"]


class TestFilesOfAllSorts:
    def test_an_empty_file_has_no_findings_and_is_begun_by_completion(self, editor: LspClient, doc: Any) -> None:
        rules = doc("")
        assert {"a rule", "a native rule file", "version", "rules"} <= set(rules.labels(""))
        item = next(i for i in rules.ask("completion", position={"line": 0, "character": 0})["items"] if i["label"] == "a rule")
        assert item["insertTextFormat"] == 2

    def test_other_yaml_files_get_no_answers(self, doc: Any) -> None:
        other = doc("name: ci\non: push\njobs:\n  build: {}\n")
        assert other.labels("jobs:\n  ") == []
        assert other.hover("jobs") == ""
        assert other.uri not in other.editor.published

    def test_a_file_that_was_never_saved_is_checked(self, editor: LspClient) -> None:
        rules = Doc(editor, "untitled:Untitled-1", WRONG_OP)
        assert rules.codes == ["KT402"]

    def test_a_file_outside_the_workspace_has_its_own_project(self, editor: LspClient, tmp_path: Path) -> None:
        rules = Doc(editor, (tmp_path / "rules.yaml").as_uri(), SHADOWED)
        assert rules.codes == []
        assert rules.hints() == []

    def test_a_file_over_the_limit_says_so_and_the_server_goes_on(self, doc: Any) -> None:
        big = doc("# filler\n" * 120_000 + LINEAR)
        assert big.codes == ["KT104"]
        assert doc(WRONG_OP).codes == ["KT402"]

    def test_text_that_is_none_says_so(self, doc: Any) -> None:
        assert doc(LINEAR + "# \0").codes == ["KT103"]
        assert doc(LINEAR + "# \ud800").codes == ["KT103"]

    def test_closing_a_file_takes_its_findings_away(self, editor: LspClient, workspace: Path) -> None:
        rules = Doc(editor, (workspace / "closed.yaml").as_uri(), WRONG_OP)
        assert rules.codes == ["KT402"]
        editor.notify("textDocument/didClose", {"textDocument": {"uri": rules.uri}})
        editor.request("textDocument/hover", {"textDocument": {"uri": rules.uri}, "position": {"line": 0, "character": 0}})
        assert editor.published[rules.uri]["diagnostics"] == []


class TestHover:
    def test_a_rule_says_what_it_takes_on_the_model_and_who_took_the_rest(self, doc: Any) -> None:
        rules = doc(SHADOWED)
        linears = sum(1 for m in load_tree(MODEL) if m.path.startswith("model.layers.") and m.cls.simple_name == "Linear")
        assert f"{MODEL}: takes {linears} modules" in rules.hover("match")
        second = rules.hover("o_proj$")
        assert f"takes {LAYERS} modules, decides 0" in second
        assert f"{LAYERS} taken by rule 1 (line 1)" in second

    def test_operators_ops_kwargs_classes_and_keys_are_explained(self, doc: Any) -> None:
        rules = doc(LINEAR)
        assert "**KTransformersLinear**" in rules.hover("KTransformersLinear")
        assert "KLinearMarlin" in rules.hover("KTransformersLinear")
        assert "**KLinearTorch**, an op" in rules.hover("KLinearTorch")
        assert "**generate_device** of KTransformersLinear" in rules.hover("generate_device")
        assert "default `null`" in rules.hover("generate_device")
        assert f"{MODEL}: " in rules.hover("torch.nn.Linear")
        assert "**kwargs**" in rules.hover("kwargs")

    def test_a_selectors_words_are_explained_and_counted(self, doc: Any) -> None:
        rules = doc(NATIVE)
        assert f"{MODEL}: {MOE_LAYERS} modules" in rules.hover("$experts")
        assert "is `@model.layers.*.mlp.experts`" in rules.hover("$experts")
        assert "an instance" in rules.hover("class=Linear") or "derives from" in rules.hover("class=Linear")
        assert f"{MODEL}: {MOE_LAYERS} modules" in rules.hover("@model.layers.*.mlp.experts")
        assert "**rule 2 (rest)**" in rules.hover("id: rest")

    def test_a_code_in_a_comment_shows_its_page(self, doc: Any) -> None:
        rules = doc(LINEAR + "# ktopt: ignore[KT305] why\n")
        assert "**KT305: " in rules.hover("KT305")

    def test_while_the_file_does_not_compile_the_last_counts_are_shown(self, doc: Any) -> None:
        rules = doc(LINEAR + EXPERTS)
        assert rules.findings == []
        rules.replace("generate_op: KLinearTorch", "generate_op: [")
        assert rules.codes == ["KT101"]
        assert f"takes {MOE_LAYERS} modules" in rules.hover("experts$")


class TestCompletion:
    def test_each_level_is_completed_while_the_file_does_not_parse(self, doc: Any) -> None:
        rules = doc(LINEAR + "- match:\n    name: [\n  replace:\n    class: KTransformersExperts\n    kwargs:\n      \n")
        assert rules.codes == ["KT101"]
        assert "out_device" in rules.labels("KTransformersExperts\n    kwargs:\n      ")
        assert {"KTransformersExperts", "ktransformers.operators.experts.KTransformersExperts"} <= set(
            rules.labels("    class: KTransformersE")
        )

    def test_paths_of_the_model_are_completed_and_the_choice_makes_a_rule_that_matches(self, doc: Any) -> None:
        rules = doc(NATIVE.replace("$experts", '"@model.layers.*.mlp.exp"'))
        found = rules.ask("completion", position=rules.place('mlp.exp"', 7))
        item = next(i for i in found["items"] if i["label"] == "experts")
        rules.apply([item["textEdit"]])
        assert '@model.layers.*.mlp.experts"\n    replace' in rules.text
        assert rules.hints()[0] == (5, f"{MOE_LAYERS} modules")

    def test_a_chosen_operators_page_is_fetched_when_it_is_looked_at(self, doc: Any, editor: LspClient) -> None:
        rules = doc(LINEAR)
        found = rules.ask("completion", position=rules.place("KTransformersLinear", 5))
        item = next(i for i in found["items"] if i["label"] == "KTransformersLinear")
        assert "documentation" not in item
        assert "**kwargs**" in editor.request("completionItem/resolve", item)["documentation"]["value"]

    def test_a_space_that_indents_offers_nothing_by_itself(self, doc: Any) -> None:
        rules = doc(LINEAR + "  ")
        typed = {"triggerKind": 2, "triggerCharacter": " "}
        assert rules.ask("completion", position={"line": 8, "character": 2}, context=typed) is None
        assert [i["label"] for i in rules.ask("completion", position={"line": 8, "character": 2})["items"]] == ["recursive"]


class TestNavigation:
    def test_from_a_rule_to_the_rule_that_shadows_it(self, doc: Any) -> None:
        rules = doc(SHADOWED)
        place = rules.position(rules.text.rindex("match"))
        (found,) = rules.ask("definition", position=place)
        assert (found["uri"], found["range"]["start"]["line"]) == (rules.uri, 1)

    def test_from_a_reference_to_its_let_in_the_file_or_in_an_import(self, doc: Any, workspace: Path) -> None:
        (workspace / "names.yaml").write_text('version: 1\nlet:\n  heads: "@lm_head"\n')
        rules = doc("import: [names.yaml]\n" + NATIVE.replace('"@model.layers.*.**', '"$heads | @model.layers.*.**'))
        (own,) = rules.ask("definition", position=rules.place("$experts", 3))
        assert (own["uri"], own["range"]["start"]) == (rules.uri, rules.place("experts"))
        (imported,) = rules.ask("definition", position=rules.place("$heads", 3))
        assert imported["uri"] == (workspace / "names.yaml").as_uri()
        assert imported["range"]["start"] == {"line": 2, "character": 2}
        (file,) = rules.ask("definition", position=rules.place("names.yaml", 3))
        assert file["uri"] == (workspace / "names.yaml").as_uri()

    def test_the_outline_lists_the_rules_with_what_they_take(self, doc: Any) -> None:
        rules = doc(NATIVE)
        found = rules.ask("documentSymbol")
        assert [s["name"] for s in found] == ["let", "rule 1 (experts)", "rule 2 (rest)"]
        assert found[1]["detail"] == f"KTransformersExperts, {MOE_LAYERS} modules"
        assert (found[1]["range"]["start"]["line"], found[1]["range"]["end"]["line"]) == (4, 7)


class TestHints:
    def test_each_rule_has_its_count_at_the_end_of_its_match_line(self, doc: Any) -> None:
        rules = doc(SHADOWED + EXPERTS)
        linears = sum(1 for m in load_tree(MODEL) if m.path.startswith("model.layers.") and m.cls.simple_name == "Linear")
        height = LINEAR.count("\n")
        assert rules.hints() == [
            (0, f"{linears} modules"),
            (height, f"0 of {LAYERS} modules"),
            (2 * height, f"{MOE_LAYERS} modules"),
        ]

    def test_hints_stay_and_move_while_the_file_does_not_compile(self, doc: Any) -> None:
        rules = doc(LINEAR + EXPERTS)
        before = dict(rules.hints())
        height = LINEAR.count("\n")
        rules.replace("generate_op: KLinearTorch", "generate_op: KLin\n      # thinking")
        assert rules.codes == ["KT402"]
        assert dict(rules.hints()) == {0: before[0], height + 1: before[height]}


class TestActions:
    def test_a_fix_is_offered_and_mends_the_file(self, doc: Any) -> None:
        rules = doc(WRONG_OP)
        (found,) = rules.findings
        action = next(a for a in rules.actions("KLinearTroch") if a["kind"] == "quickfix")
        assert action["diagnostics"] == [found]
        rules.apply(action["edit"]["changes"][rules.uri])
        assert rules.codes == []
        assert rules.text.replace('"', "") == LINEAR

    @pytest.mark.parametrize("ending", ["\n", "\r\n"])
    def test_an_ignore_comment_is_offered_and_silences_the_line(self, doc: Any, ending: str) -> None:
        rules = doc(WRONG_DEVICE.replace("\n", ending))
        action = next(a for a in rules.actions("gpu") if a["title"] == "Ignore KT501 on this line")
        rules.apply(action["edit"]["changes"][rules.uri])
        assert rules.codes == []
        assert f"gpu  # ktopt: ignore[KT501]{ending}" in rules.text
        assert rules.text.count("\r\n") == (rules.text.count("\n") if ending == "\r\n" else 0)

    def test_a_certain_fix_is_preferred(self, doc: Any) -> None:
        rules = doc(LINEAR + "  recursive: 'False'\n")
        found = {a["title"]: a.get("isPreferred") for a in rules.actions("recursive", only=["quickfix"])}
        assert found == {"Remove the quotes": True}

    def test_all_certain_fixes_are_made_at_once(self, doc: Any, editor: LspClient) -> None:
        rules = doc(WRONG_OP + "  recursive: 'False'\n")
        assert set(rules.codes) == {"KT110", "KT402"}
        (action,) = rules.actions("match", only=["source.fixAll"])
        assert "edit" not in action
        rules.apply(editor.request("codeAction/resolve", action)["edit"]["changes"][rules.uri])
        assert rules.codes == ["KT402"]  # which of the ops was meant is a guess

    def test_formatting_brings_a_rule_file_and_no_other_into_normal_form(self, doc: Any) -> None:
        rules = doc(LINEAR.replace("class: KTransformersLinear", "class:    KTransformersLinear"))
        rules.apply(rules.ask("formatting", options={"tabSize": 2, "insertSpaces": True}))
        assert "class: KTransformersLinear" in rules.text
        assert doc("a:    b\n").ask("formatting", options={"tabSize": 2, "insertSpaces": True}) is None


class TestSettings:
    def test_the_editors_settings_and_a_changed_project_are_followed(self, tmp_path: Path) -> None:
        capabilities = json.loads(json.dumps(CAPABILITIES))
        capabilities["workspace"] |= {"configuration": True, "didChangeWatchedFiles": {"dynamicRegistration": True}}
        capabilities["workspace"]["inlayHint"] = {"refreshSupport": True}
        with LspClient() as editor:
            editor.initialize(tmp_path, capabilities=capabilities)
            rules = Doc(editor, (tmp_path / "rules.yaml").as_uri(), SHADOWED)
            assert rules.codes == []
            (tmp_path / "pyproject.toml").write_text('[tool.ktopt]\nmodels = ["smollm2-135m"]\n')
            self.wait_for(rules, "KT302", lambda: editor.notify("workspace/didChangeWatchedFiles", {"changes": []}))
            assert [label for _, label in rules.hints()][1] == "0 of 30 modules"
            editor.settings = {"models": [MODEL]}
            editor.notify("workspace/didChangeConfiguration", {"settings": None})
            self.wait_until(lambda: [label for _, label in rules.hints()][1] == f"0 of {LAYERS} modules")
            methods = {m.get("method") for m in editor.messages}
            assert {"client/registerCapability", "workspace/inlayHint/refresh"} <= methods
            assert editor.stop() == 0

    def test_a_model_that_is_a_file_is_loaded_in_the_background_and_one_that_is_none_is_a_problem(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(model_config("smollm2-135m")))
        capabilities = {**CAPABILITIES, "general": {"positionEncodings": ["utf-8"]}}
        with LspClient() as editor:
            result = editor.initialize(tmp_path, {"models": ["config.json", "no-such-model"]}, capabilities)
            assert result["capabilities"]["positionEncoding"] == "utf-8"
            rules = Doc(editor, (tmp_path / "rules.yaml").as_uri(), "# \u4e2d\n" + SHADOWED)
            self.wait_for(rules, "KT302", lambda: None)
            (problem,) = [d for d in rules.findings if "code" not in d]
            assert "unknown model 'no-such-model'" in problem["message"]
            assert problem["range"]["end"]["character"] == 5  # "# " and three bytes

    def test_a_comment_in_the_file_names_models_of_its_own(self, doc: Any) -> None:
        rules = doc("# ktopt: model=smollm2-135m, qwen3-30b-a3b\n" + LINEAR)
        assert rules.hints() == [(1, "smollm2-135m: 210, qwen3-30b-a3b: 240")]  # 48 layers of q, k, v, o and the router
        wrong = doc("# ktopt: model=/etc/passwd\n" + LINEAR)
        (problem,) = wrong.findings
        assert "is no shipped model" in problem["message"]
        assert wrong.shown(problem) == "/etc/passwd"

    def wait_for(self, rules: Doc, code: str, nudge: Any) -> None:
        nudge()
        deadline = time.monotonic() + 15
        while code not in [d.get("code") for d in rules.editor.published.get(rules.uri, {}).get("diagnostics", [])]:
            rules.editor.take(deadline)

    def wait_until(self, holds: Any) -> None:
        deadline = time.monotonic() + 15
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)


class TestTheConnection:
    def test_nonsense_gets_an_error_or_nothing_and_never_a_traceback(self, editor: LspClient, doc: Any) -> None:
        rules = doc(WRONG_OP)
        with pytest.raises(LspError, match="Method Not Found"):
            editor.request("textDocument/nonsense", {})
        nowhere = {"uri": "file:///nowhere.yaml"}
        assert editor.request("textDocument/hover", {"textDocument": nowhere, "position": {"line": 3, "character": 5}}) is None
        assert editor.at(rules.uri, "hover", 999, 999) is None
        editor.notify("textDocument/didChange", {"textDocument": {**nowhere, "version": 2}, "contentChanges": [{"text": "x"}]})
        editor.notify("textDocument/didChange", {"textDocument": nowhere})
        editor.notify("textDocument/didClose", {"textDocument": nowhere})
        editor.notify("workspace/didChangeConfiguration", {"settings": [1, 2]})
        editor.send_raw(b'{"jsonrpc": "2.0", "method": "textDocument/didOpen", "params": 7}')
        editor.send_raw(b"not json")
        assert rules.codes == ["KT402"]
        assert "Traceback" not in json.dumps(editor.messages)
        assert not [m for m in editor.messages if m.get("method") == "window/showMessage"]

    def test_many_quick_edits_end_with_the_findings_of_the_last(self, doc: Any, editor: LspClient) -> None:
        rules = doc(LINEAR)
        for _ in range(20):
            rules.replace("KLinearTorch", "KLinearTroch")
            rules.replace("KLinearTroch", "KLinearTorch")
        rules.replace("KLinearTorch", "KLinearTroch")
        assert rules.codes == ["KT402"]

    def test_an_editor_that_goes_away_takes_the_server_with_it(self) -> None:
        with LspClient() as editor:
            editor.initialize()
            assert editor.child.stdin is not None
            editor.child.stdin.close()
            assert editor.child.wait(10) == 1

    def test_without_pygls_it_says_what_to_install(self) -> None:
        code = "import sys; sys.modules['pygls'] = None; from ktopt.cli import main; sys.exit(main(['lsp']))"
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert done.stderr == "error: the language server needs pygls: pip install 'ktopt[lsp]'\n"
