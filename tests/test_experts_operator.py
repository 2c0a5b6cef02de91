"""KExpertsCPU: the experts of transformers' MoE models on stored weights and on weights in memory, by the CPU kernels."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from apply_fixtures import PROMPT, hand_plan, source_of
from gguf_fixtures import make_folder, make_gguf, tiny_model
from quantized import random_blocks
from torch import nn

from ktopt.applying import apply_plan
from ktopt.diagnostics import KtoptError
from ktopt.graph import Module, ModuleClass, Tensor
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu, reference
from ktopt.operators.modules import experts as experts_module
from ktopt.operators.modules.experts import KTransformersExperts
from ktopt.plan import Step
from ktopt.registry import find
from ktopt.weights.open import open_weights

if not cpu.available()[0]:
    pytest.skip(cpu.available()[1], allow_module_level=True)

from ktopt.operators.modules.experts_cpu import FEW_TOKENS, KExpertsCPU

E, H, INNER = 7, 256, 512
PATH = "model.layers.0.mlp.experts"
KINDS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small products only wait for threads
    yield
    torch.set_num_threads(threads)


def original(kind: str = "qwen3_moe", **changes: Any) -> Any:
    """transformers' own experts of these sizes, on the meta device."""
    import transformers
    from gguf_fixtures import tiny_config

    sizes = {
        "hidden_size": H,
        "moe_intermediate_size": INNER,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
    }
    counts = {"num_experts": E, "num_local_experts": E, "n_routed_experts": E, "n_group": 1, "topk_group": 1}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(kind, **{**sizes, **counts, **changes}))
    return next(m for m in model.modules() if type(m).__name__.endswith("Experts"))


