"""Module trees: the shipped ones are what transformers builds, others are built once and cached, bad configs are refused fast."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ktopt.trees
from ktopt.diagnostics import KtoptError
from ktopt.graph import ModuleGraph, Tensor
from ktopt.models import treefile
from ktopt.trees import build_meta_model, graph_from_module, known_models, load_tree, model_config
from ktopt.trees import cache as tree_cache
from ktopt.versions import installed

ROOT = Path(__file__).resolve().parents[1]
FACTS = ROOT.parent / "shared" / "facts" / "transformers_module_trees.txt"

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has an empty cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ktopt" / "trees"


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return path


def dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def described_by_torch(model: nn.Module) -> list[tuple[str, list[str], list[tuple[str, tuple[int, ...], str, bool]]]]:
    """Paths, MROs and own tensors as torch's own walk gives them."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        mro = [dotted(base) for base in type(module).__mro__ if base is not object]
        own = [(n, tuple(p.shape), str(p.dtype)[6:], False) for n, p in module.named_parameters(recurse=False)]
        own += [(n, tuple(b.shape), str(b.dtype)[6:], True) for n, b in module.named_buffers(recurse=False)]
        found.append((path, mro, own))
    return found


def described(graph: ModuleGraph) -> list[tuple[str, list[str], list[tuple[str, tuple[int, ...], str, bool]]]]:
    return [(m.path, list(m.cls.mro), [(t.name, t.shape, t.dtype, t.buffer) for t in m.tensors]) for m in graph]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("make_trees", ROOT / "scripts" / "make_trees.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "mixtral-8x7b", "smollm2-135m"])
def test_a_shipped_tree_is_module_for_module_what_transformers_builds(name: str) -> None:
    config = model_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    assert described(load_tree(name)) == described_by_torch(model)


def test_kimi_k2_is_built_as_deepseek_v3() -> None:
    model = build_meta_model(model_config("kimi-k2"))
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert described(load_tree("kimi-k2")) == described_by_torch(model)
    assert load_tree("kimi-k2").model_type == "deepseek_v3"


def test_every_committed_tree_is_current() -> None:
    make_trees = script()
    entries = make_trees.committed()
    if {entry["transformers"] for entry in entries.values()} != {installed("transformers")}:
        pytest.skip("the trees were built by another transformers version")
    assert len(entries) == 20
    assert make_trees.stale(entries) == []


def test_the_check_notices_a_tree_that_differs() -> None:
    entry = script().committed()["smollm2-135m"]
    entry["config"]["hidden_size"] = 288
    assert script().stale({"smollm2-135m": entry}) == ["smollm2-135m"]


def test_shipped_trees_agree_with_the_facts_on_whole_models() -> None:
    if not FACTS.is_file():
        pytest.skip("../shared/facts is not here")
    names = {
        "DeepseekV3 (full: 61L, 256e)": "deepseek-v3", "DeepseekV2-Lite (27L, 64e)": "deepseek-v2-lite",
        "Qwen3-30B-A3B (48L, 128e)": "qwen3-30b-a3b", "Mixtral-8x7B (32L, 8e)": "mixtral-8x7b",
        "Llama-3.1-8B (32L)": "llama-3.1-8b",
    }  # fmt: skip
    pattern = r"^#+ (.*): \w+ .* modules (\d+) param_tensors (\d+) buffers (\d+) params ([\d.]+)B"
    heads = re.findall(pattern, FACTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {title for title, *_ in heads} == set(names)
    for title, modules, parameters, buffers, billions in heads:
        graph = load_tree(names[title])
        tensors = [tensor for module in graph for tensor in module.tensors]
        assert len(graph) == int(modules)
        assert sum(not t.buffer for t in tensors) == int(parameters)
        assert sum(t.buffer for t in tensors) == int(buffers)
        assert f"{sum(t.numel for t in tensors if not t.buffer) / 1e9:.2f}" == billions


def test_shipped_trees_need_no_heavy_import() -> None:
    heavy = "('torch', 'transformers', 'numpy', 'networkx', 'lark')"
    code = (
        "import sys; from ktopt.trees import load_tree, known_models\n"
        f"for name in known_models(): load_tree(name)\nprint([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_deepseek_v3_loads_in_milliseconds() -> None:
    load_tree("deepseek-v3")
    times = []
    for _ in range(5):
        start = time.process_time()
        load_tree("deepseek-v3")
        times.append(time.process_time() - start)
    assert min(times) < 0.05


def test_equal_classes_and_tensors_are_one_object() -> None:
    graph = load_tree("deepseek-v3")
    assert len({id(m.cls) for m in graph}) == len({m.cls for m in graph})
    assert len({id(m.tensors) for m in graph}) == len({m.tensors for m in graph})


def test_subtrees_are_ranges_and_layers_are_numbered() -> None:
    graph = load_tree("deepseek-v3")
    for module in graph:
        below = [m for m in graph if m.path.startswith(f"{module.path}." if module.path else "")]
        assert module.end - module.index == len(below) + (1 if module.path else 0)
    assert graph.layer_count == 61
    found = graph.find("model.layers.3.mlp.gate")
    assert found is not None
    assert found.layer == 3
    assert (graph.by_path["model"].layer, graph.by_path["lm_head"].layer) == (None, None)


def test_r1_is_v3_under_its_own_name() -> None:
    r1, v3 = load_tree("deepseek-r1"), load_tree("deepseek-v3")
    assert r1.name == "deepseek-r1"
    assert r1.digest == v3.digest


@pytest.mark.parametrize(
    ("asked", "meant"), [("deepseek-v33", "deepseek-v3"), ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"), ("mixtral", "mixtral")]
)
def test_an_unknown_name_is_answered_with_the_nearest(asked: str, meant: str) -> None:
    with pytest.raises(KtoptError, match=f"did you mean {meant}"):
        load_tree(asked)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/config.json", "nothing.gguf", "", "a\0b"])
def test_a_path_that_leads_nowhere_is_an_error(path: str) -> None:
    with pytest.raises(KtoptError):
        load_tree(path)


def test_something_that_names_no_model_is_an_error() -> None:
    with pytest.raises(KtoptError, match="not int"):
        load_tree(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["mapping", "file", "folder"])
def test_a_config_is_built_however_it_is_given(how: str, tmp_path: Path) -> None:
    path = write(tmp_path, TINY)
    graph = load_tree({"mapping": TINY, "file": path, "folder": str(tmp_path)}[how])
    with torch.device("meta"):
        expected = LlamaForCausalLM._from_config(LlamaConfig.from_dict(TINY))
    assert described(graph) == described_by_torch(expected)
    assert (graph.model_type, graph.architectures, graph.layer_count) == ("llama", ("LlamaForCausalLM",), 2)
    assert graph.by_path["model.layers.1.mlp.up_proj"].tensors == (Tensor("weight", (48, 32), "bfloat16"),)
    assert graph.config == TINY


def test_weights_are_float32_where_the_config_names_no_dtype() -> None:
    config = {key: value for key, value in TINY.items() if key != "torch_dtype"}
    assert load_tree(config).by_path["lm_head"].tensors[0].dtype == "float32"


def test_a_gguf_file_is_known_by_its_magic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF and more")
    asked = []

    class Fake:
        @staticmethod
        def config_from_gguf(path: Path) -> dict[str, Any]:
            asked.append(path)
            return dict(TINY)

    monkeypatch.setitem(sys.modules, "ktopt.weights.gguf_config", Fake)
    by_file, by_folder = load_tree(tmp_path / "model.gguf"), load_tree(tmp_path)
    assert asked == [tmp_path / "model.gguf"] * 2
    assert by_file.digest == by_folder.digest == load_tree(TINY).digest


def test_a_shipped_models_own_config_needs_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ktopt.trees, "build_meta_model", lambda *_: pytest.fail("built"))
    if installed("transformers") != script().committed()["kimi-k2"]["transformers"]:
        pytest.skip("the trees were built by another transformers version")
    config = model_config("kimi-k2")
    config.update(transformers_version="9.9", auto_map={"AutoModel": "code.py"}, quantization_config={"quant_method": "fp8"})
    graph = load_tree(write(tmp_path, config))
    assert graph.digest == load_tree("kimi-k2").digest
    assert graph.name == str(tmp_path / "config.json")


def test_a_tree_is_built_once_and_then_read_from_the_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tree(TINY)
    assert len(list(cache_folder.iterdir())) == 1
    monkeypatch.setattr(ktopt.trees, "build_meta_model", lambda *_: pytest.fail("built a second time"))
    assert load_tree(TINY).modules == first.modules
    with pytest.raises(BaseException, match="built a second time"):
        load_tree({**TINY, "hidden_size": 64})


@pytest.mark.parametrize("damage", [b"", b"not gzip", None])
def test_a_damaged_cache_is_built_anew(damage: bytes | None, cache_folder: Path) -> None:
    first = load_tree(TINY)
    (file,) = cache_folder.iterdir()
    file.write_bytes(file.read_bytes()[:-20] if damage is None else damage)
    assert load_tree(TINY).modules == first.modules
    assert treefile.unpack(file.read_bytes())["key"] == file.name.removesuffix(".json.gz")


def test_a_cache_file_of_another_config_is_not_believed(cache_folder: Path) -> None:
    load_tree(TINY)
    (file,) = cache_folder.iterdir()
    other = {**TINY, "num_hidden_layers": 3}
    (cache_folder / f"{tree_cache.key_of(other, installed('transformers'))}.json.gz").write_bytes(file.read_bytes())
    assert load_tree(other).layer_count == 3


def test_a_cache_that_can_not_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_tree(TINY).layer_count == 2


HOSTILE = {
    "not JSON": ("{", "not JSON"),
    "nested": ("[" * 200_000, "nested too deeply"),
    "a list": ("[]", "holds an object"),
    "no type": ({"hidden_size": 3}, "no model_type"),
    "type is a number": ({"model_type": 5}, "no model_type"),
    "unknown type": ({**TINY, "model_type": "llama99"}, "no model_type 'llama99'"),
    "layers": ({**TINY, "num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000"),
    "layers inside": ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**6}}, "text_config: num_hidden_layers"),
    "experts": ({**TINY, "model_type": "mixtral", "num_local_experts": 10**6}, "modules"),
    "negative": ({**TINY, "hidden_size": -1}, "hidden_size must be a whole number"),
    "text": ({**TINY, "hidden_size": "big"}, "hidden_size must be a whole number"),
    "true": ({**TINY, "num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
    "dtype": ({**TINY, "dtype": "load"}, "dtype is 'load'"),
    "architectures": ({**TINY, "architectures": 3}, "architectures must be a list"),
    "no code": ({**TINY, "model_type": "smallthinker"}, "runs no code from a model folder"),
    "other routing": ({**model_config("deepseek-v3"), "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_config_is_refused_in_words_within_a_second(case: str, tmp_path: Path) -> None:
    text, message = HOSTILE[case]
    path = write(tmp_path, text)
    start = time.process_time()
    with pytest.raises(KtoptError, match=message) as caught:
        load_tree(path)
    assert time.process_time() - start < 1
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("data", "why"), [(b"", "is empty"), (b"GGML" * 8, "does not begin with GGUF")])
def test_a_file_that_is_called_gguf_and_is_none_is_said_to_be_none(data: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(KtoptError, match=f"not a GGUF file: it {why}"):
        load_tree(path)


@pytest.mark.parametrize("wrong", [{"rms_norm_eps": "small"}, {"num_attention_heads": 0}, {"model_type": "vit"}])
def test_what_transformers_can_not_build_is_an_error_that_says_so(wrong: dict[str, Any]) -> None:
    with pytest.raises(KtoptError, match="transformers can't build"):
        load_tree({**TINY, **wrong})


def test_no_code_and_no_kernel_is_fetched_for_a_config() -> None:
    config = {**TINY, "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "_attn_implementation": "someone/kernel"}
    assert load_tree(config).digest == load_tree(TINY).digest


class Shared(nn.Module):
    """A module with an absent child, one child under two names, and buffers that are and aren't saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False)
        self.absent = None
        self.register_module("nothing", None)
        self.second = self.first
        self.register_buffer("kept", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("dropped", torch.zeros(5), persistent=False)
        self.register_buffer("none", None)


def test_a_module_in_hand_gives_its_tree() -> None:
    graph = graph_from_module(Shared())
    assert [m.path for m in graph] == ["", "first", "second"]
    assert described(graph) == described_by_torch(Shared())
    assert graph.by_path[""].tensors == (Tensor("kept", (4,), "int64", True), Tensor("dropped", (5,), "float32", True))
    assert (graph.name, graph.model_type, graph.config) == ("Shared", "", {})
    assert load_tree(Shared()).modules == graph.modules


def test_experts_that_are_modules_are_numbered() -> None:
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])})])}
    )
    graph = graph_from_module(model)
    assert [(m.path, m.layer, m.expert) for m in graph][-2:] == [("layers.0.experts.0", 0, 0), ("layers.0.experts.1", 0, 1)]
    assert graph.by_path["layers.0.experts"].role == "experts"


def test_a_transformers_model_in_hand_gives_what_its_config_gives() -> None:
    model = LlamaForCausalLM(LlamaConfig.from_dict(TINY)).to(torch.bfloat16)
    graph = load_tree(model)
    built = load_tree(TINY)
    assert graph.digest == built.digest
    assert [m.alias_paths for m in graph] == [m.alias_paths for m in built]
    assert graph.config["hidden_size"] == 32
    assert json.loads(json.dumps(graph.config)) == graph.config


def test_a_module_that_contains_itself_is_an_error() -> None:
    module = nn.Module()
    module._modules["inner"] = module
    with pytest.raises(KtoptError, match="contains itself"):
        graph_from_module(module)


def test_a_lazy_module_is_an_error_that_names_its_parameter() -> None:
    with pytest.raises(KtoptError, match=r"LazyLinear\.weight"):
        graph_from_module(nn.LazyLinear(3))


def test_a_tree_survives_packing() -> None:
    model = nn.ModuleDict({"07": nn.ReLU(), "7": nn.ReLU(), "8": nn.ReLU(), "x": nn.ReLU(), "9": nn.Linear(1, 1), "10": nn.ReLU()})
    rows = ktopt.trees.rows_of(model)
    packed = treefile.pack({"format": treefile.FORMAT, **treefile.encode(rows)})
    assert treefile.decode(treefile.unpack(packed)) == rows


@pytest.mark.parametrize("nodes", [[[0, 0, [["x", 0]]]], [[0, 0, []], [0, 0, [[0, 10**9, 0]]]], [[0, 0, [["x", 5]]]]])
def test_a_damaged_tree_file_is_refused_without_running_away(nodes: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"child|too many"):
        treefile.decode({"classes": [["a.B"]], "tensors": [[]], "nodes": nodes})


def test_every_name_that_others_rely_on_is_known() -> None:
    wanted = (
        "deepseek-v3 deepseek-v2 deepseek-v2-lite moonlight-16b-a3b kimi-k2 qwen2-57b-a14b qwen3-30b-a3b qwen3-235b-a22b "
        "qwen3-next-80b-a3b mixtral-8x7b mixtral-8x22b glm-4.5-air glm-4.5 llama-3.1-8b llama-3.1-70b llama-2-70b qwen2.5-7b "
        "internlm2.5-7b-1m gemma-3-270m smollm2-135m deepseek-r1"
    )
    assert set(known_models()) == set(wanted.split())


def test_the_trees_know_which_parameters_are_one_tensor() -> None:
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    for name in ("gemma-3-270m", "smollm2-135m"):
        assert load_tree(name).tied == tied
    assert load_tree("llama-3.1-8b").tied == {}
    assert "tie_word_embeddings" not in model_config("gemma-3-270m")


@pytest.mark.parametrize("kind", ["gemma3_text", "llama", "qwen2"])
def test_a_config_that_leaves_the_tie_to_its_class_is_as_transformers_makes_it(kind: str) -> None:
    config = {**TINY, "model_type": kind, "head_dim": 8}
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(config))
    one_tensor = made.lm_head.weight is made.model.embed_tokens.weight
    for _ in range(2):  # built, then from the cache
        graph = load_tree(config)
        assert bool(graph.tied) == one_tensor
        assert sum(t.numel for m in graph for t in graph.own_parameters(m)) == sum(p.numel() for p in made.parameters())


def test_a_module_in_hand_is_tied_where_its_tensors_are_one() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.Linear(4, 5, bias=False))
    assert graph_from_module(model).tied == {}
    model[1].weight = model[0].weight
    assert graph_from_module(model).tied == {"1.weight": "0.weight"}
