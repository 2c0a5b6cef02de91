"""ktopt migrate: the native file resolves as the list-form one, module by module, and says it in few lines."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

import ktopt
from ktopt.authoring.fmt import format_text
from ktopt.authoring.migrating import Migration, migrate
from ktopt.cli import main
from ktopt.diagnostics import CompileError, KtoptError, Severity
from ktopt.graph import ModuleGraph
from ktopt.parse import read_source
from ktopt.pattern.numbers import number_regex
from ktopt.plan import Plan
from ktopt.source import SourceFile
from ktopt.trees import load_tree

CASES = Path(__file__).resolve().parent.parent.parent / "shared" / "cases" / "upstream_rules"
REAL = sorted(CASES.rglob("*.yaml"))
KT = "ktransformers.operators"
MODELS = "ktransformers.models.modeling_deepseek_v3"


@pytest.fixture(scope="module")
def deepseek() -> ModuleGraph:
    return load_tree("deepseek-v3")


def migrated(text: str, *graphs: ModuleGraph) -> Migration:
    return migrate(SourceFile("old.yaml", text), graphs, path="new.yaml")


def disagreements(old: Plan, new: Plan) -> list[str]:
    """Modules that own tensors or are replaced and that the plans treat differently: written without ktopt's own diff."""
    found = []
    for before, after in zip(old.steps, new.steps, strict=True):
        if not before.weight_bytes and before.operator == after.operator == "default":
            continue
        kept = {k: v for k, v in before.kwargs.items() if k not in ("transfer_map", "generate_device", "prefill_device", "device")}
        given = {k: v for k, v in after.kwargs.items() if k in kept}
        one = (before.operator, kept, before.generate_device, before.prefill_device, before.replicas, before.inside, before.runs)
        two = (after.operator, given, after.generate_device, after.prefill_device, after.replicas, after.inside, after.runs)
        if one != two:
            found.append(f"{before.path}: {one} became {two}")
    return found


def alike(old: SourceFile, new: str, graph: ModuleGraph) -> list[str]:
    return disagreements(ktopt.compile(old, graph), ktopt.compile(SourceFile("new.yaml", new), graph))


@pytest.mark.parametrize("path", REAL, ids=lambda p: str(p.relative_to(CASES)))
def test_a_file_that_ktransformers_shipped_resolves_alike_when_migrated(path: Path) -> None:
    source = read_source(path)
    if "Internlm" in path.name:
        with pytest.raises(CompileError, match="prefill_device"):
            migrate(source)
        return
    made = migrate(source)
    assert made.models
    for model in made.models:
        assert alike(source, made.text, load_tree(model)) == []
        before = {d.code for d in ktopt.check(source, load_tree(model)).errors}
        assert {d.code for d in ktopt.check(SourceFile("new.yaml", made.text), load_tree(model)).errors} <= before
    assert format_text(SourceFile("new.yaml", made.text)) == made.text


def test_files_that_ktransformers_shipped_are_there() -> None:
    if not REAL:
        pytest.skip("the files that KTransformers shipped are not in this checkout")
    assert len(REAL) == 26


LAYERS = [range(8), range(8, 16), range(16, 24), range(24, 32), range(32, 40), range(40, 48), range(48, 56), range(56, 61)]


def block(name: str, cls: str, operator: str, kwargs: dict[str, str], last: str = "") -> str:
    """One rule in KTransformers' style of writing."""
    lines = ["- match:", f'    name: "{name}"'] if name else ["- match:"]
    lines += [f"    class: {cls}  # only match modules matching name and class simultaneously"] if cls else []
    lines += ["  replace:", f'    class: "{operator}"']
    lines += ["    kwargs:", *(f"      {key}: {value}" for key, value in kwargs.items())] if kwargs else []
    return "\n".join([*lines, *([last] if last else []), ""])


