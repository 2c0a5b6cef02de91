"""What differs between two plans: by rule, then by group of modules, each with all that changed of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import deepseek_like

import ktopt
from ktopt.cli import main
from ktopt.cli.diff import to_json
from ktopt.cli.diff_text import diff_text
from ktopt.cli.plan_table import plan_table
from ktopt.plan import ModelRef, Plan, RuleRef, Step, Transfer
from ktopt.plan_diff import Field, PlanDiff, diff_plans
from ktopt.plan_json import dump_plan, load_plan
from ktopt.render.style import Style, width
from ktopt.source import SourceFile


def step(path: str, **changes: Any) -> Step:
    plain = Step(path, "torch.nn.modules.linear.Linear", "linear", "default", {}, "cuda:0", "cuda:0", "bfloat16", 100)
    return plain._replace(**changes)


def rule(id: str, line: int = 3, operator: str = "KTransformersLinear", file: str = "a.yaml") -> RuleRef:
    return RuleRef(id, file, line, 1, operator)


def plan(*steps: Step, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "model": ModelRef("tiny", "llama", ("LlamaForCausalLM",), "0" * 64, {"hidden_size": 8}),
        "rule_file": "a.yaml",
        "rule_digest": "f" * 64,
        "rules": (rule("first"),),
        "steps": steps,
        "transfers": (),
        "default_device": "cuda:0",
        "dtype": "bfloat16",
    }
    return Plan(**{**fields, **changes})


def layers(name: str, count: int = 3, **changes: Any) -> list[Step]:
    return [step(f"layers.{i}.{name}", **changes) for i in range(count)]


def told(a: Plan, b: Plan) -> list[str]:
    return diff_text(diff_plans(a, b), a, b).splitlines()


def words(difference: PlanDiff) -> list[str]:
    return [str(change) for change in difference.changes]


def test_plans_that_differ_only_in_what_decided_are_alike(tmp_path: Path) -> None:
    full = step("model", kwargs={"transfer_map": {30: "cuda:1"}}, rule=0, alias="old", runs={"Fast": ("Slow", "why")}, notes=("n",))
    (tmp_path / "p").write_text(dump_plan(plan(full._replace(rule=None, alias="", notes=()), ktopt_version="9")))
    difference = diff_plans(plan(full), load_plan(tmp_path / "p"))
    assert difference.empty
    assert not difference.changes
    assert told(plan(full), plan(full)) == ["the plans do not differ"]
    assert told(plan(full), load_plan(tmp_path / "p")) == ["the plans do not differ; 1 module is decided by other rules"]


def test_all_that_changed_of_a_group_is_one_entry_under_its_rule() -> None:
    names = ("gate_proj", "up_proj")
    before = plan(*(s for n in names for s in layers(f"mlp.{n}", rule=0, operator="K", kwargs={"generate_op": "Slow"})))
    after = plan(
        *(
            s
            for n in names
            for s in layers(f"mlp.{n}", rule=0, operator="K", kwargs={"generate_op": "Fast"}, generate_device="cpu",
                            prefill_device="cpu", weight_bytes=40)
        ),
        rules=(rule("first", 9, file="b.yaml"),),
        rule_file="b.yaml",
    )  # fmt: skip
    assert told(before, after) == [
        "a.yaml -> b.yaml, for tiny",
        "",
        "device                    before  after",
        "cpu                          0 B  240 B  +240 B",
        "cuda:0                     600 B    0 B  -600 B",
        "",
        "rule first (a.yaml:3 -> b.yaml:9)",
        "  ~ layers.{0..2}.mlp.{gate_proj,up_proj} x6",
        "      generate_op Slow -> Fast; device cuda:0 -> cpu; 600 B -> 240 B",
    ]


def test_a_long_entry_has_its_modules_and_its_fields_on_lines_of_their_own() -> None:
    before = plan(*layers("mlp.gate_proj", rule=0, operator="K"))
    after = plan(*layers("mlp.gate_proj", rule=0, operator="K" * 60, dtype="float32", weight_bytes=200))
    lines = told(before, after)
    assert lines[-3] == "  ~ layers.{0..2}.mlp.gate_proj x3"
    assert " ".join(line.strip() for line in lines[-2:]) == f"operator K -> {'K' * 60}; dtype bfloat16 -> float32; 300 B -> 600 B"
    assert max(map(width, lines)) <= 100


class TestRules:
    def test_are_the_same_by_id_wherever_they_stand(self) -> None:
        a = plan(step("x", rule=0, operator="K"), rules=(rule("linears", 3, "K"), rule("experts", 5, "K")))
        b = plan(step("x", rule=1, operator="K2"), rules=(rule("experts", 3, "K"), rule("linears", 8, "K2")))
        (found,) = diff_plans(a, b).rules
        assert (found.same, found.gone, found.new, found.number) == (True, False, False, 1)
        assert "rule linears (a.yaml:3 -> a.yaml:8)" in told(a, b)

    def test_without_ids_are_the_same_by_operator_and_what_they_decide(self) -> None:
        a = plan(*layers("a", rule=0, operator="K"), rules=(rule("rule-1", 3, "K"),))
        inserted = (rule("rule-1", 3, "K"), rule("rule-2", 7, "K"))
        b = plan(*layers("a", rule=1, operator="K", dtype="float32"), step("b", rule=0), rules=inserted)
        assert "rule-1 -> rule-2 (a.yaml:3 -> a.yaml:7)" in told(a, b)

    def test_that_only_one_plan_has_are_said_to_be(self) -> None:
        a = plan(step("x", rule=0, operator="K"), step("y"), rules=(rule("old", 3, "K"),))
        b = plan(step("x", rule=0, operator="L"), step("y", rule=0, operator="L"), rules=(rule("new", 8, "L"),))
        lines = told(a, b)
        assert "rule old (a.yaml:3, only there) -> rule new (a.yaml:8, only there)" in lines
        assert "no rule -> rule new (a.yaml:8, only there)" in lines
        back = told(b, a)
        assert "rule new (a.yaml:8, only there) -> no rule" in back

    def test_that_decide_the_same_for_other_modules_are_told_beside_differences(self) -> None:
        two = (rule("one", 3, "K"), rule("two", 5, "K"))
        a = plan(*layers("x", rule=0, operator="K"), step("y"), rules=two)
        b = plan(*layers("x", rule=1, operator="K"), step("y", dtype="float32"), rules=two)
        assert told(a, b)[-5:] == [
            "no rule",
            "  ~ y: dtype bfloat16 -> float32; 100 B",
            "",
            "rule one (a.yaml:3) -> rule two (a.yaml:5)",
            "  = layers.{0..2}.x x3: as before",
        ]
        assert words(diff_plans(a, b)) == ["y: dtype bfloat16 -> float32"]


class TestChanges:
    def test_the_device_of_a_module_that_holds_and_runs_nothing_is_no_difference(self) -> None:
        container = step("layers.0", operator="default", weight_bytes=0)
        assert diff_plans(plan(container), plan(container._replace(generate_device="cpu"))).empty
        for held in (container._replace(weight_bytes=8), container._replace(operator="KDeepseekV2Model")):
            assert not diff_plans(plan(held), plan(held._replace(generate_device="cpu"))).empty

    def test_the_kwarg_that_changed_is_named(self) -> None:
        a, b = (plan(step("a", operator="K", kwargs={"x": 1, "y": y, "out_device": f"cuda:{y}"})) for y in (2, 3))
        assert words(diff_plans(a, b)) == ["a: y 2 -> 3"]

    def test_an_operator_comes_with_its_op(self) -> None:
        b = plan(step("a", operator="K", kwargs={"generate_op": "Fast", "more": 1}))
        assert words(diff_plans(plan(step("a")), b)) == ["a: operator default -> K, generate_op none -> Fast"]

    def test_a_class_goes_by_its_name_where_that_tells_them_apart(self) -> None:
        a, b, c = (plan(step("a", cls=name)) for name in ("old.Norm", "old.FusedNorm", "new.Norm"))
        assert words(diff_plans(a, b)) == ["a: class Norm -> FusedNorm"]
        assert words(diff_plans(a, c)) == ["a: class old.Norm -> new.Norm"]

    def test_devices_that_differ_apart_are_told_apart(self) -> None:
        b = plan(step("a", prefill_device="cpu"))
        assert words(diff_plans(plan(step("a")), b)) == ["a: prefill_device cuda:0 -> cpu"]

    def test_many_moves_that_are_otherwise_alike_are_told_as_one(self) -> None:
        spread = plan(*(s._replace(generate_device=f"cuda:{i}", prefill_device=f"cuda:{i}") for i, s in enumerate(layers("x", 4))))
        one, cpu = plan(*layers("x", 4)), {"generate_device": "cpu", "prefill_device": "cpu"}
        assert told(one, spread)[-1] == "  ~ layers.{1..3}.x x3: device cuda:0 -> cuda:1 x1, cuda:2 x1, cuda:3 x1; 300 B"
        assert told(spread, plan(*layers("x", 4, **cpu, weight_bytes=50)))[-1] == (
            "  ~ layers.{0..3}.x x4: device cuda:0 x1, cuda:1 x1, cuda:2 x1, cuda:3 x1 -> cpu; 400 B -> 200 B"
        )
        turned = plan(
            *(s._replace(generate_device=f"cuda:{3 - i}", prefill_device=f"cuda:{3 - i}") for i, s in enumerate(layers("x", 4)))
        )
        assert "device cuda:0 -> cuda:3 x1, cuda:1 -> cuda:2 x1, " in " ".join(" ".join(told(spread, turned)[-2:]).split())
        assert len(diff_plans(one, spread).changes) == 3

    def test_a_count_stays_with_what_it_counts(self) -> None:
        spread = plan(*(s._replace(generate_device=f"cuda:{i}", prefill_device=f"cuda:{i}") for i, s in enumerate(layers("x", 40))))
        lines = told(plan(*layers("x", 40)), spread)
        assert not any(line.strip().startswith("x") for line in lines)
        assert max(map(width, lines)) <= 100

    def test_bytes_are_those_of_all_modules_of_the_entry(self) -> None:
        a, b = plan(*layers("x")), plan(*layers("x", weight_bytes=50, replicas=("cuda:1",)))
        (change,) = diff_plans(a, b).changes
        assert change.fields == (Field("replicas", (), ("cuda:1",)), Field("weight_bytes", 300, 300))
        assert change.nbytes == 300

    def test_what_lies_in_a_closed_module_counts_as_part_of_it(self) -> None:
        def closed(device: str, operator: str, inside: bool) -> Plan:
            steps = []
            for i in range(2):
                owner = f"layers.{i}.experts"
                steps.append(step(owner, operator=operator, rule=0, weight_bytes=0, generate_device=device))
                steps += [step(f"{owner}.{e}", inside=owner if inside else "", generate_device=device) for e in range(3)]
            return plan(*steps)

        for inside in (True, False):
            difference = diff_plans(closed("cuda:0", "K", inside), closed("cpu", "KTransformersExperts", True))
            assert words(difference) == ["layers.{0..1}.experts: operator K -> KTransformersExperts, generate_device cuda:0 -> cpu"]
            assert difference.changes[0].nbytes == 600
        opened = diff_plans(closed("cpu", "K", True), closed("cpu", "K", False))
        assert words(opened) == ["layers.{0..1}.experts.{0..2}: inside experts -> none"]

    def test_hot_experts_are_told_by_how_many_they_are_of_all_layers(self) -> None:
        def split(*hot: str) -> Plan:
            return plan(
                *(
                    s._replace(kwargs={"hot_experts": {i: text}}, elsewhere={"cuda:1": 10 * len(text.split(","))})
                    for i, (s, text) in enumerate(zip(layers("experts", operator="K", rule=0), hot, strict=True))
                )
            )

        none = plan(*layers("experts", operator="K", rule=0, kwargs={"hot_experts": None}))
        (change,) = diff_plans(none, split("1", "0..2", "5,9")).changes
        assert str(change) == "layers.{0..2}.experts: hot_experts 0 -> 6, elsewhere none -> 40 B on cuda:1"
        assert words(diff_plans(split("1", "2", "3"), split("4", "2", "5"))) == [
            "layers.{0,2}.experts: hot_experts 2 -> as many others"
        ]

    def test_modules_that_one_plan_has_are_told_by_the_topmost(self) -> None:
        a = plan(
            step(""),
            step("gone"),
            step("layers.0"),
            *(step(f"layers.{i}") for i in (1, 2)),
            *(step(f"layers.{i}.x") for i in (1, 2)),
        )
        b = plan(step(""), step("layers.0"), step("new"), rule_file="b.yaml")
        lines = told(a, b)
        assert lines[lines.index("only in a.yaml") + 1 :] == [
            "  - gone",
            "  - layers.{1..2} and all below",
            "",
            "only in b.yaml",
            "  + new",
        ]

    def test_transfers_are_folded(self) -> None:
        moves = tuple(Transfer(f"layers.{i}.experts", "input", "cuda:0", "cpu", f"layers.{i}.norm") for i in range(4))
        lines = told(plan(step("a"), transfers=moves), plan(step("a"), transfers=moves[:1]))
        assert lines[-2:] == ["transfers", "  - cuda:0 -> cpu at the input of layers.{1..3}.experts"]

    def test_settings_are_named(self) -> None:
        lines = told(plan(step("a")), plan(step("a"), long_context={"block_size": 64}))
        assert lines[-2:] == ["settings", "  ~ long_context.block_size none -> 64"]


def test_the_json_has_the_same_structure() -> None:
    a = plan(*layers("x", rule=0, operator="K"))
    b = plan(*layers("x", rule=0, operator="K", runs={"Fast": ("Slow", "why")}))
    data = json.loads(json.dumps(to_json(diff_plans(a, b))))
    assert list(data) == ["empty", "devices", "rules", "only_before", "only_after", "transfers", "settings"]
    (found,) = data["rules"]
    assert found["before"]["id"] == found["after"]["id"] == "first"
    assert found["same"] is True
    assert found["changes"] == [
        {
            "modules": ["layers.{0..2}.x"],
            "paths": ["layers.0.x", "layers.1.x", "layers.2.x"],
            "fields": [{"field": "runs", "before": {}, "after": {"Fast": ["Slow", "why"]}}],
            "bytes": 300,
        }
    ]


def test_a_hostile_plan_can_not_drive_the_terminal() -> None:
    a = plan(step("a\x1b[2J\nno rule", operator="\x1b[1m"), rules=(rule("\x1b"),))
    b = plan(step("a\x1b[2J\nno rule"), step("\x1b"), rule_file="b\x1b.yaml")
    assert told(a, b).count("no rule") == 1
    assert "\x1b" not in diff_text(diff_plans(a, b), a, b)
    assert "\x1b[" in diff_text(diff_plans(a, b), a, b, style=Style(colour=True))


NATIVE = (
    "version: 1\ndtype: bfloat16\nplace: {PLACE}\nrules:\n  - {id: linears, match: class=Linear, replace: KTransformersLinear}\n"
)


def test_two_rule_sets_of_a_model_with_every_expert_a_module() -> None:
    graph = deepseek_like(layers=6, experts=16)
    files = {"cpu.yaml": '{cpu: "@**"}', "split.yaml": '{cpu: "@model.layers.*.mlp.experts.**", "cuda:0": "@**"}'}
    a, b = (ktopt.compile(SourceFile(name, NATIVE.replace("{PLACE}", place)), graph) for name, place in files.items())
    difference = diff_plans(a, b)
    moved = {path for change in difference.changes for path in change.paths}
    assert moved == {s.path for s in a.steps if s.weight_bytes and ".experts." not in s.path}
    lines = diff_text(difference, a, b).splitlines()
    assert "rule linears (cpu.yaml:5 -> split.yaml:5)" in lines
    assert max(map(width, lines)) <= 100
    assert len(lines) < 40


@pytest.mark.parametrize(("before", "after"), [("deepseek-v3/24gb", "deepseek-v3/cpu")])
def test_shipped_rule_sets_compare_by_rule(before: str, after: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", before, after, "--model", "moonlight-16b-a3b"]) == 1
    out = capsys.readouterr().out
    assert "rule experts (" in out
    assert "device cuda:0 -> cpu" in out
    assert max(map(width, out.splitlines()[1:])) <= 100


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "plans.md").read_text(encoding="utf-8")
    blocks = [block.partition("\n") for block in page.split("```")[1::2]]
    (rules,), (tree, shown) = ([text.rstrip("\n") for language, _, text in blocks if language == each] for each in ("yaml", ""))
    a = ktopt.compile(SourceFile("rules.yaml", rules), "deepseek-v3")
    b = ktopt.compile(
        SourceFile("new.yaml", rules.replace("0..29", "0..14").replace("KExpertsCPU", "KExpertsTorch")), "deepseek-v3"
    )
    assert plan_table(a).split("\n\n")[1] == tree
    assert diff_text(diff_plans(a, b), a, b) == shown + "\n"
