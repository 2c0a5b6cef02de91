"""A plan as a tree in which what repeats stands once, and `ktopt plan`'s table of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from builders import deepseek_like
from shipped_sets import FOR, fitted

import ktopt
from ktopt.choosing.sets import shipped_sets
from ktopt.cli.plan_rows import rows_of
from ktopt.cli.plan_table import plan_table
from ktopt.compiler import run_stages
from ktopt.diagnostics import Report
from ktopt.folded import Group, fold_plan
from ktopt.parse import read_source
from ktopt.plan import ModelRef, Plan, RuleRef, Step, Transfer
from ktopt.render.style import Style, width
from ktopt.selector import parse_selector
from ktopt.source import FILE_START, Origin, SourceFile
from ktopt.trees import load_tree

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases" / "upstream_rules"
GOES = "quantised kernels are not in this version"


def step(
    path: str, operator: str = "default", device: str = "cpu", nbytes: int = 0, rule: int | None = None, **more: object
) -> Step:
    return Step(
        path,
        f"torch.nn.{path.rpartition('.')[2].rstrip('0123456789')}",
        "other",
        operator,
        {},
        device,
        device,
        "float32",
        nbytes,
        rule,
        **more,
    )  # type: ignore[arg-type]


def plan(*steps: Step, transfers: tuple[Transfer, ...] = (), notes: tuple[str, ...] = ()) -> Plan:
    rules = (
        RuleRef("rule-1", "rules.yaml", 12, 3, "KTransformersLinear"),
        RuleRef("fast", "rules.yaml", 30, 3, "default", active=False),
        RuleRef("imported", "base.yaml", 7, 3, "KTransformersLinear"),
    )
    return Plan(ModelRef("tiny", "llama", (), "", {}), "rules.yaml", "", rules, steps, transfers, "cpu", "float32", notes=notes)


def layers(
    *numbers: int, device: str = "cpu", rule: int | None = 0, names: tuple[str, ...] = ("gate_proj", "up_proj")
) -> list[Step]:
    found = []
    for i in numbers:
        found += [step(f"layers.{i}.mlp.{name}", "K", device, 1000, rule) for name in names]
        found += [step(f"layers.{i}.norm", device=device, nbytes=10), step(f"layers.{i}.act")]
    return found


def patterns(group: Group) -> list[str]:
    return [each.pattern for each in group.walk()]


def tree_of(table: str) -> list[str]:
    """The names of a table's rows, with the lines before them."""
    rows = table.split("\n\n")[1].splitlines()[1:]
    return [re.split(r"(?<=[^\s│|])\s{2,}", row)[0] for row in rows if re.match(r"\(|[│| ]*(├─|└─|\|-|`-) ", row)]