def eight_cards() -> Iterator[str]:
    """Every rule of a file for DeepSeek-V3 on eight cards, each layer rule written eight times."""
    yield block("^model.embed_tokens", "", "default", {"generate_device": '"cpu"', "prefill_device": '"cpu"'})
    kinds = (
        ("", f"{MODELS}.DeepseekV3RotaryEmbedding", f"{KT}.RoPE.YarnRotaryEmbeddingV3", {}),
        (
            "(?!self_attn\\\\.kv_b_proj).*$",
            "torch.nn.Linear",
            f"{KT}.linear.KTransformersLinear",
            {"generate_op": '"KLinearMarlin"', "prefill_op": '"KLinearTorch"'},
        ),
        ("mlp$", f"{MODELS}.DeepseekV3MoE", f"{KT}.experts.KDeepseekV3MoE", {}),
        ("mlp\\\\.gate$", f"{MODELS}.MoEGate", f"{KT}.gate.KMoEGate", {}),
        ("mlp\\\\.experts$", "", f"{KT}.experts.KTransformersExperts", {"experts": ""}),
        ("self_attn$", "", f"{KT}.attention.KDeepseekV2Attention", {}),
        ("", "", "default", {}),
    )
    for rest, cls, operator, ops in kinds:
        for card, layers in enumerate(LAYERS):
            device = f'"cuda:{card}"'
            name = f"^model\\\\.layers\\\\.{number_regex(layers)}\\\\.{rest}"
            if "experts" in ops:
                kwargs = {"prefill_device": device, "prefill_op": '"KExpertsTorch"', "generate_device": '"cpu"'}
                kwargs |= {"generate_op": '"KExpertsCPU"', "out_device": device}
                yield block(name, cls, operator, kwargs, "  recursive: False  # don't recursively inject submodules")
                continue
            if operator == "default" and card == 7:
                name = f"({name})|(^model\\\\.norm)"
            remark = f"# GPU {card}: layers {layers[0]}-{layers[-1]}\n" * (not rest and not cls)
            yield remark + block(name, cls, operator, {"generate_device": device, "prefill_device": device, **ops})
    yield block(
        "^lm_head",
        "torch.nn.Linear",
        f"{KT}.linear.KTransformersLinear",
        {
            "generate_device": '"cuda:7"',
            "prefill_device": '"cuda:7"',
            "generate_op": '"KLinearMarlin"',
            "prefill_op": '"KLinearTorch"',
        },
    )
    moves = "".join(f'\n        {layers[0]}: "cuda:{card}"' for card, layers in enumerate(LAYERS) if card)
    yield block(
        "^model$",
        "",
        f"{KT}.models.KDeepseekV2Model",
        {"per_layer_prefill_intput_threshold": "0", "transfer_map": moves},
    )


def test_a_file_for_eight_cards_shrinks_to_a_page(deepseek: ModuleGraph) -> None:
    old = "\n\n".join(text for text in eight_cards() if text)
    assert 600 <= len(old.splitlines()) <= 750
    made = migrated(old, deepseek)
    assert alike(SourceFile("old.yaml", old), made.text, deepseek) == []
    code = [line for line in made.text.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= 38
    assert made.rules[1] <= 8
    assert '"cuda:3": "layer in 24..31"' in made.text
    assert '"cuda:7": "layer in 56.. | @model.norm | @lm_head"' in made.text
    assert '  # GPU 3: layers 24-31\n  "cuda:3"' in made.text
    assert "transfer_map" not in made.text
    assert not [d for d in ktopt.check(SourceFile("new.yaml", made.text), deepseek) if d.severity is not Severity.INFO]


DEFAULT = '{class: default, kwargs: {generate_device: "cuda:1", prefill_device: "cuda:1"}}'
LINEAR = (
    "{class: ktransformers.operators.linear.KTransformersLinear, kwargs: {generate_op: KLinearTorch, prefill_op: KLinearTorch%s}}"
)


def linear(more: str = "") -> str:
    return LINEAR % more


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        (r"^model\.layers\.(0|[1-9]|[12][0-9])\.self_attn\.q_a_proj$", "@model.layers.*.self_attn.q_a_proj & layer in 0..29"),
        (r"^model\.layers\.([3456][0-9])\.self_attn\.q_a_proj$", "@model.layers.*.self_attn.q_a_proj & layer in 30.."),
        (r"^model\.layers\.(3|5|7)\.self_attn\.o_proj$", "@model.layers.*.self_attn.o_proj & layer in 3, 5, 7"),
        (r"^model\.layers\.7\.self_attn\.o_proj$", "@model.layers.*.self_attn.o_proj & layer=7"),
        (r"^model\.layers\.\d+\.self_attn\.o_proj$", "@model.layers.*.self_attn.o_proj"),
        (r"self_attn\.o_proj", "@**.self_attn.o_proj"),
        (r"^model\.layers\.(?!.*self_attn\.kv_b_proj).*$", "@model.layers.*.** & class=Linear - name=kv_b_proj"),
        (r"^lm_head$|^model\.layers\.0\.mlp\.up_proj$", "(@lm_head | @model.layers.*.mlp.up_proj & layer=0)"),
        (r"(up|gate)_proj$", "path ~ /.*(up|gate)_proj/"),
        (r"q_[ab]_proj$", "path ~ /.*q_[ab]_proj/"),
        (r"layers\.1", "path ~ /.*layers\\.1.*/"),
    ],
)
def test_a_regex_becomes_the_plainest_selector_that_takes_the_same(deepseek: ModuleGraph, name: str, selector: str) -> None:
    old = f"- match: {{name: '{name}', class: torch.nn.Linear}}\n  replace: {linear()}\n"
    made = migrated(old, deepseek)
    assert selector in made.text
    assert alike(SourceFile("old.yaml", old), made.text, deepseek) == []


