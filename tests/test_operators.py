"""What operators declare: names, kwargs, ops, and what became of each class of KTransformers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ktopt.graph import Module, ModuleClass, Tensor
from ktopt.operator import OperatorSpec, build_config, field_types, without_effect
from ktopt.placement import DEVICE_KINDS
from ktopt.registry import catalogue, find, specs, suggest

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
RULES = SHARED / "cases" / "upstream_rules"
TABLE = SHARED / "facts" / "upstream_rules_table.md"
needs_shared = pytest.mark.skipif(not TABLE.is_file(), reason="KTransformers' rule files are not beside this checkout")

UPSTREAM_FORWARDS = [
    "KTransformersLinear", "KTransformersExperts", "KTransformersExpertsV2", "KGlm4Experts", "KSmallthinkerExperts",
    "KDeepseekV2MoE", "KDeepseekV3MoE", "KDeepseekV3MoEV2", "KQwen2MoeSparseMoeBlock", "KQwen2MoeSparseMoeBlockV2",
    "KQwen3MoeSparseMoeBlock", "KQwen3MoeSparseMoeBlockV2", "KQwen3NextSparseMoeBlockV2", "KMistralSparseMoEBlock", "KGlm4MoeMoE",
    "KSmallthinkerMoeBlock", "KMoEGateQwen2Moe", "KMoEGateIPEXLLM", "RMSNorm", "KQwen2MoeRMSNorm", "KQwen3MoeRMSNorm",
    "KQwen3NextRMSNorm", "KSmallthinkerRMSNorm", "KGlm4MoeRMSNorm", "DeepseekV3RMSNormTorch", "KDeepseekRMSNormIPEXLLM",
    "kDeepseekV3MLP", "KQwen2MoeMLP", "KSmallthinkerDenseMlpBlock", "KGlm4MoeMLP", "RotaryEmbeddingV3", "RotaryEmbeddingV4",
    "YarnRotaryEmbeddingV3", "KDeepseekV2Attention", "KLlamaAttention", "KQwen3MoeAttentionIPEXLLM", "flashinfer_attn",
    "deepseek_torch_attn", "KQwen2MoeAttention", "KQwen3MoeAttention", "KGlm4MoeAttention", "KQwen3NextAttention",
    "KQwen3NextGatedDeltaNet", "KSmallthinkerAttention", "KDeepseekV2Model", "KQwen2MoeModel", "KQwen3MoeModel", "KLlamaModel",
    "KTransformersLinearW8A8A2", "KTransformersExpertsW8A8", "KExpertsCPUW8A8", "KDeepseekV3MoEW8A8",
    "KQwen3MoeSparseMoeBlockW8A8", "KDeepseekV3GateA2", "KDeepseekV3RMSNormW8A8", "KQwen3MoeRMSNormW8A8",
    "KDeepseekV3MLPW8A8A2V1", "KDeepseekV3MLPW8A8A2V2", "KQwen3MoeMLPW8A8A2", "KDeepseekV2AttentionW8A8A2",
    "KDeepseekV2AttentionW8A8A2Serve", "KQwen3MoeAttentionW8A8A2Serve",
]  # fmt: skip
"""KTransformers' classes that define a forward of their own, read from its sources."""


SHIPPED = [spec for spec in specs() if spec.name in catalogue()]


def operator(name: str) -> OperatorSpec:
    found = find(name)
    assert found is not None, name
    return found


def module(cls: str, path: str = "model.layers.0.part", **shapes: tuple[int, ...]) -> Module:
    mro = (cls, "torch.nn.modules.module.Module")
    return Module(path, ModuleClass(cls, mro), tuple(Tensor(n, s, "float32") for n, s in shapes.items()), 0, -1, 1)


def problems(name: str, **kwargs: object) -> list[tuple[str, str, str]]:
    return [(p.kind, p.key, p.message) for p in build_config(operator(name), kwargs)[1]]


