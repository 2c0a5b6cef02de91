"""The first thing that check says of a file with one mistake: it names the mistake, at its place, and what to write instead."""

import pytest

import ktopt

MODEL = "deepseek-v3"
NATIVE = "version: 1\n"


def check(tmp_path, text, model=MODEL):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    return [d for d in ktopt.check(path, model) if d.code != "KT408"]


def seen(diagnostics, *wanted):
    return [(d.code, str(d.severity), d.span.start.line) for d in diagnostics if not wanted or d.code in wanted]


def under(text, d):
    """The text of a file that a finding points at."""
    return text.splitlines()[d.span.start.line - 1][d.span.start.column - 1 : d.span.end.column - 1]


@pytest.mark.parametrize(
    ("selector", "dead", "near"),
    [
        ("layer in 0.. | @model.embed_token", "@model.embed_token", "embed_tokens"),
        ("@model.layer.*.** | @model.embed_tokens", "@model.layer.*.**", "layers"),
        ("(@lm_head | name=q_a_prj) & class=Linear", "q_a_prj", "q_a_proj"),
        ("class=Linear - @lm_heads", "@lm_heads", "lm_head"),
    ],
)
def test_a_part_of_a_selector_that_selects_nothing_is_named_where_it_stands(tmp_path, selector, dead, near):
    text = f'{NATIVE}place:\n  "cuda:0": "{selector}"\nrules: []\n'
    (d,) = [d for d in check(tmp_path, text) if d.code == "KT301"]
    assert (str(d.severity), under(text, d)) == ("warning", dead)
    assert f"did you mean {near}?" in d.help


def test_a_selector_whose_parts_all_select_something_is_not_blamed(tmp_path):
    text = f'{NATIVE}place:\n  "cuda:0": "layer in 0.. | @model.embed_tokens | type=Linear"\nrules: []\n'
    assert not seen(check(tmp_path, text), "KT301")


@pytest.mark.parametrize("match", ["$experts", "$experts | class=Linear"])
def test_a_misspelt_let_is_reported_at_the_let(tmp_path, match):
    text = f'{NATIVE}let:\n  experts: "@model.layers.*.mlp.expert"\nrules:\n  - match: {match}\n    replace: default\n'
    (d,) = [d for d in check(tmp_path, text) if d.code == "KT301"]
    assert (d.span.start.line, under(text, d)) == (3, "@model.layers.*.mlp.expert")


def test_an_alternative_of_a_pattern_that_takes_nothing_is_named(tmp_path):
    text = r"""
- match: {name: '(^model\.layers\.)|(^model\.nrom)|(^lm_head)'}
  replace: {class: default, kwargs: {generate_device: 'cuda:1'}}
"""
    (d,) = [d for d in check(tmp_path, text) if d.code == "KT301"]
    assert str(d.severity) == "warning"
    assert r"`(^model\.nrom)`" in d.message
    assert "did you mean norm?" in d.help


def places(*lines, top=""):
    return NATIVE + top + "place:\n" + "".join(f'  "{device}": "{selector}"\n' for device, selector in lines) + "rules: []\n"


def test_a_layer_between_two_places_that_neither_takes_is_named_with_where_it_goes(tmp_path):
    text = places(("cuda:0", "layer in 0..14"), ("cuda:1", "layer in 16..29"))
    (d,) = check(tmp_path, text)
    assert seen([d]) == [("KT309", "warning", 4)]
    assert "layer 15 is placed by no line" in d.message
    assert d.message.endswith("it goes to cpu")


@pytest.mark.parametrize(
    ("lines", "top"),
    [
        ([("cuda:0", "layer in 0..14"), ("cuda:1", "layer in 15..29")], ""),
        ([("cuda:0", "@model.layers.{0,20,40}.**")], ""),
        ([("cuda:0", "layer in 0..14"), ("cuda:1", "layer in 16..29")], "default_device: cuda:2\n"),
    ],
    ids=["the last layers are left", "single layers are named", "the rest has a device"],
)
def test_layers_that_are_left_out_on_purpose_are_no_gap(tmp_path, lines, top):
    assert not seen(check(tmp_path, places(*lines, top=top)), "KT309")


def test_where_places_overlap_the_first_is_named(tmp_path):
    (d,) = check(tmp_path, places(("cuda:0", "layer in 0..30"), ("cuda:1", "layer in 30..")))
    assert seen([d]) == [("KT303", "info", 4)]
    assert "place cuda:0 (line 3)" in d.message