def test_rules_whose_order_matters_are_not_merged(deepseek: ModuleGraph) -> None:
    old = (
        f"- match: {{name: '^model\\.layers\\.([0-9])\\.self_attn\\.', class: torch.nn.Linear}}\n  replace: {linear()}\n"
        f"- match: {{name: '\\.o_proj$'}}\n  replace: {linear(', group_size: 32')}\n"
        f"- match: {{name: '^model\\.layers\\.([1-6][0-9])\\.self_attn\\.', class: torch.nn.Linear}}\n  replace: {linear()}\n"
    )
    made = migrated(old, deepseek)
    assert alike(SourceFile("old.yaml", old), made.text, deepseek) == []
    assert made.rules == (3, 3)
    assert any("not merged" in note for note in made.notes)


def test_a_placing_rule_that_shields_modules_from_a_later_rule_stays(deepseek: ModuleGraph) -> None:
    old = (
        f"- match: {{name: 'kv_b_proj$'}}\n  replace: {DEFAULT}\n"
        f"- match: {{class: torch.nn.Linear}}\n  replace: {linear(', generate_device: cuda:1, prefill_device: cuda:1')}\n"
    )
    made = migrated(old, deepseek)
    assert alike(SourceFile("old.yaml", old), made.text, deepseek) == []
    assert "replace: default" in made.text


def test_layers_split_over_devices_keep_their_rules_devices(deepseek: ModuleGraph) -> None:
    old = (
        "- match: {name: '^model\\.layers\\.(0|1)\\.mlp\\.', class: torch.nn.Linear}\n"
        f"  replace: {linear(', generate_device: cuda:1')}\n"
        f"- match: {{name: '^model\\.layers\\.', class: torch.nn.Linear}}\n  replace: {linear(', generate_device: cuda:0')}\n"
    )
    made = migrated(old, deepseek)
    assert alike(SourceFile("old.yaml", old), made.text, deepseek) == []


def test_a_rule_that_takes_nothing_is_left_out_and_named(deepseek: ModuleGraph) -> None:
    old = f"- match: {{class: torch.nn.Linear}}\n  replace: {linear()}\n- match: {{name: '^nowhere$'}}\n  replace: {DEFAULT}\n"
    made = migrated(old, deepseek)
    assert any("line 3" in note and "matches nothing" in note for note in made.notes)
    assert "# Left out: the rule at line 3 of the old file (name ^nowhere$)" in made.text


def test_comments_stay_with_what_they_were_said_of(deepseek: ModuleGraph) -> None:
    old = (
        "# why these\n- match: {class: torch.nn.Linear}  # all of them\n"
        f"  replace:\n    class: {KT}.linear.KTransformersLinear\n    kwargs:\n      generate_op: KLinearTorch\n"
        "      num_bits: 4  # or 8\n# the end\n"
    )
    text = migrated(old, deepseek).text
    assert "  # why these\n  - id: linears\n" in text
    assert 'match: "class=Linear"  # all of them\n' in text
    assert "num_bits: 4}  # or 8\n" in text
    assert text.rstrip().endswith("# the end")


def test_without_a_model_those_are_taken_that_the_file_fits() -> None:
    rule = f"- match: {{class: {MODELS}.DeepseekV3MoE}}\n  replace: {{class: {KT}.experts.KDeepseekV3MoE}}\n"
    assert migrated(rule).models == ("deepseek-v3", "kimi-k2", "moonlight-16b-a3b")
    assert migrated(
        rule.replace("{class: ktransformers.models", "{name: '^model\\.layers\\.60\\.', class: ktransformers.models")
    ).models == ("deepseek-v3", "kimi-k2")


def test_a_file_that_only_places_needs_no_rules(deepseek: ModuleGraph) -> None:
    old = f"- match: {{name: '^model.embed_tokens'}}\n  replace: {DEFAULT}\n"
    made = migrated(old, deepseek)
    assert alike(SourceFile("old.yaml", old), made.text, deepseek) == []
    assert "rules:" not in made.text