def table_names() -> list[str]:
    """Every class of the table of KTransformers' rule files, dotted."""
    rows = re.findall(r"^\| `…([\w.]+)` \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    return sorted({f"ktransformers.operators.{row.lstrip('.')}" for row in rows})


# names


@needs_shared
def test_every_name_of_upstreams_rule_files_resolves_dotted_and_short() -> None:
    names = table_names()
    assert len(names) > 60
    for dotted in names:
        assert find(dotted) is operator(dotted.rpartition(".")[2]), dotted


@needs_shared
def test_every_replacement_in_real_rule_files_takes_its_kwargs_but_the_one_that_upstream_fails_on_too() -> None:
    wrong, count = [], 0
    for path in sorted(RULES.rglob("*.yaml")):
        for rule in yaml.safe_load(path.read_text(encoding="utf-8")):
            spec = find(rule["replace"]["class"])
            assert spec is not None, (path.name, rule["replace"]["class"])
            found = build_config(spec, rule["replace"].get("kwargs") or {})[1]
            wrong += [(path.name, p.message) for p in found if p.kind not in ("ignored", "idle")]
            count += 1
    assert count > 300
    assert wrong == [("Internlm2_5-7b-Chat-1m.yaml", "KLlamaModel takes no `prefill_device`; did you mean `device`?")]


def test_names_are_found_without_importing_torch_or_what_is_not_asked_for() -> None:
    code = (
        "import sys; from ktopt.registry import find; assert find('ktransformers.operators.gate.KMoEGate').name == 'KMoEGate';"
        "print(sorted(m for m in sys.modules if m.startswith('ktopt.operators.') or m in ('torch', 'transformers', 'numpy')))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['ktopt.operators.linear', 'ktopt.operators.names', 'ktopt.operators.router']"


def test_an_unknown_name_gets_the_nearest_one() -> None:
    assert find("ktransformers.operators.gate.KMoEGateDeepSeekV3") is None
    assert suggest("KTransformerLinear") == "KTransformersLinear"


def test_the_catalogue_holds_every_name_of_every_operator() -> None:
    assert set(catalogue()) >= {name for spec in SHIPPED for name in (spec.name, *spec.aliases)}


# kwargs


@pytest.mark.parametrize(
    ("name", "kwargs", "kind", "key"),
    [
        ("KTransformersExperts", {"prefill_op": None}, "type", "prefill_op"),
        ("KTransformersExperts", {"prefill_op": "None"}, "value", "prefill_op"),
        ("KTransformersExperts", {"generate_op": "MLPCPUExperts"}, "value", "generate_op"),
        ("KTransformersExperts", {"backend": "AMXInt4"}, "type", "backend"),
        ("KTransformersLinear", {"generate_device": "gpu"}, "value", "generate_device"),
        ("KDeepseekV2Attention", {"generate_devise": "cuda:1"}, "unknown", "generate_devise"),
        ("KDeepseekV2Attention", {"absorb_for_prefil": True}, "unknown", "absorb_for_prefil"),
        ("KDeepseekV2Model", {"prefill_device": "cuda"}, "unknown", "prefill_device"),
        ("KDeepseekV2Model", {"transfer_map": {"30": "cuda:1"}}, "type", "transfer_map"),
        ("KDeepseekV2Model", {"transfer_map": {30: "gpu"}}, "value", "transfer_map"),
        ("default", {"prefill_device": "cuda:0"}, "missing", "generate_device"),
    ],
)
def test_a_wrong_kwarg_is_named(name: str, kwargs: dict[str, object], kind: str, key: str) -> None:
    assert [(k, p) for k, p, _ in problems(name, **kwargs)] == [(kind, key)]


def test_a_wrong_value_comes_with_what_is_right() -> None:
    (unknown,) = problems("KDeepseekV2Attention", generate_devise="cuda:1")
    assert unknown[2].endswith("did you mean `generate_device`?")
    (null,) = problems("KTransformersExperts", prefill_op=None)
    assert "must be the name of an op of KTransformersExperts (KExpertsTorch, " in null[2]
    assert null[2].endswith("not null")
    (op,) = problems("KTransformersExperts", generate_op="MLPCPUExperts")
    assert op[2].endswith("(did you mean KExpertsCPU?)")
    (near,) = problems("KTransformersLinear", generate_op="KLinearMarln")
    assert near[2].endswith("(did you mean KLinearMarlin?)")


@pytest.mark.parametrize("name", ["KTransformersExpertsV2", "KGlm4Experts", "KSmallthinkerExperts"])
def test_the_servers_experts_take_none_for_no_prefill_op(name: str) -> None:
    assert problems(name, prefill_op="None") == []
    assert [p[0] for p in problems(name, prefill_op=None)] == ["type"]


@pytest.mark.parametrize(
    ("name", "spelling", "value", "field"),
    [
        ("KDeepseekV2Attention", "chunck_size", 256, "chunk_size"),
        ("KDeepseekV2Attention", "chunk_size", 256, "chunk_size"),
        ("KDeepseekV2Model", "per_layer_prefill_intput_threshold", 0, "per_layer_prefill_input_threshold"),
        ("KDeepseekV2Model", "per_layer_prefill_input_threshold", 0, "per_layer_prefill_input_threshold"),
    ],
)
def test_upstreams_misspellings_and_the_right_names_mean_one_option(name: str, spelling: str, value: int, field: str) -> None:
    config, found = build_config(operator(name), {spelling: value})
    assert [p.key for p in found if p.kind != "ignored"] == []
    assert config is not None
    assert config.to_kwargs()[field] == value


def test_devices_are_kept_in_one_spelling() -> None:
    config, _ = build_config(operator("KTransformersExperts"), {"generate_device": "cuda", "out_device": "cuda:01"})
    assert config is not None
    assert (config.to_kwargs()["generate_device"], config.to_kwargs()["out_device"]) == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("flashinfer_attn", {"absorb_for_prefill": False}),
        ("KDeepseekV2Model", {"per_layer_prefill_intput_threshold": 1}),
        ("KQwen3MoeRMSNormW8A8", {"dump_enable": False}),
        ("KTransformersLinear", {"out_device": "cuda:0"}),
    ],
)
def test_a_kwarg_without_effect_is_said_and_accepted(name: str, kwargs: dict[str, object]) -> None:
    config, found = build_config(operator(name), kwargs)
    assert config is not None
    assert [p.kind for p in found] == ["ignored"]


