"""KLinearCPUInfer: a linear layer on the stored blocks of its weight, by the kernels or, where torch is faster, torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from apply_fixtures import PROMPT, hand_plan, make_model, source_of
from quantized import block_elements, random_blocks
from torch import nn

from ktopt.applying import apply_plan
from ktopt.diagnostics import KtoptError
from ktopt.graph import Module, ModuleClass, Tensor
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu, reference
from ktopt.operators.modules import linear as linear_module
from ktopt.operators.modules.linear import KTransformersLinear
from ktopt.operators.modules.linear_cpu import FEW_TOKENS, KLinearCPUInfer
from ktopt.plan import Step
from ktopt.registry import find

if not cpu.available()[0]:
    pytest.skip(cpu.available()[1], allow_module_level=True)

ROWS = 40
PATH = "model.layers.0.mlp.up_proj"


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    cpu.use_isa(None)


class Stored:
    """A source whose weight lies in parts of given types, with a bias of ones."""

    def __init__(self, columns: int, *parts: tuple[str, int]) -> None:
        rng = np.random.default_rng(0)
        self.parts = [(kind, (rows, columns), random_blocks(kind, rows, columns, rng)) for kind, rows in parts]
        self.weight = torch.cat([reference.weight(kind, data, columns) for kind, _, data in self.parts])

    def raw(self, name: str) -> list[Any]:
        assert name == f"{PATH}.weight"
        return self.parts

    def read(self, name: str, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        value = self.weight if name.endswith(".weight") else torch.ones(self.weight.shape[0])
        return value.to(dtype, copy=True)


def context(shape: tuple[int, int], tensors: Any, dtype: torch.dtype = torch.float32) -> BuildContext:
    config = find("KTransformersLinear").config(generate_op="KLinearCPUInfer")  # type: ignore[union-attr]
    kind = ModuleClass("torch.nn.modules.linear.Linear", ("torch.nn.modules.linear.Linear",))
    module = Module(PATH, kind, (Tensor("weight", shape, "float32"),), 0, -1, 1)
    name = str(dtype).removeprefix("torch.")
    step = Step(PATH, kind.name, "linear", "KTransformersLinear", config.to_kwargs(), "cpu", "cpu", name, 0)
    return BuildContext(step, config, module, torch.device("cpu"), dtype, None, tensors)


def made(tensors: Any, dtype: torch.dtype = torch.float32, bias: bool = False) -> Any:
    rows, columns = tensors.weight.shape
    built_for = context((rows, columns), tensors, dtype)
    with torch.device("meta"):
        linear: Any = KTransformersLinear.build(nn.Linear(columns, rows, bias=bias), built_for)
    assert isinstance(linear, KLinearCPUInfer)
    with torch.no_grad():
        linear.load_tensors(built_for)
    return linear


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, relative: float = 0.03) -> bool:
    """Whether a product is right but for rounding to 8 bits or bfloat16."""
    expected = reference.linear(x, weight)
    return bool((found - expected).norm() <= relative * expected.norm())


@pytest.mark.parametrize("isa", ["best", "scalar"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "BF16", "F32"])
@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, FEW_TOKENS + 1, 100])
def test_few_tokens_and_many_give_the_product(kind: str, tokens: int, isa: str) -> None:
    cpu.use_isa(None if isa == "best" else isa)
    source = Stored(2 * max(block_elements(kind), 64), (kind, ROWS))
    linear, x = made(source), torch.randn(1, tokens, source.weight.shape[1])
    assert linear(x).shape == (1, tokens, ROWS)
    assert linear(x).dtype is torch.float32
    assert close(linear(x)[0], x[0], source.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 50])
def test_the_result_has_the_inputs_dtype(dtype: torch.dtype, tokens: int) -> None:
    source = Stored(256, ("Q4_K", ROWS))
    linear, x = made(source, torch.bfloat16), torch.randn(tokens, 256).to(dtype)
    assert linear(x).dtype is dtype
    assert close(linear(x), x, source.weight)


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_parts_of_several_types_are_joined_and_the_bias_is_added(tokens: int) -> None:
    source = Stored(512, ("Q4_K", 7), ("Q6_K", 20), ("Q8_0", 13))
    linear, x = made(source, bias=True), torch.randn(tokens, 512)
    assert close(linear(x) - 1, x, source.weight)


def test_many_tokens_stay_with_the_kernels_where_these_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("dequantised")

    source, x = Stored(512, ("Q4_K", 17), ("Q8_0", 23)), torch.randn(100, 512)
    linear = made(source)
    if not all(cpu.takes_many(part) for _, part in linear.parts):
        pytest.skip("this CPU has no kernels for many tokens")
    monkeypatch.setattr(cpu, "dequantize", refuse)
    assert close(linear(x), x, source.weight)
    cpu.use_isa("scalar")
    with pytest.raises(AssertionError, match="dequantised"):
        linear(x)


def test_tiles_cover_a_large_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.use_isa("scalar")
    monkeypatch.setattr("ktopt.operators.modules.linear_cpu.TILE_BYTES", 5000)
    source = Stored(512, ("Q4_K", 17), ("Q8_0", 23))
    x = torch.randn(30, 512)
    assert close(made(source)(x), x, source.weight)


def test_an_input_that_is_not_contiguous_is_taken() -> None:
    source = Stored(256, ("Q4_0", ROWS))
    x = torch.randn(256, 3).T
    assert close(made(source)(x), x, source.weight)


def test_no_tokens_give_no_rows() -> None:
    assert made(Stored(256, ("Q4_0", ROWS)))(torch.empty(2, 0, 256)).shape == (2, 0, ROWS)


@pytest.mark.parametrize("tokens", [1, 50])
def test_an_input_gets_its_gradient(tokens: int) -> None:
    source = Stored(256, ("Q8_0", ROWS))
    x = torch.randn(tokens, 256, requires_grad=True)
    made(source)(x).sum().backward()
    assert close(x.grad, torch.ones(tokens, ROWS), source.weight.T)  # type: ignore[arg-type]


def test_the_stored_bytes_are_used_where_they_lie() -> None:
    source = Stored(256, ("Q4_K", ROWS))
    linear = made(source)
    assert list(linear.parameters()) == []
    assert linear.parts[0][1].owner is source.parts[0][2]


def test_the_weight_reads_as_numbers_and_is_saved_as_numbers() -> None:
    source = Stored(256, ("Q4_K", 7), ("Q6_K", ROWS))
    linear = made(source, torch.bfloat16)
    assert torch.equal(linear.weight, source.weight.bfloat16())
    assert torch.equal(linear.state_dict()["weight"], source.weight.bfloat16())
    assert "stored as Q4_K, Q6_K" in repr(linear)


def test_a_type_without_a_kernel_is_dequantised_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    source = Stored(256, ("Q8_0", ROWS))
    source.parts[0] = ("IQ2_XS", *source.parts[0][1:])
    with caplog.at_level(logging.WARNING):
        linear = made(source)
    assert [record.getMessage() for record in caplog.records] == [
        f"{PATH}.weight: there is no CPU kernel for IQ2_XS, so it is dequantised to float32"
    ]
    assert torch.equal(linear.weight, source.weight)
    x = torch.randn(2, 256)
    assert close(linear(x), x, source.weight)


def test_a_weight_with_a_bad_scale_is_refused_by_name() -> None:
    source = Stored(256, ("Q4_K", ROWS))
    source.parts[0][2].reshape(ROWS, -1)[3, 0:2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    with pytest.raises(KtoptError, match=rf"{PATH}\.weight \(Q4_K\): row 3 has a scale"):
        made(source)


def test_without_kernels_torch_computes_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    linear_module.cpu_kernels.cache_clear()
    monkeypatch.setattr(linear_module.cpu, "available", lambda: (False, "no compiler"))
    source = Stored(256, ("Q4_0", ROWS))
    for _ in range(2):
        with torch.device("meta"):
            linear = KTransformersLinear.build(nn.Linear(256, ROWS), context((ROWS, 256), source))
        assert type(linear) is KTransformersLinear
    linear_module.cpu_kernels.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "KLinearCPUInfer gives way to KLinearTorch, whose weights take more memory: no compiler"
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_hand_answers_alike_and_may_be_cast_later(dtype: str) -> None:
    model = make_model("llama")
    expected = model(PROMPT).logits
    kwargs = context((1, 1), None).config.to_kwargs()
    linears = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    plan = hand_plan(model, operators=dict.fromkeys(linears, ("KTransformersLinear", kwargs)), dtype=dtype)
    made_model = apply_plan(plan, weights=source_of(model))
    assert any(type(module) is KLinearCPUInfer for module in made_model.modules())
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    torch.testing.assert_close(made_model(PROMPT).logits.float(), expected, rtol=tolerance, atol=tolerance)
    narrowed = made_model.to(torch.bfloat16)(PROMPT).logits
    torch.testing.assert_close(narrowed.float(), expected, rtol=5e-2, atol=5e-2)
