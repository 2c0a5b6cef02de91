"""What runs in place of a module, compared with torch's and transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ktopt.diagnostics import KtoptError
from ktopt.graph import Module, ModuleClass, Tensor
from ktopt.implementation import BuildContext
from ktopt.operators.modules.experts import KTransformersExperts, grouped_product
from ktopt.operators.modules.linear import KTransformersLinear
from ktopt.operators.modules.rope import PlacedRotary
from ktopt.plan import Step
from ktopt.registry import find, implementation
from ktopt.weights import StoredTensor


class Held:
    """Weights of a module in hand, as apply hands them to a build."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.state = {f"{path}.{name}": tensor for name, tensor in module.state_dict().items()}

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def stored(self, name: str) -> StoredTensor:
        raise NotImplementedError

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        return self.state[name].to(dtype=dtype, device=device, copy=True)


def tree_module(module: nn.Module, path: str) -> Module:
    """The torch-free view of a module."""
    mro = tuple(f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__[:-1])
    own = tuple(
        Tensor(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in module.named_parameters(recurse=False)
    )
    return Module(path, ModuleClass(mro[0], mro), own, 0, -1, 1)


def context(
    module: nn.Module, operator: str, dtype: torch.dtype = torch.float32, replicas: Any = (), **kwargs: Any
) -> BuildContext:
    path = kwargs.pop("path", "model.layers.0.part")
    spec = find(operator)
    assert spec is not None
    config = spec.config(**kwargs)
    row = tree_module(module, path)
    name = str(dtype).removeprefix("torch.")
    step = Step(
        path, row.cls.name, row.role, operator, config.to_kwargs(), "cpu", "cpu", name, weight_bytes=0, replicas=tuple(replicas)
    )
    return BuildContext(step, config, row, torch.device("cpu"), dtype, getattr(module, "config", None), Held(module, path))


def replaced(original: nn.Module, operator: str, dtype: torch.dtype = torch.float32, **kwargs: Any) -> nn.Module:
    """The operator's module in the original's place, with the original's weights, as apply makes and loads it."""
    made_for = context(original, operator, dtype, **kwargs)
    spec = find(operator)
    assert spec is not None
    with torch.device("meta"):
        made: nn.Module = implementation(spec).build(original, made_for)
    if hasattr(made, "load_tensors"):
        made.load_tensors(made_for)
        return made
    for name, parameter in list(made.named_parameters()):
        owner, _, last = name.rpartition(".")
        value = made_for.tensors.read(made_for.name(name), parameter.dtype)  # type: ignore[union-attr]
        setattr(made.get_submodule(owner), last, nn.Parameter(value, requires_grad=False))
    return made


# linear


@pytest.mark.parametrize("bias", [True, False])
def test_a_float32_linear_gives_torchs_result_bit_for_bit(bias: bool) -> None:
    torch.manual_seed(0)
    original = nn.Linear(48, 32, bias=bias)
    made = replaced(original, "KTransformersLinear", generate_op="KLinearTorch")
    x = torch.randn(2, 5, 48)
    assert type(made) is KTransformersLinear
    assert torch.equal(made(x), original(x))


def test_a_bfloat16_linear_takes_and_returns_the_dtype_of_its_input() -> None:
    torch.manual_seed(0)
    original = nn.Linear(48, 32)
    made = replaced(original, "KTransformersLinear", torch.bfloat16, generate_op="KLinearTorch")
    x = torch.randn(3, 48)
    expected = original.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert made.weight.dtype is torch.bfloat16
    assert torch.equal(made(x), expected.float())
    assert made(x.to(torch.bfloat16)).dtype is torch.bfloat16


def test_a_linear_keeps_the_attributes_that_model_code_reads() -> None:
    made = replaced(nn.Linear(48, 32), "KTransformersLinear", generate_op="KLinearTorch")
    assert (made.in_features, made.out_features) == (48, 32)
    assert isinstance(made, nn.Linear)
    assert made.bias is not None
    assert not made.weight.requires_grad


def test_a_tied_weight_can_be_shared_with_an_embedding() -> None:
    embedding = nn.Embedding(32, 48)
    made = replaced(nn.Linear(48, 32, bias=False), "KTransformersLinear", generate_op="KLinearTorch")
    made.weight = embedding.weight
    x = torch.randn(1, 48)
    assert torch.equal(made(x), x @ embedding.weight.T)


def test_a_linear_that_computes_more_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    with pytest.raises(KtoptError, match=r"model\.layers\.0\.part is a Scaled, which computes more than a matrix product"):
        replaced(Scaled(4, 4), "KTransformersLinear", generate_op="KLinearTorch")


def test_an_op_without_a_kernel_is_refused_unless_the_plan_replaced_it() -> None:
    original = nn.Linear(4, 4)
    with pytest.raises(KtoptError, match="KLinearIPEXLLM, which this version can't run; it can run KLinearTorch"):
        replaced(original, "KTransformersLinear", generate_op="KLinearIPEXLLM")
    asked = context(original, "KTransformersLinear", generate_op="KLinearIPEXLLM")
    settled = BuildContext(
        asked.step._replace(runs={"KLinearIPEXLLM": ("KLinearTorch", "no kernel")}),
        asked.config,
        asked.module,
        asked.device,
        asked.dtype,
        None,
    )
    assert isinstance(KTransformersLinear.build(original, settled), KTransformersLinear)


# experts


def tiny(name: str) -> tuple[Any, Any]:
    """A tiny random transformers model with experts, and its first experts module."""
    import transformers as tf

    common = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_experts_per_tok": 3, "pad_token_id": 0,
    }  # fmt: skip
    latent = {
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2,
        "topk_group": 2, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 16,
    }  # fmt: skip
    config = {
        "mixtral": lambda: tf.MixtralConfig(**common, num_local_experts=8),
        "qwen2_moe": lambda: tf.Qwen2MoeConfig(
            **common, num_experts=8, moe_intermediate_size=16, shared_expert_intermediate_size=16
        ),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(**common, num_experts=8, moe_intermediate_size=16, head_dim=16),
        "deepseek_v2": lambda: tf.DeepseekV2Config(**common, **latent),
        "deepseek_v3": lambda: tf.DeepseekV3Config(**common, **latent),
        "glm4_moe": lambda: tf.Glm4MoeConfig(
            **common, n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=1, head_dim=16
        ),
    }[name]()
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    path, experts = next((n, m) for n, m in model.named_modules() if type(m).__name__.endswith("Experts"))
    return model, (path, experts)


