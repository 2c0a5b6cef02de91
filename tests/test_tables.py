"""Folded paths, text tables, and a plan as a table."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ktopt.cli.plan_table import plan_table
from ktopt.cli.table import Column, layout, wrap_path
from ktopt.cli.terminal import size
from ktopt.folding import fold_paths, number_ranges
from ktopt.plan import ModelRef, Plan, RuleRef, Step, Transfer

GOES = "quantised kernels are not in this version"


def step(
    path: str, operator: str = "default", device: str = "cpu", nbytes: int = 0, rule: int | None = None, **more: object
) -> Step:
    return Step(path, f"torch.nn.{path.rpartition('.')[2]}", "other", operator, {}, device, device, "float32", nbytes, rule, **more)  # type: ignore[arg-type]


def plan(*steps: Step, transfers: tuple[Transfer, ...] = (), notes: tuple[str, ...] = ()) -> Plan:
    return Plan(
        ModelRef("tiny", "llama", (), "", {}),
        "rules.yaml",
        "",
        (
            RuleRef("rule-1", "rules.yaml", 12, 3, "KTransformersLinear"),
            RuleRef("fast", "rules.yaml", 30, 3, "default", active=False),
        ),
        steps,
        transfers,
        "cpu",
        "float32",
        notes=notes,
    )


def texts(*paths: str) -> list[str]:
    return [pattern.text for pattern in fold_paths(paths)]


def test_layers_fold_to_ranges() -> None:
    assert texts("model.layers.0.mlp", "model.layers.1.mlp", "model.layers.3.mlp", "lm_head") == [
        "model.layers.{0..1,3}.mlp",
        "lm_head",
    ]


def test_a_single_layer_keeps_its_number() -> None:
    assert texts("layers.7.mlp") == ["layers.7.mlp"]


def test_two_numbers_fold_where_every_pair_is_there() -> None:
    assert texts(*(f"layers.{i}.experts.{e}" for i in range(3) for e in range(4))) == ["layers.{0..2}.experts.{0..3}"]
    assert texts("l.0.e.0", "l.0.e.1", "l.1.e.0") == ["l.0.e.{0..1}", "l.1.e.0"]


def test_braces_in_a_path_are_kept() -> None:
    assert texts("a.{x}.0", "a.{x}.1") == ["a.{x}.{0..1}"]


PATHS = st.lists(
    st.lists(st.one_of(st.sampled_from(["a", "b", "c"]), st.integers(0, 12).map(str)), min_size=1, max_size=4).map(".".join),
    unique=True,
)


@given(PATHS)
def test_patterns_stand_for_exactly_the_paths_given(paths: list[str]) -> None:
    covered = [path for pattern in fold_paths(paths) for path in pattern.paths]
    assert sorted(covered) == sorted(paths)
    assert len({pattern.text for pattern in fold_paths(paths)}) == len(fold_paths(paths))


def test_ranges() -> None:
    assert number_ranges([5]) == "5"
    assert number_ranges([3, 1, 2, 9]) == "{1..3,9}"


def test_a_table_aligns_its_columns_and_drops_empty_ones() -> None:
    table = layout((Column("a"), Column("none"), Column("n", right=True)), [["x", "", "5"], ["yy", "", "1234"]], 80, least=2)
    assert table == "a      n\nx      5\nyy  1234"


def test_the_first_column_wraps_where_room_is_short() -> None:
    table = layout((Column("path"), Column("op")), [["model.layers.{0..29}.self_attn.q_proj", "KTransformersLinear"]], 50)
    assert table.splitlines()[1:] == ["model.layers.{0..29}.          KTransformersLinear", "    self_attn.q_proj"]


def test_a_wrapped_path_loses_nothing() -> None:
    text = "model.layers.{0..29}.self_attn.{q_proj,k_proj,v_proj,averyveryveryverylongnamewithoutanydot}"
    lines = wrap_path(text, 30)
    assert "".join(line.strip() for line in lines) == text
    assert all(len(line) <= 30 for line in lines)


def test_sizes() -> None:
    assert [size(0), size(999), size(1000), size(538_100_000), size(1.31e12)] == ["0 B", "999 B", "1.0 kB", "538.1 MB", "1.3 TB"]


def test_siblings_and_layers_share_a_row_with_their_bytes_added() -> None:
    names = ("gate_proj", "up_proj")
    table = plan_table(
        plan(*(step(f"layers.{i}.mlp.{n}", "KTransformersLinear", nbytes=1000, rule=0) for i in range(3) for n in names))
    )
    (row,) = [line for line in table.splitlines() if "KTransformersLinear" in line]
    assert row.split() == ["layers.{0..2}.mlp.{gate_proj,up_proj}", "x6", "KTransformersLinear", "cpu", "6.0", "kB", "12"]


def test_devices_rules_and_ops_keep_rows_apart() -> None:
    table = plan_table(
        plan(
            step("a.x", "K", "cpu", 10, 0),
            step("a.y", "K", "cuda:0", 10, 0),
            step("a.z", "K", "cpu", 10, None)._replace(kwargs={"generate_op": "Fast"}, runs={"Fast": ("Slow", GOES)}),
        )
    )
    assert [line.split()[0] for line in table.splitlines()[3:6]] == ["a.x", "a.y", "a.z"]
    assert "Fast" in table
    assert ">Slow" in table


def test_modules_without_weights_and_rule_are_counted_not_shown() -> None:
    quiet = plan(step("model"), step("model.norm", nbytes=4))
    assert "\nmodel " not in plan_table(quiet)
    assert "1 module without weights that no rule names" in plan_table(quiet)
    assert "\nmodel " in plan_table(quiet, everything=True)


def test_what_a_closed_module_holds_is_counted_as_its_own() -> None:
    experts = [
        step("experts", "KTransformersExperts", rule=0),
        *(step(f"experts.{e}", nbytes=500, inside="experts") for e in range(4)),
    ]
    table = plan_table(plan(*experts))
    assert "2.0 kB" in table
    assert "experts.{0..3}" not in table


def test_replicas_count_on_each_device() -> None:
    table = plan_table(plan(step("rotary", device="cuda:0", nbytes=100, rule=0, replicas=("cuda:1",))))
    assert [line.split()[-2:] for line in table.splitlines() if line.startswith(("cuda:0", "cuda:1", "together"))] == [
        ["100", "B"],
        ["100", "B"],
        ["200", "B"],
    ]


def test_transfers_and_notes_are_folded() -> None:
    moves = tuple(Transfer(f"layers.{i}.experts", "input", "cuda:0", "cpu") for i in range(4))
    noted = [step(f"layers.{i}", nbytes=1, notes=("a note",)) for i in range(4)]
    table = plan_table(plan(*noted, transfers=moves, notes=("for all",)))
    assert "transfers (4)\n  cuda:0 -> cpu at the input of layers.{0..3}.experts" in table
    assert "  for all\n  layers.{0..3}: a note" in table
    assert "inactive on this machine: fast (line 30)" in table