def test_a_module_that_the_map_would_put_elsewhere_gets_a_rule_of_its_own(deepseek: ModuleGraph) -> None:
    old = f"- match: {{name: '^model\\.layers\\.(3[0-9]|[456][0-9])\\.'}}\n  replace: {DEFAULT}\n"
    made = migrated(old, deepseek)
    assert alike(SourceFile("old.yaml", old), made.text, deepseek) == []
    assert made.rules == (1, 1)
    assert 'match: "@model.rotary_emb"' in made.text


class TestRefusals:
    def test_a_native_file(self) -> None:
        with pytest.raises(KtoptError, match="native form already"):
            migrated("version: 1\nrules: []\n")

    def test_a_file_with_errors(self, deepseek: ModuleGraph) -> None:
        with pytest.raises(CompileError, match="KT403"):
            migrated("- match: {class: torch.nn.Linear}\n  replace: {class: default, kwargs: {generate_devise: cpu}}\n", deepseek)

    def test_a_file_that_fits_no_shipped_model(self) -> None:
        with pytest.raises(KtoptError, match="--model"):
            migrated(f"- match: {{name: '^nowhere$'}}\n  replace: {DEFAULT}\n")

    def test_a_pattern_that_backtracks_for_ever(self, deepseek: ModuleGraph) -> None:
        with pytest.raises(KtoptError, match="took more than"):
            migrated(f"- match: {{name: '^(([a-z_.0-9])+.)+[5-9][a-z]$'}}\n  replace: {DEFAULT}\n", deepseek)


class TestCommand:
    OLD = f"- match: {{class: torch.nn.Linear}}\n  replace: {LINEAR % ''}\n"

    def test_it_writes_the_native_file_and_says_what_it_proved(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
        old.write_text(self.OLD, encoding="utf-8")
        (tmp_path / "ktopt.schema.json").write_text("{}")
        assert main(["migrate", str(old), "--model", "smollm2-135m", "-o", str(new)]) == 0
        assert "1 rule became 1; both files resolve alike on smollm2-135m (274 modules" in capsys.readouterr().err
        assert new.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=./ktopt.schema.json")
        assert main(["check", str(new), "--model", "smollm2-135m"]) == 0

    def test_standard_input_goes_to_standard_output(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(self.OLD.encode())))
        assert main(["migrate", "-", "--model", "smollm2-135m"]) == 0
        assert capsys.readouterr().out.startswith("# Made from a list-form file")

    def test_a_refused_file_writes_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
        old.write_text(self.OLD.replace("KLinearTorch", "KLinearTroch"), encoding="utf-8")
        assert main(["migrate", str(old), "--model", "smollm2-135m", "-o", str(new)]) == 1
        assert "KT402" in capsys.readouterr().err
        assert not new.exists()


def test_rules_that_stood_in_comments_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    commented = "# kept\n# - match:\n#     name: '^x'\n#   replace:\n#     class: default\n# kept, too\n"
    old.write_text(commented + TestCommand.OLD, encoding="utf-8")
    assert main(["migrate", str(old), "--model", "smollm2-135m", "-o", str(new)]) == 0
    assert "left out 1 rule that stood in comments" in capsys.readouterr().err
    text = new.read_text(encoding="utf-8")
    assert "# kept\n" in text
    assert "# kept, too\n" in text
    assert "# - match" not in text
    assert "# class" not in text.replace("#     class", "# class")


def test_rules_that_must_stand_after_others_are_still_merged_with_each_other() -> None:
    halves = (("[0-9]|1[0-4]", "cuda:0"), ("1[5-9]|2[0-9]", "cuda:1"), ("3[0-9]|4[0-4]", "cuda:2"), ("4[5-9]|5[0-9]|60", "cuda:3"))
    rules = []
    for wanted in ("self_attn$", "mlp\\.experts$", ""):
        for layers, device in halves:
            name = f"^model\\.layers\\.({layers})\\.{wanted}"
            operator = {"self_attn$": "KDeepseekV2Attention", "": "default"}.get(wanted, "KTransformersExperts")
            kwargs = f"generate_device: '{'cpu' if operator == 'KTransformersExperts' else device}', prefill_device: '{device}'"
            closes = "\n  recursive: false" * (operator == "KTransformersExperts")
            rules.append(f"- match: {{name: '{name}'}}\n  replace: {{class: {operator}, kwargs: {{{kwargs}}}}}{closes}\n")
    made = migrate(SourceFile("old.yaml", "".join(rules)), [load_tree("deepseek-v3")])
    assert made.rules[0] == 12
    assert made.rules[1] <= 3
    assert not any("not merged" in note for note in made.notes)