MODELS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe")


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_experts_agree_with_transformers_eager_experts(name: str) -> None:
    _, (_, original) = tiny(name)
    made = replaced(original, "KTransformersExperts", generate_op="KExpertsTorch")
    x, index = torch.randn(7, 32), torch.stack([torch.randperm(8)[:3] for _ in range(7)])
    weights = torch.rand(7, 3)
    torch.testing.assert_close(made(x, index, weights), original(x, index, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_answers_alike_with_its_experts_replaced(name: str) -> None:
    model, (path, _) = tiny(name)
    ids = torch.randint(1, 64, (2, 9))
    expected = model(ids).logits
    parent, _, last = path.rpartition(".")
    setattr(
        model.get_submodule(parent), last, replaced(model.get_submodule(path), "KTransformersExperts", generate_op="KExpertsTorch")
    )
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_experts_equal_transformers_grouped_products_bit_for_bit() -> None:
    from transformers.integrations.moe import grouped_mm_experts_forward

    _, (_, original) = tiny("qwen3_moe")
    made = replaced(original, "KTransformersExperts", generate_op="KExpertsTorch")
    x, index, weights = torch.randn(7, 32), torch.randint(0, 8, (7, 3)), torch.rand(7, 3)
    assert torch.equal(made(x, index, weights), grouped_mm_experts_forward(original, x, index, weights))


@pytest.mark.parametrize(("tokens", "used"), [(1, [5]), (1, [0, 7, 3]), (6, [2, 4, 6]), (2, [7, 0])])
@torch.no_grad()
def test_experts_without_tokens_and_single_tokens_are_right(tokens: int, used: list[int]) -> None:
    _, (_, original) = tiny("mixtral")
    made = replaced(original, "KTransformersExperts", generate_op="KExpertsTorch")
    x, index = torch.randn(tokens, 32), torch.tensor([used] * tokens)
    weights = torch.rand(tokens, len(used))
    torch.testing.assert_close(made(x, index, weights), original(x, index, weights), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_no_tokens_give_no_rows() -> None:
    _, (_, original) = tiny("mixtral")
    made = replaced(original, "KTransformersExperts", generate_op="KExpertsTorch")
    assert made(torch.randn(0, 32), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)).shape == (0, 32)


@torch.no_grad()
def test_bfloat16_experts_are_as_near_to_float32_as_transformers_are() -> None:
    _, (_, original) = tiny("qwen3_moe")
    exact = replaced(original, "KTransformersExperts", generate_op="KExpertsTorch")
    made = replaced(original, "KTransformersExperts", torch.bfloat16, generate_op="KExpertsTorch")
    theirs = original.to(torch.bfloat16)
    x, index, weights = (
        torch.randn(9, 32, dtype=torch.bfloat16),
        torch.randint(0, 8, (9, 3)),
        torch.rand(9, 3, dtype=torch.bfloat16),
    )
    truth = exact(x.float(), index, weights.float())
    ours, reference = made(x, index, weights), theirs(x, index, weights)
    assert ours.dtype is torch.bfloat16
    assert (ours - truth).norm() <= 1.05 * (reference - truth).norm()


@pytest.mark.parametrize("sizes", [(6, 10), (8, 16)])
def test_the_grouped_product_is_each_experts_own(sizes: tuple[int, int]) -> None:
    hidden, inner = sizes
    rows, weight = torch.randn(5, hidden), torch.randn(4, inner, hidden)
    result = grouped_product(rows, weight, torch.tensor([2, 2, 4, 5], dtype=torch.int32))
    expected = torch.cat([rows[:2] @ weight[0].T, rows[2:4] @ weight[2].T, rows[4:] @ weight[3].T])
    torch.testing.assert_close(result, expected)


def test_the_result_goes_to_the_out_device() -> None:
    _, (_, original) = tiny("mixtral")
    made = replaced(original, "KTransformersExperts", generate_op="KExpertsTorch", out_device="meta")
    assert made(torch.randn(2, 32), torch.zeros(2, 2, dtype=torch.long), torch.rand(2, 2)).device.type == "meta"


def experts_of(config: Any) -> nn.Module:
    import transformers as tf

    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    return next(m for m in model.modules() if type(m).__name__.endswith("Experts"))


def test_experts_with_biases_and_gates_of_their_own_are_refused() -> None:
    import transformers as tf

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    gpt_oss = experts_of(tf.GptOssConfig(**sizes, num_key_value_heads=2, num_local_experts=4, head_dim=16))
    with pytest.raises(KtoptError, match=r"model\.layers\.0\.part.*GptOssExperts\) holds down_proj, down_proj_bias"):
        replaced(gpt_oss, "KTransformersExperts", generate_op="KExpertsTorch")

    mixtral = experts_of(tf.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))

    class Clamped(type(mixtral)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up.clamp(max=1)

    mixtral.__class__ = Clamped
    with pytest.raises(KtoptError, match="Clamped has a gate of its own"):
        replaced(mixtral, "KTransformersExperts", generate_op="KExpertsTorch")


def test_experts_in_a_list_are_left_to_the_block_that_calls_them_one_by_one() -> None:
    listed = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    made_for = context(listed, "KTransformersExperts", path="model.layers.0.mlp.experts")
    assert KTransformersExperts.build(listed, made_for) is listed


# routers


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_a_router_under_a_linear_rule_keeps_its_own_forward(name: str) -> None:
    model, _ = tiny(name)
    path, router = next((n, m) for n, m in model.named_modules() if n.endswith("mlp.gate"))
    assert tree_module(router, path).role == "router"
    assert replaced(router, "KTransformersLinear", generate_op="KLinearTorch") is router


# rotary embeddings


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_a_rotary_embedding_gives_transformers_angles_from_meta(name: str) -> None:
    import transformers as tf

    model, _ = tiny(name)
    expected = model.model.rotary_emb
    with torch.device("meta"):
        on_meta = tf.AutoModelForCausalLM.from_config(model.config).model.rotary_emb
    made = replaced(on_meta, "RotaryEmbedding")
    x, positions = torch.randn(1, 4, 32), torch.arange(100, 104)[None]
    assert isinstance(made, PlacedRotary)
    for ours, theirs in zip(made(x, positions), expected(x, positions), strict=True):
        assert torch.equal(ours, theirs)


def test_a_rotary_embedding_uses_the_copy_on_its_inputs_device() -> None:
    model, _ = tiny("mixtral")
    made = replaced(model.model.rotary_emb, "RotaryEmbedding", replicas=("meta",))
    assert [copy.inv_freq.device.type for copy in made.copies] == ["cpu", "meta"]
    cos, _ = made(torch.empty(1, 2, 32, device="meta"), torch.empty(1, 2, device="meta"))
    assert cos.device.type == "meta"


def test_a_rotary_embedding_without_config_is_refused() -> None:
    with pytest.raises(KtoptError, match="Linear carries no config to make its frequencies from"):
        replaced(nn.Linear(2, 2), "RotaryEmbedding")


# devices that this machine may lack


def test_experts_on_a_device_that_is_not_here_run_under_fake_tensors_and_miss_a_transfer() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        experts = KTransformersExperts(8, 32, 16, nn.SiLU(), None, device="cuda:1", dtype=torch.float32)
        x, weights = torch.empty(5, 32, device="cuda:1"), torch.empty(5, 3, device="cuda:1")
        index = torch.zeros(5, 3, dtype=torch.long, device="cuda:1")
        assert experts(x, index, weights).device == torch.device("cuda:1")
        with pytest.raises(RuntimeError, match="same device"):
            experts(torch.empty(5, 32), index, weights)
