"""Selectors: what they take, how they print, and what is said of those that can't be read."""

import random
import re
import time

import pytest
from builders import EMBEDDING, LINEAR, Row, deepseek_like, make_graph, weight
from hypothesis import given, settings
from hypothesis import strategies as st

from ktopt.diagnostics import Report
from ktopt.placement import Device, Hardware
from ktopt.selector import Selector, parse_selector
from ktopt.selector.expression import AllOf, AnyOf, Call, Equal, Glob, Matches, Minus, Not, Order, Range, Ref, Unequal
from ktopt.selector.surroundings import Surroundings
from ktopt.source import Origin, Span
from ktopt.treeindex import index_of, members

GRAPH = deepseek_like(layers=12, dense=2)
PLAIN = deepseek_like(layers=4, dense=1, rotary_aliases=False)
GPU = Hardware("one", (Device("cuda:0", 24 * 10**9, sm=89),), 64 * 2**30, 16, frozenset({"avx512_vnni", "amx_int8"}))


def origin(text):
    return Origin("rules.yaml", Span.at(7, 11, len(text)))


def read(text, lets=None, **rest):
    report = Report()
    found = parse_selector(text, origin(text), lets or {}, report, **rest)
    assert found is not None, [str(d) + str(d.help) for d in report]
    return found


def taken(text, graph=GRAPH, lets=None, **rest):
    return {graph.modules[i].path for i in members(read(text, lets).evaluate(graph, **rest))}


def where(test, graph=GRAPH):
    return {m.path for m in graph if test(m)}


def is_linear(module):
    return module.cls.name.endswith("Linear")


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("class=Linear", is_linear),
        ("class=torch.nn.Linear & layer=3", lambda m: is_linear(m) and m.layer == 3),
        ("layer in 3..5, 9..", lambda m: m.layer in (3, 4, 5, 9, 10, 11)),
        ("name=q_a_proj | name in o_proj, kv_b_proj", lambda m: m.name in ("q_a_proj", "o_proj", "kv_b_proj")),
        ("name ~ /q_._proj/", lambda m: m.name in ("q_a_proj", "q_b_proj")),
        ("path=model.norm", lambda m: m.path == "model.norm"),
        ('path=""', lambda m: m.path == ""),
        (r"path ~ /model\.layers\.1\..*/", lambda m: m.layer == 1 and m.path != "model.layers.1"),
        ("class=Linear - name=kv_b_proj", lambda m: is_linear(m) and m.name != "kv_b_proj"),
        ("name!=act_fn & under(@model.layers.2.mlp)", lambda m: m.path.startswith("model.layers.2.mlp.") and m.name != "act_fn"),
        ("numel >= 100000000", lambda m: sum(t.numel for t in m.parameters) >= 10**8),
        ("bytes > 1GiB", lambda m: sum(t.nbytes for t in m.parameters) > 2**30),
        ("shape[0]=1536 & shape[1] in 7000..8000", lambda m: m.name == "q_a_proj"),
        ("dtype=bfloat16", lambda m: bool(m.parameters)),
        ("!dtype=bfloat16", lambda m: not m.parameters),
        ("config.num_hidden_layers >= 12 & name=lm_head", lambda m: m.name == "lm_head"),
        ("config.num_hidden_layers=3", lambda m: False),
        ("type=torch.nn.Module", lambda m: False),
        ("layer <= 1 & type=Linear", lambda m: m.layer in (0, 1) and is_linear(m)),
    ],
)
def test_a_selector_takes_the_modules_that_it_says(text, test):
    assert taken(text, PLAIN if "numel" in text else GRAPH) - {"model.rotary_emb"} == where(
        test, PLAIN if "numel" in text else GRAPH
    ) - {"model.rotary_emb"}


def test_class_takes_subclasses_and_type_only_the_class_itself():
    graph = make_graph([Row("a", ("mine.MyLinear", *LINEAR)), Row("b", LINEAR), Row("c", EMBEDDING)])
    assert taken("class=Linear", graph) == {"a", "b"}
    assert taken("type=Linear", graph) == {"b"}
    assert taken("class ~ /.*Linear/", graph) == {"a", "b"}