class TestFolding:
    def test_layers_that_are_treated_alike_stand_once_whether_they_follow_each_other_or_not(self) -> None:
        root = fold_plan(plan(*layers(0, 1), *layers(2, device="cuda:0"), *layers(3)))
        assert patterns(root) == [
            "", "layers",
            "layers.{0..1,3}", "layers.{0..1,3}.mlp", "layers.{0..1,3}.mlp.gate_proj", "layers.{0..1,3}.mlp.up_proj",
            "layers.{0..1,3}.norm",
            "layers.2", "layers.2.mlp", "layers.2.mlp.gate_proj", "layers.2.mlp.up_proj", "layers.2.norm",
        ]  # fmt: skip
        (all_layers,) = root.children
        assert all_layers.children[0].paths == ("layers.0", "layers.1", "layers.3")
        assert [child.name for child in all_layers.children] == ["{0..1,3}", "2"]

    @pytest.mark.parametrize(
        "change",
        [
            {"operator": "Other"},
            {"rule": 1},
            {"prefill_device": "cuda:1"},
            {"dtype": "bfloat16"},
            {"kwargs": {"generate_op": "Fast"}},
            {"runs": {"Fast": ("Slow", GOES)}},
            {"stored": ("Q4_K",)},
            {"replicas": ("cuda:0",)},
            {"cls": "another.Class"},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_what_is_treated_otherwise_keeps_layers_apart(self, change: dict[str, object]) -> None:
        steps = layers(0, 1)
        steps[4] = steps[4]._replace(**change)  # type: ignore[arg-type]
        assert [group.name for group in fold_plan(plan(*steps)).children[0].children] == ["0", "1"]

    def test_experts_in_layers_fold_twice_and_keep_the_order_of_the_tree(self) -> None:
        steps = [step(f"layers.{i}.experts.{e}.up", nbytes=5, rule=0) for i in range(2, 5) for e in range(4)]
        *_, last = fold_plan(plan(*steps)).walk()
        assert last.pattern == "layers.{2..4}.experts.{0..3}.up"
        assert last.paths == tuple(s.path for s in steps)
        assert (last.count, last.own_nbytes) == (12, 60)

    def test_bytes_are_counted_with_what_is_below_and_on_each_device_that_holds_a_copy(self) -> None:
        root = fold_plan(
            plan(step("a", nbytes=1), step("a.b", nbytes=10, replicas=("cuda:0", "cuda:1")), step("a.b.c", nbytes=100))
        )
        assert [(g.pattern, g.own_nbytes, g.nbytes) for g in root.walk()] == [
            ("", 0, 131),
            ("a", 1, 131),
            ("a.b", 30, 130),
            ("a.b.c", 100, 100),
        ]

    def test_what_lies_in_a_closed_module_is_its_own_unless_everything_is_asked_for(self) -> None:
        closed = [
            step("layers.0.experts", "KTransformersExperts", rule=0),
            *(step(f"layers.0.experts.{e}", nbytes=500, inside="layers.0.experts") for e in range(4)),
        ]
        (experts,) = [g for g in fold_plan(plan(*closed)).walk() if g.name == "experts"]
        assert (experts.own_nbytes, experts.children) == (2000, ())
        assert patterns(fold_plan(plan(*closed), everything=True))[-2:] == ["layers.0.experts", "layers.0.experts.{0..3}"]

    def test_modules_without_weights_and_rule_are_there_where_everything_is(self) -> None:
        assert "layers.{0..1}.act" not in patterns(fold_plan(plan(*layers(0, 1))))
        assert "layers.{0..1}.act" in patterns(fold_plan(plan(*layers(0, 1)), everything=True))

    def test_names_that_only_look_like_numbers_do_not_fold(self) -> None:
        assert patterns(fold_plan(plan(step("a.01", nbytes=1), step("a.1", nbytes=1), step("a.²", nbytes=1))))[2:] == [
            "a.01",
            "a.1",
            "a.²",
        ]

    def test_a_model_with_every_expert_a_module_folds_to_a_few_groups_that_stand_for_all(self) -> None:
        graph = deepseek_like(layers=8, experts=32)
        rules = (
            "version: 1\ndtype: bfloat16\nplace: {cpu: '@**'}\nrules:\n  - {match: class=Linear, replace: KTransformersLinear}\n"
        )
        made = ktopt.compile(SourceFile("r.yaml", rules), graph)
        root = fold_plan(made, everything=True)
        assert sorted(path for group in root.walk() for path in group.paths) == sorted(made.by_path)
        assert sum(group.own_nbytes for group in root.walk()) == root.nbytes == made.weight_bytes
        assert "model.layers.{3..7}.mlp.experts.{0..31}.down_proj" in patterns(root)
        assert len(patterns(root)) < 60

    def test_each_pattern_is_a_selector_of_exactly_its_modules(self) -> None:
        made = real_plan("deepseek-v3/24gb")
        graph = load_tree("deepseek-v3")
        groups = [group for group in fold_plan(made, everything=True).walk() if group.name]
        assert len(groups) > 30
        for group in groups:
            selector = parse_selector(f"@{group.pattern}", Origin("here", FILE_START), {}, Report())
            assert selector
            taken = selector.evaluate(graph)
            assert [m.path for m in graph.modules if taken >> m.index & 1] == sorted(
                group.paths, key=lambda p: graph.by_path[p].index
            )


class TestTable:
    def test_it_is_a_tree_with_layers_and_siblings_in_one_row(self) -> None:
        assert tree_of(plan_table(plan(*layers(0, 1, 2), step("head", nbytes=4)))) == [
            "(the model)",
            "├─ layers.{0..2}",
            "│  ├─ mlp.{gate_proj,up_proj}",
            "│  └─ norm",
            "└─ head",
        ]

    def test_a_row_has_count_operator_device_size_and_rule(self) -> None:
        (row,) = [line for line in plan_table(plan(*layers(0, 1, 2))).splitlines() if " K " in line]
        assert row.split()[1:] == ["mlp.{gate_proj,up_proj}", "x6", "K", "cpu", "6.0", "kB", "rule-1:12"]

    def test_a_rule_of_another_file_names_it(self) -> None:
        table = plan_table(plan(step("a", "K", nbytes=4, rule=2)))
        assert "imported:7" in table
        assert "of base.yaml" in table

    def test_op_what_runs_in_its_place_and_storage_types_stand_beside_the_operator_or_below_it(self) -> None:
        made = plan(
            step("a.z", "AnOperatorOfALongName", nbytes=10, runs={"Fast": ("Slow", GOES)}, stored=("Q4_K",))._replace(
                kwargs={"generate_op": "Fast"}
            )
        )
        assert re.search(r"AnOperatorOfALongName +Fast +cpu.*\n +>Slow\n +Q4_K", plan_table(made))
        assert re.search(r"AnOperatorOfALongName +cpu.*\n +Fast\n +>Slow\n +Q4_K", plan_table(made, 68))

    def test_what_has_rows_below_it_keeps_siblings_apart(self) -> None:
        table = plan_table(plan(step("first", nbytes=1), *layers(0, 1), step("last", nbytes=1), step("head", nbytes=1)))
        assert [name for name in tree_of(table) if name[0] in "├└"] == ["├─ first", "├─ layers.{0..1}", "└─ {last,head}"]

    def test_modules_without_weights_and_rule_are_counted_not_shown(self) -> None:
        quiet = plan(step("model"), step("model.norm", nbytes=4), step("model.act"))
        assert tree_of(plan_table(quiet)) == ["(the model)", "└─ model.norm"]
        assert "1 module without weights that no rule names" in plan_table(quiet)
        assert tree_of(plan_table(quiet, everything=True)) == ["(the model)", "└─ model", "   └─ {norm,act}"]

    def test_layers_on_other_devices_are_told_by_the_first_ones(self) -> None:
        table = plan_table(plan(*layers(0, 1, device="cuda:0"), *layers(2, 3, device="cuda:1"), *layers(4, device="cpu", rule=2)))
        assert tree_of(table) == [
            "(the model)",
            "└─ layers",
            "   ├─ {0..1}",
            "   │  ├─ mlp.{gate_proj,up_proj}",
            "   │  └─ norm",
            "   ├─ {2..3}",
            "   └─ 4",
        ]
        assert re.search(r"\{2\.\.3\} +x2 +as \{0\.\.1\} +cuda:1 +4\.0 kB\n", table)
        assert re.search(r"4 +as \{0\.\.1\} +cpu +2\.0 kB +line 7\n", table)

    def test_what_differs_of_layers_like_earlier_ones_is_told(self) -> None:
        names = ("gate_proj", "up_proj", "down_proj")
        steps = [*layers(0, 2, names=names), *layers(1, 3, names=names)]
        steps = [s._replace(stored=("Q6_K",)) if re.search(r"[13]\.mlp\.down", s.path) else s for s in steps]
        table = plan_table(plan(*steps))
        assert tree_of(table)[-2:] == ["   └─ {1,3}", "      └─ mlp.down_proj"]
        assert "as {0,2}, but for" in table
        assert re.search(r"mlp\.down_proj +x2 +K +Q6_K +cpu +2\.0 kB", table)

    def test_the_experts_of_some_layers_elsewhere_are_all_that_is_told_of_these(self) -> None:
        def layer(i: int, device: str, experts: str) -> list[Step]:
            names = ("q_proj", "k_proj", "v_proj", "norm", "gate")
            return [
                *(step(f"layers.{i}.{name}", device=device, nbytes=10) for name in names),
                step(f"layers.{i}.experts", "Experts", experts, 100_000, 0),
            ]

        places = ["cuda:0 cuda:0", "cuda:0 cpu", "cuda:1 cuda:1", "cuda:1 cpu"]
        table = plan_table(plan(*(s for i, place in enumerate(places) for s in layer(i, *place.split()))))
        assert tree_of(table)[-4:] == ["   ├─ 1", "   │  └─ experts", "   ├─ 2", "   └─ 3"]
        assert re.search(r"1 +as 0, but for +cuda:0 +100\.\d kB\n +│  │ +cpu\n +│  └─ experts +Experts +cpu", table)
        assert re.search(r"2 +as 0 +cuda:1 .*\n.*3 +as 1 +cuda:1 .*\n +cpu\n", table)

    def test_of_many_stretches_of_numbers_the_first_and_the_last_are_told(self) -> None:
        steps = [s for i in range(30) for s in layers(i, device=f"cuda:{i % 2}")]
        assert "{1,3,5,7,...,29} " in plan_table(plan(*steps))
        assert "{1,3,5,7,9,11,13,15,17,19," in plan_table(plan(*steps), everything=True)

    def test_layers_that_are_hardly_alike_are_shown_whole(self) -> None:
        other = [s._replace(operator="Other") for s in layers(1)]
        assert "as 0" not in plan_table(plan(*layers(0), *other))

    def test_replicas_count_on_each_device(self) -> None:
        table = plan_table(plan(step("rotary", device="cuda:0", nbytes=100, rule=0, replicas=("cuda:1",))))
        assert [line.split()[-2:] for line in table.splitlines() if line.startswith(("cuda:0", "cuda:1", "together"))] == [
            ["100", "B"],
            ["100", "B"],
            ["200", "B"],
        ]

    def test_transfers_and_notes_are_folded_and_wrapped(self) -> None:
        moves = tuple(Transfer(f"layers.{i}.experts", "input", "cuda:0", "cpu") for i in range(4))
        noted = [step(f"layers.{i}", nbytes=1, notes=("a note",)) for i in range(4)]
        table = plan_table(plan(*noted, transfers=moves, notes=("for all " * 20,)))
        assert "transfers (4)\n  cuda:0 -> cpu at the input of layers.{0..3}.experts" in table
        assert "\n  layers.{0..3}: a note" in table
        assert "inactive on this machine: fast (line 30)" in table
        assert max(map(width, table.splitlines())) <= 100

    def test_a_set_that_ships_is_called_by_its_name_and_a_long_title_is_wrapped(self) -> None:
        (file,) = (each.path for each in shipped_sets() if each.name == "qwen3-moe/cpu")
        made = replace(plan(step("a", nbytes=1)), rule_file=str(file))
        assert plan_table(replace(made, model=replace(made.model, source="qwen3-30b-a3b"))).startswith("qwen3-30b-a3b/cpu for q")
        long = plan_table(replace(made, model=replace(made.model, source="folder/" * 12 + "x.gguf"))).splitlines()
        assert max(map(width, long)) <= 100

    def test_lines_are_ascii_where_the_terminal_has_no_others(self) -> None:
        table = plan_table(plan(*layers(0, 1), step("head", nbytes=4)), style=Style(lines=False))
        assert table.isascii()
        assert tree_of(table)[1:] == ["|- layers.{0..1}", "|  |- mlp.{gate_proj,up_proj}", "|  `- norm", "`- head"]

    def test_a_hostile_name_can_not_drive_the_terminal(self) -> None:
        table = plan_table(plan(step("a\x1b[2J\nb", "K\x1b", nbytes=4, rule=0)))
        assert "\x1b" not in table
        assert "└─ a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b " in table

    def test_columns_are_left_out_before_names_are(self) -> None:
        made = plan(*layers(0, 1, 2, names=("gate_proj", "up_proj", "down_proj")))
        assert "rule-1:12" in plan_table(made, 80)
        narrow = plan_table(made, 50)
        assert "rule-1" not in narrow
        assert re.search(r" 12$", narrow, flags=re.MULTILINE)


MODELS = {
    "DeepSeek-V2-Lite": "deepseek-v2-lite",
    "DeepSeek-V2": "deepseek-v2",
    "DeepSeek-V3": "deepseek-v3",
    "Mixtral": "mixtral-8x7b",
    "Moonlight": "moonlight-16b-a3b",
    "Qwen2": "qwen2-57b-a14b",
    "Qwen3": "qwen3-30b-a3b",
}
"""By the beginning of a rule file's name."""
UPSTREAM = sorted(path for path in CASES.rglob("*.yaml") if not path.name.startswith("Internlm"))
"""Without the one whose errors leave no plan."""


def real_plan(rules: Path | str) -> Plan:
    """Of one of KTransformers' files, or of a set that ships."""
    if isinstance(rules, str):
        made = fitted(rules).plan
    else:
        made = run_stages(read_source(rules), next(name for start, name in MODELS.items() if rules.name.startswith(start))).plan
    assert made is not None
    return made


@pytest.mark.parametrize("rules", [*FOR, *UPSTREAM], ids=lambda rules: getattr(rules, "name", rules))
def test_real_plans_fit_a_hundred_columns_and_their_sizes_add_up(rules: Path | str) -> None:
    made = real_plan(rules)
    lines = plan_table(made).splitlines()
    assert max(map(width, lines)) <= 100
    assert len(lines) < 120
    root = rows_of(fold_plan(made))
    assert root.nbytes == made.weight_bytes
    for row in root.walk():
        if row.holder and not row.like:
            assert sum(below.nbytes for below in row.rows) == row.nbytes, row.name


@pytest.mark.skipif(not UPSTREAM, reason=f"{CASES} is not here")
def test_layers_over_many_gpus_are_told_by_those_of_the_first() -> None:
    made = real_plan(CASES / "DeepSeek-V3-Chat-multi-gpu-4.yaml")
    table = plan_table(made)
    assert max(map(width, plan_table(made, everything=True).splitlines())) <= 100
    assert re.search(r"\{15\.\.29\} +x15 +as \{3\.\.14\} +cuda:1", table)
    assert re.search(r"\{30\.\.44\} +x15 +as \{3\.\.14\} +cuda:2", table)