class Stored:
    """A source that has gate and up in one type, down in another, as GGUF files have them; `weights` are the same in float32."""

    def __init__(self, gate_up: str, down: str) -> None:
        rng = np.random.default_rng(0)
        scales = (rng.standard_normal(64) * 0.02).astype(np.float16)
        self.parts: dict[str, list[Any]] = {"gate_up_proj": [], "down_proj": []}
        numbers = []
        for name, kind, rows, columns in (
            ("gate_up_proj", gate_up, INNER, H),
            ("gate_up_proj", gate_up, INNER, H),
            ("down_proj", down, H, INNER),
        ):
            data = random_blocks(kind, E * rows, columns, rng, scales)
            self.parts[name].append((kind, (E, rows, columns), data))
            numbers.append(reference.weight(kind, data, columns).view(E, rows, columns))
        self.weights = {"gate_up_proj": torch.cat(numbers[:2], dim=1), "down_proj": numbers[2]}

    def raw(self, name: str) -> list[Any]:
        return self.parts[name.removeprefix(f"{PATH}.")]

    def read(self, name: str, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        return self.weights[name.removeprefix(f"{PATH}.")].to(dtype, copy=True)


def context(module: nn.Module, tensors: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> BuildContext:
    config = find("KTransformersExperts").config(**kwargs)  # type: ignore[union-attr]
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    own = tuple(Tensor(n, tuple(p.shape), "float32") for n, p in module.named_parameters(recurse=False))
    row = Module(PATH, ModuleClass(name, (name,)), own, 0, -1, 1)
    step = Step(
        PATH, name, "experts", "KTransformersExperts", config.to_kwargs(), "cpu", "cpu", str(dtype).removeprefix("torch."), 0
    )
    return BuildContext(step, config, row, torch.device("cpu"), dtype, None, tensors)


def made(tensors: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    """KExpertsCPU in the place of transformers' experts, loaded."""
    theirs = original()
    built_for = context(theirs, tensors, dtype, **kwargs)
    with torch.device("meta"):
        experts: Any = KTransformersExperts.build(theirs, built_for)
    with torch.no_grad():
        experts.load_tensors(built_for)
    return experts


def calls(tokens: int, chosen: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, H), torch.stack([torch.randperm(E)[:chosen] for _ in range(tokens)]), torch.rand(tokens, chosen)


def theirs(weights: dict[str, torch.Tensor], kind: str = "qwen3_moe") -> Any:
    """transformers' experts on these weights, computed one by one."""
    experts = original(kind).to_empty(device="cpu")
    experts.config._experts_implementation = "eager"
    experts.load_state_dict(weights)
    return experts


def close(found: torch.Tensor, expected: torch.Tensor, relative: float = 0.02) -> bool:
    return bool((found.double() - expected.double()).norm() <= relative * expected.double().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 200])
@torch.no_grad()
def test_stored_experts_agree_with_transformers_on_dequantised_weights(kind: str, tokens: int) -> None:
    source = Stored("Q4_K", "Q6_K")
    experts, arguments = made(source), calls(tokens)
    assert type(experts) is KExpertsCPU
    assert close(experts(*arguments), theirs(source.weights, kind)(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, FEW_TOKENS + 1])
@torch.no_grad()
def test_the_result_has_the_inputs_dtype(dtype: torch.dtype, tokens: int) -> None:
    source = Stored("Q8_0", "Q8_0")
    x, index, weights = calls(tokens)
    found = made(source, torch.bfloat16)(x.to(dtype), index.int(), weights.to(dtype))
    assert found.dtype is dtype
    assert close(found, theirs(source.weights)(x, index, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, 40])
@torch.no_grad()
def test_weights_in_memory_are_used_where_they_lie(dtype: torch.dtype, tokens: int) -> None:
    source = Stored("F32", "F32")
    source.weights = {name: weight * 0.05 for name, weight in source.weights.items()}
    experts, arguments = made(source, dtype), calls(tokens)
    assert experts.stored is None
    assert close(experts(*arguments), theirs(source.weights)(*arguments))
    if tokens <= FEW_TOKENS:
        assert experts._seen.gate_up[0].call[1] == experts.gate_up_proj.data_ptr()
        experts.to(torch.float32)
        assert close(experts(*arguments), theirs(source.weights)(*arguments))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["fused", "gate_up", "each", "safetensors"])
@torch.no_grad()
def test_a_model_from_a_file_answers_as_transformers_do(kind: str, how: str, tmp_path: Any) -> None:
    model = tiny_model(kind, moe_intermediate_size=64)
    if how == "safetensors":
        path = make_folder(tmp_path / "hf", model)
    else:
        path = make_gguf(tmp_path / "m.gguf", model, "Q8_0", experts=how)
    expected = model(PROMPT).logits
    paths = [name for name, module in model.named_modules() if type(module).__name__.endswith("Experts")]
    kwargs = context(original(), None).config.to_kwargs()
    plan = hand_plan(model, operators=dict.fromkeys(paths, ("KTransformersExperts", kwargs)))
    source = open_weights(path, model.config.to_dict())
    applied = apply_plan(plan, weights=source)
    found = [module for module in applied.modules() if type(module) is KExpertsCPU]
    assert len(found) == len(paths)
    assert all((module.stored is None) == (how == "safetensors") for module in found)
    assert close(applied(PROMPT).logits, expected)


@torch.no_grad()
def test_a_model_in_hand_answers_alike() -> None:
    model = tiny_model("qwen3_moe")
    expected = model(PROMPT).logits
    paths = [name for name, module in model.named_modules() if type(module).__name__.endswith("Experts")]
    kwargs = context(original(), None).config.to_kwargs()
    applied = apply_plan(
        hand_plan(model, operators=dict.fromkeys(paths, ("KTransformersExperts", kwargs))), weights=source_of(model)
    )
    torch.testing.assert_close(applied(PROMPT).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_stored_bytes_are_used_where_they_lie_and_weights_read_as_numbers() -> None:
    source = Stored("Q4_K", "Q6_K")
    experts = made(source, torch.bfloat16)
    assert list(experts.parameters()) == []
    assert experts.stored.gate_up[1].owner is source.parts["gate_up_proj"][1][2]
    assert "7 experts, hidden=256, intermediate=512, stored as Q4_K, Q6_K" in repr(experts)
    for name, weight in source.weights.items():
        assert torch.equal(getattr(experts, name), weight.bfloat16())
        assert torch.equal(experts.state_dict()[name], weight.bfloat16())


@torch.no_grad()
def test_experts_are_copied_pickled_saved_and_loaded() -> None:
    arguments = calls(5)
    for experts in (made(Stored("Q4_K", "Q6_K")), made(Stored("F32", "F32"))):
        expected = experts(*arguments)
        assert torch.equal(copy.deepcopy(experts)(*arguments), expected)
        assert torch.equal(pickle.loads(pickle.dumps(experts))(*arguments), expected)
        saved = io.BytesIO()
        torch.save(experts.state_dict(), saved)
        other = made(Stored("Q8_0", "Q8_0"))
        saved.seek(0)
        other.load_state_dict(torch.load(saved))
        assert other.stored is None
        assert close(other(*arguments), expected)


@torch.no_grad()
def test_a_cast_changes_what_weights_read_as_and_keeps_the_blocks() -> None:
    experts, arguments = made(Stored("Q4_K", "Q6_K")), calls(5)
    expected = experts(*arguments)
    experts.to(torch.float16)
    assert experts.gate_up_proj.dtype is torch.float16
    assert torch.equal(experts(*arguments), expected)
    away = experts.to("meta")
    assert (away.stored, away.down_proj.device.type) == (None, "meta")


def test_a_gradient_comes_through_torch() -> None:
    source = Stored("Q4_K", "Q6_K")
    x, index, weights = calls(4)
    found = []
    for experts in (made(source), theirs(source.weights)):
        mine, share = x.clone().requires_grad_(), weights.clone().requires_grad_()
        experts(mine, index, share).square().sum().backward()
        found.append((mine.grad, share.grad))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_no_tokens_give_no_rows_and_the_result_goes_to_the_out_device() -> None:
    experts = made(Stored("Q4_K", "Q6_K"), out_device="cpu")
    assert experts(*calls(0 + 1)).device.type == "cpu"
    assert experts(torch.empty(0, H), torch.empty(0, 3, dtype=torch.long), torch.empty(0, 3)).shape == (0, H)


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("F32", "F32")])
@pytest.mark.parametrize("tokens", [2, 40])
def test_an_expert_that_is_not_there_is_an_error(kinds: tuple[str, str], tokens: int) -> None:
    x, index, weights = calls(tokens)
    for wrong in (-1, E):
        index[1, 1] = wrong
        with pytest.raises(KtoptError, match=rf"chose expert {wrong}, and there are experts 0 to 6"):
            made(Stored(*kinds))(x, index, weights)