@pytest.mark.parametrize(
    ("glob", "regex"),
    [
        ("model.layers.*", r"model\.layers\.[^.]+"),
        ("model.layers.*.**", r"model\.layers\.[^.]+\..+"),
        ("model.layers.1", r"model\.layers\.1"),
        ("**", r".+"),
        ("**.mlp", r"(.+\.)?mlp"),
        ("model.**.mlp", r"model\.(.+\.)?mlp"),
        ("model.**.mlp.**", r"model\.(.+\.)?mlp\..+"),
        ("**.**.up_proj", r"(.+\.)?up_proj"),
        ("*.*.1*.self_attn.*_proj", r"[^.]+\.[^.]+\.1[^.]*\.self_attn\.[^.]*_proj"),
        ("model.layers.{0..2,11}.mlp", r"model\.layers\.(0|1|2|11)\.mlp"),
        ("model.layers.{9..}.mlp.{gate,shared_experts}", r"model\.layers\.(9|10|11)\.mlp\.(gate|shared_experts)"),
        ("model.layers.*.self_attn.{q_*,o}_proj", r"model\.layers\.\d+\.self_attn\.(q_[^.]*|o)_proj"),
    ],
)
def test_a_glob_fits_whole_paths_segment_by_segment(glob, regex):
    expected = {m.path for m in GRAPH if any(re.fullmatch(regex, path) for path in (m.path, *m.alias_paths) if path)}
    assert taken(f"@{glob}") == expected
    assert expected


def test_a_module_is_also_named_by_its_older_paths():
    assert taken("@model.layers.{3..4}.self_attn.rotary_emb") == {"model.rotary_emb"}
    places = read("layer=3 & name=rotary_emb").evaluate_places(index_of(GRAPH), {})
    assert [index_of(GRAPH).path(p) for p in members(places)] == ["model.layers.3.self_attn.rotary_emb"]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("parent(name=up)", {"m.a", "m.b"}),
        ("children(@m.a)", {"m.a.up", "m.a.down"}),
        ("under(@m)", {"m.a", "m.a.up", "m.a.down", "m.b", "m.b.up"}),
        ("has(name=down)", {"", "m", "m.a"}),
        ("siblings(@m.a.up)", {"m.a.down"}),
        ("siblings(children(@m.a))", {"m.a.up", "m.a.down"}),
        ("under(@m.a | @m)", {"m.a", "m.a.up", "m.a.down", "m.b", "m.b.up"}),
        ('parent(path="")', set()),
        ('siblings(path="")', set()),
    ],
)
def test_relations(text, paths):
    graph = make_graph(["m.a.up", "m.a.down", "m.b.up"])
    assert taken(text, graph) == paths


def test_storage_types_are_known_only_with_weights():
    graph = make_graph([Row("a", LINEAR, weight(2, 2)), Row("b", LINEAR, weight(2, 2))])
    assert taken("quant=Q4_K", graph) == set()
    assert taken("quant=Q4_K", graph, storage={"a.weight": ("Q4_K",), "b.weight": ("Q6_K",)}) == {"a"}
    assert taken("quant ~ /Q.*/ - quant=Q4_K", graph, storage={"a.weight": ("Q4_K",), "b.weight": ("Q6_K",)}) == {"b"}


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("hw.cuda_sm >= 80", True),
        ("hw.cuda_sm >= 90", False),
        ("hw.cuda_count=1 & hw.vram >= 24GB", True),
        ("hw.vram >= 24GiB", False),
        ("hw.ram >= 64GiB & hw.cores > 8", True),
        ("hw.cpu.amx=true & hw.cpu.avx512_vnni=true & !hw.cpu.avx2=true", True),
        ("hw.cpu.avx2=false - hw.cores=16", False),
    ],
)
def test_a_condition_on_the_machine_is_unknown_without_one(text, known):
    assert read(text, when=True).evaluate_when({}, Surroundings(GPU)) is known
    assert read(text, when=True).evaluate_when({}) is None


def test_a_condition_that_the_machine_can_not_change_is_known_without_one():
    config = {"num_experts": 64, "architectures": ["A", "B"], "rope": {"type": "yarn"}, "tied": True}
    assert read("config.num_experts=64 | hw.cuda_sm=80", when=True).evaluate_when(config) is True
    assert read("config.num_experts=8 & hw.cuda_sm=80", when=True).evaluate_when(config) is False
    assert read("config.architectures=B & config.rope.type=yarn & config.tied=true", when=True).evaluate_when(config) is True
    assert read("config.missing=1", when=True).evaluate_when(config) is False


