"""KTransformers' old names for today's modules: unique, pointing at modules that exist, and those that its rule files use."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from oracle import upstream_trees
from torch import nn
from transformers import CONFIG_MAPPING, MixtralConfig, MixtralForCausalLM

from ktopt.graph import Module, ModuleGraph
from ktopt.models import FAMILIES, family, family_of_class
from ktopt.models.family import Family, Was, rope_kind
from ktopt.trees import graph_from_module, known_models, load_tree, model_config

RULES = Path(__file__).resolve().parents[2] / "shared" / "cases" / "upstream_rules"

V3 = "ktransformers.models.modeling_deepseek_v3."
V2 = "ktransformers.models.modeling_deepseek."
LINEAR = "torch.nn.modules.linear.Linear"

IN_COPIES = ["deepseek-v2", "deepseek-v3", "kimi-k2", "moonlight-16b-a3b", "mixtral-8x7b", "qwen2-57b-a14b", "qwen3-30b-a3b"]


def at(graph: ModuleGraph, path: str) -> Module:
    module = graph.find(path)
    assert module is not None, path
    return module


def test_every_family_file_is_listed_and_declares_its_own_type() -> None:
    folder = Path(__import__("ktopt.models", fromlist=["__path__"]).__path__[0])
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "family", "shipped", "treefile", "config_checks"}
    assert files == set(FAMILIES)
    for name in FAMILIES:
        found = family(name)
        assert found is not None
        assert found.model_type == name


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_renames_exists_in_transformers(name: str) -> None:
    found = family(name)
    assert found is not None
    if not found.was:
        assert found.refusal or found.builds_as in CONFIG_MAPPING
        return
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    prefix = next(iter(found.was)).removesuffix("RMSNorm")
    optional = {f"{prefix}MLP", f"{prefix}Experts"}
    assert {cls for cls in found.was if not hasattr(module, cls)} <= optional


@pytest.mark.parametrize("name", known_models())
def test_aliases_are_unique_and_never_another_modules_path(name: str) -> None:
    graph = load_tree(name)
    aliases = Counter(alias for module in graph for alias in module.alias_paths)
    assert [alias for alias, times in aliases.items() if times > 1] == []
    assert aliases.keys() & graph.by_path.keys() == set()
    for module in graph:
        assert len(set(module.alias_classes)) == len(module.alias_classes)
        assert set(module.alias_classes) & set(module.cls.mro) == set()


@pytest.mark.parametrize("name", known_models())
def test_an_alias_hangs_under_a_module_or_under_another_alias(name: str) -> None:
    graph = load_tree(name)
    for alias in graph.by_alias:
        assert graph.find(alias.rpartition(".")[0]) is not None, alias


@pytest.mark.parametrize("name", [*IN_COPIES, "llama-3.1-8b", "internlm2.5-7b-1m"])
def test_each_layer_once_had_its_own_rotary_embedding(name: str) -> None:
    graph = load_tree(name)
    rotary = at(graph, "model.rotary_emb")
    assert rotary.alias_paths == tuple(f"model.layers.{i}.self_attn.rotary_emb" for i in range(graph.layer_count))
    assert at(graph, "model.layers.1.self_attn.rotary_emb") is rotary


@pytest.mark.parametrize("name", ["glm-4.5-air", "qwen3-next-80b-a3b", "gemma-3-270m", "qwen2.5-7b"])
def test_where_the_model_had_one_rotary_embedding_there_is_no_alias_path(name: str) -> None:
    graph = load_tree(name)
    assert graph.by_alias == {}


def test_the_rotary_class_follows_the_configs_scaling() -> None:
    assert at(load_tree("deepseek-v2"), "model.rotary_emb").alias_classes == (
        f"{V2}DeepseekV2YarnRotaryEmbedding",
        f"{V2}DeepseekV2RotaryEmbedding",
    )
    assert at(load_tree("moonlight-16b-a3b"), "model.rotary_emb").alias_classes == (f"{V3}DeepseekV3RotaryEmbedding",)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, "default"),
        ({"rope_scaling": None}, "default"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "linear"),
        ({"rope_scaling": {"type": 5}}, "default"),
    ],
)
def test_rope_scaling_is_read_in_both_spellings(config: dict[str, object], kind: str) -> None:
    assert rope_kind(config) == kind


def test_routers_and_experts_are_known_by_their_old_classes() -> None:
    assert at(load_tree("deepseek-v3"), "model.layers.3.mlp.gate").alias_classes == (f"{V3}MoEGate",)
    assert at(load_tree("deepseek-v2"), "model.layers.3.mlp.gate").alias_classes == (f"{V2}MoEGate",)
    assert at(load_tree("deepseek-v2"), "model.layers.3.mlp").alias_classes == (f"{V2}DeepseekV2MoE",)
    for name in ("mixtral-8x7b", "qwen2-57b-a14b", "qwen3-30b-a3b", "qwen3-next-80b-a3b"):
        graph = load_tree(name)
        assert at(graph, "model.layers.3.mlp.gate").alias_classes == (LINEAR,)
        assert at(graph, "model.layers.3.mlp.experts").alias_classes == ("torch.nn.modules.container.ModuleList",)


def test_mixtrals_block_and_all_below_it_have_their_old_paths() -> None:
    graph = load_tree("mixtral-8x7b")
    block = at(graph, "model.layers.7.block_sparse_moe")
    assert block.path == "model.layers.7.mlp"
    for module in graph.subtree(block):
        assert module.alias_paths == (module.path.replace(".mlp", ".block_sparse_moe"),)


@pytest.mark.parametrize("name", [n for n in known_models() if model_config(n)["model_type"] in upstream_trees.BUILDERS])
def test_every_path_and_class_of_upstreams_own_model_still_finds_its_module(name: str) -> None:
    """Against the tree that the oracle has of KTransformers' copies. Its experts, each a module there, are one today."""
    graph = load_tree(name)
    for old in upstream_trees.upstream_tree(model_config(name), experts=2):
        if ".experts." in old.path:
            continue
        module = at(graph, old.path)
        assert set(old.mro) <= {*module.cls.mro, *module.alias_classes}, old.path


