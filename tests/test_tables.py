"""Folded paths and text tables."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ktopt.cli.table import Branch, Column, layout, tree_branches, wrap_path
from ktopt.cli.terminal import size
from ktopt.folding import fold_names, fold_paths, number_ranges


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


def test_siblings_share_a_name_and_numbers_a_range() -> None:
    paths = [f"layers.{i}.mlp.{name}" for i in range(3) for name in ("gate_proj", "up_proj")]
    assert fold_names([*paths, "layers.0.norm", "lm_head", ""]) == [
        "layers.{0..2}.mlp.{gate_proj,up_proj}",
        "layers.0.norm",
        "lm_head",
        "(the model)",
    ]
    assert fold_names(["a.0", "a.1", "a.b", "c"]) == ["a.{0..1}", "a.b", "c"]


def test_a_tree_keeps_its_lines_where_a_row_takes_several() -> None:
    branches = [Branch("", "│  "), Branch("├─ ", "│  "), Branch("└─ ", "   ")]
    rows = [["top", "K"], ["self_attn.{q_proj,k_proj,v_proj,o_proj}", "KLinear\n  KLinearTorch\n  Q4_K"], ["end", "a\nb"]]
    assert layout((Column("module"), Column("operator")), rows, 42, branches=branches).splitlines() == [
        "module                      operator",
        "top                         K",
        "├─ self_attn.{q_proj,       KLinear",
        "│   k_proj,v_proj,o_proj}     KLinearTorch",
        "│                             Q4_K",
        "└─ end                      a",
        "                            b",
    ]


def test_a_range_is_not_broken_between_its_dots() -> None:
    for wide in range(14, 40):
        assert not any(
            line.endswith("0.") or line.strip().startswith(".") for line in wrap_path("model.layers.{0..29,31}.mlp", wide)
        )


def test_branches_follow_from_how_deep_rows_stand() -> None:
    depths = [0, 1, 2, 3, 2, 1, 0, 1]
    names = [branch.first + str(depth) for branch, depth in zip(tree_branches(depths), depths, strict=True)]
    assert names == ["0", "├─ 1", "│  ├─ 2", "│  │  └─ 3", "│  └─ 2", "└─ 1", "0", "└─ 1"]
    assert [branch.others for branch in tree_branches(depths)] == [
        "│  ",
        "│  │  ",
        "│  │  │  ",
        "│  │     ",
        "│     ",
        "   ",
        "│  ",
        "   ",
    ]