LETS = {"block": read("@model.layers.*.**"), "lin": read("class=Linear & layer in 1..2")}
VALUES = st.text("abcxyz019_:+. /\"'\\é-", min_size=0, max_size=6)
LEAVES = st.one_of(
    st.sampled_from([Glob("model.layers.*.mlp"), Glob("**.{a,b}_proj"), Glob("model.layers.{0..2,7..}.*")]),
    st.builds(Equal, st.sampled_from(["name", "path", "class", "config.a"]), st.tuples(VALUES)),
    st.builds(Equal, st.just("name"), st.lists(VALUES, min_size=1, max_size=3).map(tuple), st.just(True)),
    st.builds(
        Equal,
        st.just("layer"),
        st.lists(st.builds(lambda a, n: Range(a, None if n is None else a + n), st.integers(0, 9), st.none() | st.integers(0, 9)))
        .filter(bool)
        .map(tuple),
        st.just(True),
    ),
    st.builds(Unequal, st.sampled_from(["name", "dtype"]), VALUES),
    st.builds(Matches, st.just("name"), st.sampled_from(["q_.*", "a/b", r"\w+\.x", r"\\/"])),
    st.builds(
        Order,
        st.sampled_from(["numel", "bytes", "layer", "shape[1]"]),
        st.sampled_from([">=", "<=", ">", "<"]),
        st.integers(-(10**29), 10**29),
    ),
    st.builds(Order, st.just("layer"), st.just("<"), st.floats(-1e20, 1e20).filter(lambda x: x != int(x))),
    st.sampled_from([Ref(name, s.root) for name, s in LETS.items()]),
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        *(
            st.builds(kind, st.lists(inner, min_size=2, max_size=3).map(tuple).filter(lambda p, k=kind: not isinstance(p[0], k)))
            for kind in (AnyOf, AllOf, Minus)
        ),
        st.builds(Not, inner),
        st.builds(Call, st.sampled_from(["parent", "children", "under", "has", "siblings"]), inner),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(EXPRESSIONS.filter(lambda e: "Infinity" not in str(e)))
def test_what_a_selector_prints_parses_to_the_same_selector(expression):
    assert read(str(expression), LETS).root == expression


def subset(expression, graph=PLAIN):
    return Selector("", expression, origin("")).evaluate(graph)


@settings(max_examples=80, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, EXPRESSIONS)
def test_the_operators_are_those_of_sets(a, b, c):
    everything = PLAIN.all
    assert subset(AnyOf((a, b))) == subset(a) | subset(b)
    assert subset(AllOf((a, b))) == subset(a) & subset(b)
    assert subset(Minus((a, b, c))) == subset(a) & ~subset(b) & ~subset(c)
    assert subset(Not(a)) == everything & ~subset(a)
    assert subset(Not(AnyOf((a, b)))) == subset(AllOf((Not(a), Not(b))))
    assert subset(a) <= everything


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS)
def test_relations_are_those_of_the_tree(a):
    chosen = set(members(subset(a)))
    graph = PLAIN
    assert set(members(subset(Call("parent", a)))) == {graph.modules[i].parent for i in chosen} - {-1}
    assert set(members(subset(Call("children", a)))) == {m.index for m in graph if m.parent in chosen}
    assert set(members(subset(Call("under", a)))) == {m.index for m in graph if any(p.index in chosen for p in graph.ancestors(m))}
    assert set(members(subset(Call("has", a)))) == {p.index for i in chosen for p in graph.ancestors(graph.modules[i])}
    assert set(members(subset(Call("siblings", a)))) == {
        m.index for m in graph if any(i != m.index and graph.modules[i].parent == m.parent >= 0 for i in chosen)
    }