def test_a_plan_is_told_of_layer_wise_prefill_only_where_it_is_asked_for() -> None:
    model = operator("KDeepseekV2Model")
    assert without_effect(model.config()) == []
    assert "layer-wise prefill is not in this version" in model.says(model.config(per_layer_prefill_input_threshold=8))


@needs_shared
def test_defaults_are_upstreams() -> None:
    linear, experts = operator("KTransformersLinear").config(), operator("KTransformersExperts").config()
    assert {k: v for k, v in linear.to_kwargs().items() if not k.endswith("device")} == {
        "generate_op": "KLinearMarlin",
        "prefill_op": "KLinearTorch",
        "num_bits": 4,
        "group_size": 64,
        "act_order": False,
        "is_k_full": True,
        "block_size": 128,
        "stride": 16,
        "group_max_len": 1024,
        "precision": "sym_int4",
    }
    assert (experts.to_kwargs()["generate_op"], experts.to_kwargs()["prefill_op"]) == ("KExpertsCPU", "KExpertsTorch")
    assert operator("flashinfer_attn").config().to_kwargs()["chunk_size"] == 1000
    assert operator("KDeepseekV2Attention").config().to_kwargs()["absorb_for_prefill"] is False


# ops


@pytest.mark.parametrize("spec", [s for s in SHIPPED if s.ops], ids=lambda s: s.name)
def test_every_op_that_is_not_here_ends_in_one_that_runs_anywhere(spec: OperatorSpec) -> None:
    for op in spec.ops.values():
        seen = {op.name}
        while op.needs or op.devices != DEVICE_KINDS:
            op = spec.ops[op.counterpart]
            assert op.name not in seen
            seen.add(op.name)
        assert op.devices == DEVICE_KINDS


@pytest.mark.parametrize("spec", [s for s in SHIPPED if s.ops], ids=lambda s: s.name)
def test_default_ops_are_ops(spec: OperatorSpec) -> None:
    kwargs = spec.config().to_kwargs()
    assert {kwargs["generate_op"], kwargs.get("prefill_op", kwargs["generate_op"])} <= set(spec.ops)


def test_gpu_ops_do_not_run_on_the_cpu() -> None:
    ops = operator("KTransformersLinear").ops
    assert [name for name, op in ops.items() if "cpu" in op.devices] == ["KLinearTorch", "KLinearCPUInfer"]


# what became of upstream's classes


@pytest.mark.parametrize("spec", SHIPPED, ids=lambda s: s.name)
def test_an_operator_says_what_it_does_and_what_upstreams_class_did(spec: OperatorSpec) -> None:
    assert spec.summary
    assert spec.upstream
    assert all(field_types(spec.config))