@pytest.mark.parametrize("rest", ["", ".*", r"(?!self_attn\.kv_b_proj).*$"])
def test_a_number_that_nothing_ends_is_the_first_finding_and_stands_at_the_number(tmp_path, rest):
    text = rf"""
- match: {{name: '^model\.layers\.(0|[1-9]|[12][0-9]){rest}', class: torch.nn.Linear}}
  replace: {{class: KTransformersLinear, kwargs: {{generate_device: 'cuda:0'}}}}
- match: {{name: '^model\.layers\.([3456][0-9])\.', class: torch.nn.Linear}}
  replace: {{class: KTransformersLinear, kwargs: {{generate_device: 'cuda:1'}}}}
- match: {{name: 'self_attn$'}}
  replace: {{class: KDeepseekV2Attention, kwargs: {{generate_device: 'cuda:0'}}}}
"""
    d = check(tmp_path, text)[0]
    assert (seen([d]), under(text, d)) == ([("KT305", "error", 2)], "(0|[1-9]|[12][0-9])")
    assert "also takes layers 30-60" in d.message
    assert r"(0|[1-9]|[12][0-9])\." in d.help


def test_the_number_of_a_rule_for_modules_that_were_once_in_every_layer_is_looked_at_too(tmp_path):
    text = r"""
- match: {name: "^model\\.layers\\.(0|[1-9]|[12][0-9])", class: ktransformers.models.modeling_deepseek_v3.DeepseekV3RotaryEmbedding}
  replace: {class: YarnRotaryEmbeddingV3, kwargs: {generate_device: 'cuda:0'}}
"""
    (d,) = [d for d in check(tmp_path, text) if d.code == "KT305"]
    assert under(text, d) == "(0|[1-9]|[12][0-9])"


def test_a_digit_that_stands_for_any_layer_is_not_blamed(tmp_path):
    text = r"""
- match: {name: '^model\.layers\.[0-9].*', class: torch.nn.Linear}
  replace: {class: default, kwargs: {generate_device: 'cuda:0'}}
"""
    assert not seen(check(tmp_path, text), "KT305")


def two_halves(*families, late="(3[1-9]|[456][0-9])"):
    text = ""
    for family in families:
        for numbers, device in (("(0|[1-9]|[12][0-9])", "cuda:0"), (late, "cuda:1")):
            text += f"- match: {{name: '^model\\.layers\\.{numbers}\\.{family}'}}\n"
            text += f"  replace: {{class: default, kwargs: {{generate_device: '{device}'}}}}\n"
    return text


def test_one_layer_between_two_halves_is_one_finding_at_the_half_that_begins_late(tmp_path):
    (d,) = [d for d in check(tmp_path, two_halves("self_attn", "mlp", "input", "post")) if d.code == "KT309"]
    assert d.span.start.line == 3
    assert d.message.startswith("layer 30 is covered by no rule while 0-29, 31-60 are")
    assert "take layer 30" in d.help


def test_an_alternative_of_a_number_that_is_beyond_the_model_is_named(tmp_path):
    text = two_halves("", late="(3[0-9]|[4-6][0-9]|7[0-9])")
    (d,) = [d for d in check(tmp_path, text) if d.code == "KT306"]
    assert (under(text, d), str(d.severity)) == ("7[0-9]", "warning")
    assert "70-79" in d.message


@pytest.mark.parametrize(
    "text",
    [
        NATIVE + "rules:\n- {match: '@model.layers.{1..28}.** & class=Linear', replace: KTransformersLinear}\n",
        "- match: {name: '^model\\.layers\\.(?!0\\.)\\d+\\..*proj$'}\n  replace: {class: KTransformersLinear}\n",
    ],
    ids=["a range", "a look-ahead"],
)
def test_layers_that_a_rule_leaves_out_on_purpose_are_an_info(tmp_path, text):
    (d,) = [d for d in check(tmp_path, text) if d.code == "KT309"]
    assert str(d.severity) == "info"


def test_a_number_that_was_expected_is_not_spoken_of_where_a_rule_takes_nothing(tmp_path):
    text = NATIVE + "rules:\n- {match: class=Linaer, replace: KTransformersLinear, expect: 5}\n"
    assert seen(check(tmp_path, text)) == [("KT301", "error", 3)]


MOE = r"""- match: {name: '^model\.layers\..*\.mlp$', class: ktransformers.models.modeling_deepseek_v3.DeepseekV3MoE}
  replace: {class: ktransformers.operators.experts.KDeepseekV3MoE, kwargs: {generate_device: DEVICE}}
"""


def test_experts_that_no_rule_mentions_are_a_warning_at_the_rule_of_their_block_with_a_rule_to_paste(tmp_path):
    (d,) = check(tmp_path, MOE.replace("DEVICE", "'cuda:0'"))
    assert seen([d]) == [("KT603", "warning", 1)]
    assert "654 billion weights stay on cuda:0" in d.message
    pasted = d.help[d.help.index("- {match") :]
    assert not check(tmp_path, MOE.replace("DEVICE", "'cuda:0'") + pasted + "\n")