def test_models_that_share_code_share_old_names() -> None:
    for name in ("internlm2.5-7b-1m", "llama-2-70b", "smollm2-135m"):
        assert "ktransformers.models.modeling_llama.LlamaModel" in at(load_tree(name), "model").alias_classes
    assert f"{V3}DeepseekV3MoE" in at(load_tree("kimi-k2"), "model.layers.5.mlp").alias_classes


def test_every_class_that_upstreams_files_match_names_a_module_of_its_model() -> None:
    if not RULES.is_dir():
        pytest.skip("../shared/cases/upstream_rules is not here")
    written = {
        found
        for file in RULES.rglob("*.yaml")
        for found in re.findall(r"class:\s*\"?(ktransformers\.models\.[\w.]+)", file.read_text(encoding="utf-8"))
    }
    assert len(written) >= 15
    names = {alias for model in known_models() for module in load_tree(model) for alias in module.alias_classes}
    # Qwen3-MoE's dense MLP stood only inside its experts, which today are one module.
    assert written - names == {"ktransformers.models.modeling_qwen3_moe.Qwen3MoeMLP"}


def test_a_model_in_hand_has_its_aliases_too() -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=8
    )
    graph = graph_from_module(MixtralForCausalLM(config))
    assert at(graph, "model.layers.1.block_sparse_moe.gate").alias_classes == (LINEAR,)
    assert len(at(graph, "model.rotary_emb").alias_paths) == 2


def test_a_bare_decoder_has_aliases_under_its_own_paths() -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=8
    )
    graph = graph_from_module(MixtralForCausalLM(config).model)
    assert at(graph, "rotary_emb").alias_paths == ("layers.0.self_attn.rotary_emb", "layers.1.self_attn.rotary_emb")
    assert at(graph, "layers.0.block_sparse_moe").path == "layers.0.mlp"


def test_classes_of_ktransformers_itself_get_no_aliases() -> None:
    upstream = type("DeepseekV3RotaryEmbedding", (nn.Module,), {"__module__": "ktransformers.models.modeling_deepseek_v3"})
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": nn.Identity()})]), "rotary_emb": upstream()})
    graph = graph_from_module(model)
    assert all(module.alias_paths == () and module.alias_classes == () for module in graph)


def test_a_subclass_has_the_old_names_of_its_base() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    class Mine(DeepseekV3RMSNorm):
        pass

    assert graph_from_module(nn.Sequential(Mine(4))).by_path["0"].alias_classes == (f"{V3}DeepseekV3RMSNorm",)


def test_a_class_outside_transformers_is_of_no_family() -> None:
    assert family_of_class("torch.nn.modules.linear.Linear") is None
    assert family_of_class("transformers.modeling_utils.PreTrainedModel") is None
    assert family_of_class("transformers.models.bert.modeling_bert.BertModel") is None


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "deepseek-v3",
            {"topk_method": "greedy"},
            "topk_method is 'greedy', but transformers' deepseek_v3 computes 'noaux_tc'",
        ),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("kimi-k2", {"scoring_func": "softmax"}, "transformers' deepseek_v3 computes 'sigmoid' only"),
        ("deepseek-v2-lite", {}, None),
    ],
)
def test_a_config_that_transformers_would_misread_is_refused(name: str, change: dict[str, object], says: str | None) -> None:
    config = {**model_config(name), **change}
    found = family(config["model_type"])
    assert found is not None
    refusal = found.refuses(config)
    assert (refusal is None) == (says is None)
    assert says is None or says in str(refusal)


def test_an_old_class_without_a_dot_is_in_the_familys_package() -> None:
    made = Family(model_type="x", package="old.x", was={"New": Was(classes=("Old", "torch.nn.Linear"))})
    assert made.old_classes("New", {}) == ("old.x.Old", "torch.nn.Linear")
    assert made.old_classes("Other", {}) == ()


def test_shipped_configs_are_plain_json_and_fresh_each_time() -> None:
    config = model_config("smollm2-135m")
    config["hidden_size"] = 1
    assert model_config("smollm2-135m")["hidden_size"] == 576
    for name in known_models():
        assert json.loads(json.dumps(model_config(name)))["model_type"]