@pytest.mark.parametrize(
    ("text", "column", "message", "help"),
    [
        ("layer in 0-29", 10, "0-29 is no range", "a range is written 0..29: layer in 0..29"),
        ("@a and @b", 4, "'and' is no operator here", "write & for and"),
        ("@a or @b", 4, "'or' is no operator here", "write | for or"),
        ("not @a", 1, "'not' is no operator here", "write ! for not"),
        ("class==Linear", 6, "== is no operator here", "write one =: class=Linear"),
        ("layr=3", 1, "no field layr", "did you mean layer?"),
        ("$blok & @a", 1, "no `let` names $blok", "did you mean $block?"),
        ("layer = 0..29", 7, "a range comes after `in`, not =", "write in 0..29 for = 0..29"),
        ("model.layers.*.mlp", 12, "a path is written with @ before it", "such as @model.layers.*.mlp"),
        ("name ~ foo", 8, "a regex stands between slashes", "such as name ~ /q_.*/"),
        ("@m[0-9].x", 3, "a glob has no [...]", "write {0..9} for numbers and {a,b} for choices"),
        ("chldren(@a)", 1, "no function chldren", "did you mean children?"),
        ("hw.cuda_smm > 3", 1, "no field hw.cuda_smm", "did you mean hw.cuda_sm?"),
        ("name in 1..3", 1, "name is text, and 1..3 a range of numbers", "write name in a, b"),
        ("layer in 5..2", 10, "the range 5..2 is empty", "write 2..5"),
        ("@a @b", 4, "'@' can't stand here; expected |, & or -", None),
        ("(@a | ", 7, "it ends too early; expected a field such as class or layer, ", None),
        ("name ~ /[4-10]/", 10, 'regex: bad character range "4-1"', None),
        ("lm_head", 8, "it ends too early", "write @lm_head for the module of that path, or name=lm_head"),
        ("^lm_head$", 1, "a selector is no regex", "write path ~ /lm_head/"),
        ("layer in [0..3]", 10, "values stand without brackets", "write in 0..3"),
        ("@a & layer=[0..3]", 12, "values stand without brackets", "write in 0..3"),
        ("name~/lm_head", 6, "the regex isn't closed by a /", r"close it with /: name~/lm_head/; a / within it is written \/"),
        ("@a & layer in 0:3", 15, "layer is a number, and '0:3' is none", "a range is written 0..3"),
        ("@a..b", 4, "glob: a segment is empty: two dots in a row, or one at an end", "such as @model.layers.{0..29}.mlp"),
    ],
)
def test_a_mistake_is_told_with_its_column_and_a_remedy(text, column, message, help):
    report = Report()
    assert parse_selector(text, origin(text), LETS, report) is None
    (found,) = report.items
    assert found.code == "KT310"
    assert (found.span.start.line, found.span.start.column) == (7, 11 + column - 1)
    assert found.message.startswith(f"selector, column {column}: {message}")
    if help is not None:
        assert found.help == help


def test_a_condition_that_asks_of_modules_is_refused():
    for text in ("layer in 0..3", "@model", "has(hw.cores=3)"):
        report = Report()
        assert parse_selector(text, origin(text), {}, report, when=True) is None
        assert [d.code for d in report] == ["KT310"]


@pytest.mark.parametrize(
    "text",
    [
        "!" * 9000 + "@a",
        "(" * 4900 + "@a" + ")" * 4900,
        "@a - (" * 1500 + "@b",
        "@" + "*" * 5000,
        "@" + "*a" * 2000,
        "@a" * 9000,
        "layer > 1e999",
        "x=\x00",
    ],
)
def test_hostile_text_is_answered_at_once(text):
    report = Report()
    start = time.process_time()
    parse_selector(text, origin(text), {}, report)
    assert time.process_time() - start < 5
    assert all(d.code == "KT310" for d in report)


def test_names_that_double_each_other_do_not_explode():
    lets: dict[str, Selector] = {}
    text = "class=Linear"
    for i in range(18):
        lets[f"a{i}"] = read(text, lets)
        text = f"$a{i} | $a{i} & $a{i} | $a{i}"
    start = time.process_time()
    assert taken(text, PLAIN, lets) == where(is_linear, PLAIN)
    assert hash(read(text, lets).root) == hash(read(text, lets).root)
    assert len(repr(read(text, lets))) < 1000
    assert time.process_time() - start < 1


def test_any_text_is_parsed_or_reported():
    tokens = ["@a", "class", "=", "!=", "Linear", "in", "0..3", ",", "(", ")", "!", "&", "|", "-"]
    tokens += ["$block", "has", "~", "/a/", ">=", "9", "."]
    source = random.Random(1)
    for _ in range(400):
        text = " ".join(source.choices(tokens, k=source.randint(1, 9)))
        report = Report()
        assert (parse_selector(text, origin(text), LETS, report) is None) == bool(report.items)