@pytest.mark.parametrize("device", ["cpu", "'cuda:1'"])
def test_experts_are_not_said_to_be_forgotten_twice_or_without_an_accelerator(tmp_path, device):
    assert not [d for d in check(tmp_path, MOE.replace("DEVICE", device)) if "replaces their blocks" in d.message]


def test_the_smaller_part_of_a_split_layer_is_the_one_to_move(tmp_path):
    text = r"""
- match: {name: '^model\.layers\..*\.self_attn$'}
  replace: {class: default, kwargs: {generate_device: 'cuda:0'}}
  recursive: False
- match: {name: '^model\.layers\.'}
  replace: {class: default, kwargs: {generate_device: 'cuda:1'}}
""".replace("  recursive: False\n", "").replace("self_attn$", "self_attn\\.o_proj$")
    (d,) = [d for d in check(tmp_path, text) if d.code == "KT502"]
    assert (d.span.start.line, d.help) == (3, "put these modules on cuda:1 too")


@pytest.mark.parametrize(
    ("name", "help"),
    [
        ("expert$", "did you mean experts?"),
        ("self_att$", "did you mean self_attn?"),
        (r"^model\.layer\.", "did you mean layers?"),
        (r"shared_expert$", "did you mean shared_experts?"),
        ("model/layers/.*/mlp$", r"write model\.layers\..*\.mlp$"),
        ("\u201c^model$\u201d", "typographic quotation mark"),
    ],
)
def test_a_name_that_no_path_has_is_answered_with_the_nearest_one(tmp_path, name, help):
    (d,) = check(tmp_path, f"- match: {{name: '{name}'}}\n  replace: {{class: default}}\n")
    assert d.code == "KT301"
    assert help in d.help


@pytest.mark.parametrize(
    ("cls", "model", "help"),
    [
        ("torch.nn.Liner", MODEL, "did you mean torch.nn.Linear?"),
        ("x.modeling_qwen3_moe.Qwen3MoeMLP", "qwen3-30b-a3b", "the rule has no use for it and can be deleted"),
        ("x.modeling_deepseek_v3.DeepseekV3Moe", MODEL, "DeepseekV3MoE?"),
    ],
)
def test_a_class_is_answered_with_one_spelt_like_it_or_of_the_same_part(tmp_path, cls, model, help):
    (d,) = check(tmp_path, f"- match: {{class: {cls}}}\n  replace: {{class: default}}\n", model)
    assert help in d.help
    assert "Qwen3MoeModel" not in d.help


def test_a_class_of_another_model_is_answered_with_the_class_at_that_name(tmp_path):
    text = "- match: {name: 'mlp$', class: x.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock}\n  replace: {class: default}\n"
    (d,) = check(tmp_path, text)
    assert d.help == "modules at that name are DeepseekV3MoE"


@pytest.mark.parametrize(
    ("name", "operator", "whole"), [("model", "KDeepseekV2Model", "^model$"), (r"\.mlp", "KDeepseekV3MoE", r"\.mlp$")]
)
def test_a_name_that_is_found_in_other_paths_too_is_one_finding(tmp_path, name, operator, whole):
    (d,) = [d for d in check(tmp_path, f"- match: {{name: '{name}'}}\n  replace: {{class: {operator}}}\n") if d.code == "KT407"]
    assert "searched for anywhere" in d.message
    assert d.help.startswith(f"write {whole},")


def test_a_device_that_is_too_small_is_reported_where_the_file_puts_most_on_it(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(f"{NATIVE}place:\n  'cuda:0': 'layer in 0..'\nrules: []\n")
    (d,) = [d for d in ktopt.check(path, "llama-3.1-70b", hardware="1x24GB") if d.code == "KT504"]
    assert d.span.start.line == 3
    (d,) = ktopt.check(path, "llama-3.1-70b", hardware="1x24GB", context=512).errors
    assert (d.code, d.span.start.line) == ("KT507", 3)
    path.write_text(
        f"{NATIVE}rules:\n  - match: '@model.layers.**'\n    replace: default\n    kwargs: {{generate_device: 'cuda:0'}}\n"
    )
    (d,) = ktopt.check(path, "llama-3.1-70b", hardware="1x24GB", context=512).errors
    assert (d.code, d.span.start.line) == ("KT507", 5)


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        ("@layers.*.**", "write @model.layers.*.**"),
        ("@model.layers.* & class=Linear", "write @model.layers.**"),
        ("@layers.* & class=Linear", "write @model.layers.**"),
    ],
)
def test_a_glob_that_slipped_is_told_what_to_write(tmp_path, selector, meant):
    (d,) = check(tmp_path, f'{NATIVE}rules:\n  - match: "{selector}"\n    replace: KTransformersLinear\n')
    assert (d.code, d.span.start.line) == ("KT301", 3)
    assert meant in d.help