def test_a_type_without_a_kernel_is_dequantised_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    source = Stored("Q4_K", "Q6_K")
    source.parts["down_proj"][0] = ("IQ2_XS", *source.parts["down_proj"][0][1:])
    with caplog.at_level(logging.WARNING):
        experts = made(source)
    assert [record.getMessage() for record in caplog.records] == [
        f"{PATH}.down_proj: there is no CPU kernel for IQ2_XS, so these experts are dequantised to float32"
    ]
    assert torch.equal(experts.gate_up_proj, source.weights["gate_up_proj"])
    with torch.no_grad():
        assert close(experts(*(arguments := calls(3))), theirs(source.weights)(*arguments))


def test_a_bad_scale_is_refused_by_name() -> None:
    source = Stored("Q4_K", "Q6_K")
    source.parts["gate_up_proj"][1][2].reshape(E * INNER, -1)[20, 0:2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    with pytest.raises(KtoptError, match=rf"{PATH}\.gate_up_proj \(Q4_K\): row 20 has a scale"):
        made(source)


def test_an_activation_without_a_kernel_goes_to_torch_and_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    odd = original(hidden_act="mish")
    with torch.device("meta"):
        experts = KTransformersExperts.build(odd, context(odd, None))
    assert type(experts) is KTransformersExperts
    assert "there is no CPU kernel for the activation MishActivation" in caplog.text


@pytest.mark.parametrize(
    ("name", "known"),
    [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_new", "gelu_tanh"),
     ("gelu_fast", "gelu_tanh"), ("quick_gelu", "quick_gelu"), ("relu", "relu"), ("relu2", "relu2"), ("tanh", "")],
)  # fmt: skip
def test_transformers_activations_are_known_by_what_they_compute(name: str, known: str) -> None:
    from test_experts_cpu import FUNCTIONS
    from transformers.activations import ACT2FN

    from ktopt.operators.modules.experts_cpu import kernel_activation

    assert kernel_activation(ACT2FN[name]) == known
    if known:
        x = torch.linspace(-9, 9, 1000)
        torch.testing.assert_close(ACT2FN[name](x), FUNCTIONS[known](x), rtol=1e-4, atol=1e-5)


def test_without_kernels_torch_computes_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    experts_module.cpu_kernels.cache_clear()
    monkeypatch.setattr(cpu, "available", lambda: (False, "no compiler"))
    theirs = original()
    for _ in range(2):
        with torch.device("meta"):
            assert type(KTransformersExperts.build(theirs, context(theirs, None))) is KTransformersExperts
    experts_module.cpu_kernels.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "KExpertsCPU gives way to KExpertsTorch, whose weights take more memory: no compiler"
    ]