@pytest.mark.parametrize("name", UPSTREAM_FORWARDS)
def test_a_class_whose_forward_upstream_changed_is_real_here_or_has_a_reason(name: str) -> None:
    spec = operator(name)
    assert spec.forward_changed
    assert spec.implementation or spec.reason


def test_only_classes_whose_forward_upstream_changed_claim_that() -> None:
    assert {s.name for s in SHIPPED if s.forward_changed} == set(UPSTREAM_FORWARDS)


@pytest.mark.parametrize(
    "spec", [s for s in SHIPPED if any(".ascend." in a or "IPEXLLM" in a for a in s.aliases)], ids=lambda s: s.name
)
def test_names_for_npus_and_xpus_say_what_is_lost(spec: OperatorSpec) -> None:
    assert spec.lost


# what fits


@pytest.mark.parametrize(
    ("name", "cls", "fits"),
    [
        ("KTransformersLinear", "transformers.models.mixtral.modeling_mixtral.MixtralTopKRouter", True),
        ("KTransformersLinear", "transformers.models.mixtral.modeling_mixtral.MixtralRMSNorm", False),
        ("KTransformersExperts", "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts", True),
        ("KDeepseekV3MoE", "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Moe", True),
        ("KMoEGate", "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter", True),
        ("RotaryEmbedding", "transformers.models.llama.modeling_llama.LlamaRotaryEmbedding", True),
        ("kDeepseekV3MLP", "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MLP", True),
        ("KDeepseekV2Model", "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Model", True),
        ("KQwen3NextGatedDeltaNet", "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet", True),
        ("default", "torch.nn.modules.sparse.Embedding", True),
    ],
)
def test_an_operator_fits_the_modules_of_its_role(name: str, cls: str, fits: bool) -> None:
    assert operator(name).fits(module(cls)) is fits


def test_latent_attention_refuses_attention_without_kv_b_proj() -> None:
    spec = operator("KDeepseekV2Attention")
    latent = module("transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention")
    grouped = module("transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeAttention")
    assert spec.refuses(latent, spec.config()) is None
    assert "has no kv_b_proj" in (spec.refuses(grouped, spec.config()) or "")


def test_latent_attention_is_known_by_every_class_of_transformers_that_has_it() -> None:
    import ast
    import importlib.util

    from ktopt.operators.attention import LATENT_ATTENTION

    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    found = set()
    for source in (Path(spec.origin).parent / "models").glob("*/modeling_*.py"):
        text = source.read_text(encoding="utf-8")
        if "self.kv_b_proj" in text:
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and "self.kv_b_proj = " in (ast.get_source_segment(text, node) or ""):
                    found.add(node.name)
    assert found
    assert found <= LATENT_ATTENTION


def test_experts_with_biases_or_transposed_weights_are_refused_before_anything_is_built() -> None:
    spec = operator("KTransformersExperts")
    right = module("x.MixtralExperts", gate_up_proj=(8, 96, 32), down_proj=(8, 32, 48))
    biased = module(
        "x.GptOssExperts", gate_up_proj=(8, 32, 96), down_proj=(8, 48, 32), gate_up_proj_bias=(8, 96), down_proj_bias=(8, 32)
    )
    transposed = module("x.Llama4TextExperts", gate_up_proj=(8, 32, 96), down_proj=(8, 48, 32))
    assert spec.refuses(right, spec.config()) is None
    assert "only gate_up_proj and down_proj" in (spec.refuses(biased, spec.config()) or "")
    assert "holds its weights transposed" in (spec.refuses(transposed, spec.config()) or "")


def test_an_op_named_as_an_operator_replaces_nothing() -> None:
    spec = operator("KExpertsCPUW8A8")
    assert "not an operator" in (spec.refuses(module("x.MixtralExperts"), spec.config()) or "")


def test_bytes_are_the_own_tensors_at_the_plans_dtype() -> None:
    spec = operator("KTransformersExperts")
    experts = module("x.MixtralExperts", gate_up_proj=(8, 96, 32), down_proj=(8, 32, 48))
    assert spec.footprint(experts, spec.config(), "bfloat16").weight_bytes == 2 * (8 * 96 * 32 + 8 * 32 * 48)
