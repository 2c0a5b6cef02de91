"""The CPU kernels of experts: every storage type on every instruction set against kernels/reference.py, in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from quantized import SCALES, block_elements, random_blocks
from torch.nn import functional

from ktopt.diagnostics import KtoptError
from ktopt.kernels import cpu, reference

if not cpu.available()[0]:
    pytest.skip(cpu.available()[1], allow_module_level=True)

from ktopt.kernels.cpu.experts import ACTIVATIONS, Experts

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 5
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


class Layer:
    """Random experts in given storage types, scaled so that numbers stay about 1; `weights` are the same in float32."""

    def __init__(self, gate: str, up: str, down: str, hidden: int, inner: int, count: int = COUNT, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.count, self.hidden = count, hidden
        self.gate, gates = self.stack(gate, count * inner, hidden)
        self.up, ups = self.stack(up, count * inner, hidden)
        self.down, downs = self.stack(down, count * hidden, inner)
        rounded = (gate in SCALES, up in SCALES, down in SCALES)
        self.every = [
            reference.Expert(*matrices, rounded)
            for matrices in zip(gates.chunk(count), ups.chunk(count), downs.chunk(count), strict=True)
        ]

    def stack(self, kind: str, rows: int, columns: int) -> tuple[cpu.Blocks, torch.Tensor]:
        drawn = self.rng.standard_normal(64).astype(np.float16) * np.float16(0.02)
        raw = random_blocks(kind, rows, columns, self.rng, drawn)
        return cpu.blocks(kind, rows, columns, raw), reference.weight(kind, raw, columns)

    def experts(self, activation: str = "silu", **rest: Any) -> Experts:
        return Experts(self.count, (self.gate, self.up), (self.down,), activation, **rest)


def choices(tokens: int, chosen: int, count: int = COUNT) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, count, (tokens, chosen)), torch.randn(tokens, chosen)


def run(
    experts: Experts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, threads: int = 2, **rest: Any
) -> torch.Tensor:
    out = torch.full((x.shape[0], experts.hidden), float("nan"))
    experts(x, index, weights, out, threads, **rest)
    return out


def assert_right(layer: Layer, experts: Experts, tokens: int, chosen: int) -> None:
    x = torch.randn(tokens, layer.hidden)
    index, weights = choices(tokens, chosen, layer.count)
    function = FUNCTIONS[experts.activation]
    expected, allowed = reference.experts(x, index, weights, layer.every, function)
    off = (run(experts, x, index, weights) - expected).abs()
    assert (off <= allowed).all(), (tokens, chosen, (off / allowed).max())
    assert off.norm() <= 0.05 * expected.norm(), (tokens, chosen)


@pytest.mark.parametrize("kind", cpu.KINDS)
def test_experts_of_every_storage_type_are_right(isa: str, kind: str) -> None:
    elements = block_elements(kind)
    hidden, inner = (2 * elements, 3 * elements) if elements == 32 else (elements, 2 * elements) if elements > 1 else (27, 13)
    layer = Layer(kind, kind, kind, hidden, inner)
    for tokens, chosen in ((1, 1), (1, 8), (2, 3), (7, 2)):
        assert_right(layer, layer.experts(), tokens, chosen)


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "BF16", "Q5_0"), ("F16", "Q4_1", "F32"), ("Q6_K", "Q2_K", "Q8_0")]
)
def test_gate_up_and_down_may_differ_in_type(isa: str, kinds: tuple[str, str, str]) -> None:
    layer = Layer(*kinds, 512, 288 if kinds[2] in ("Q5_0", "Q8_0") else 256)
    for tokens, chosen in ((1, 4), (5, 2)):
        assert_right(layer, layer.experts(), tokens, chosen)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 200])
@pytest.mark.parametrize("chosen", [1, 3, 8])
def test_any_number_of_tokens_and_choices_is_right(isa: str, tokens: int, chosen: int) -> None:
    layer = Layer("Q4_0", "Q4_0", "Q4_0", 96, 160, count=11)
    assert_right(layer, layer.experts(), tokens, chosen)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_torchs(isa: str, activation: str) -> None:
    """On numbers from -30 to 30, by experts whose gate and up pass the input on."""
    sizes = torch.linspace(-30, 30, 6001, dtype=torch.float32)[:, None]
    one = cpu.tensor_blocks(torch.ones(1, 1))
    assert one is not None
    experts = Experts(1, (one, one), (one,), activation)
    found = run(experts, sizes, torch.zeros(6001, 1, dtype=torch.long), torch.ones(6001, 1))
    expected = FUNCTIONS[activation](sizes.double()) * sizes
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=2e-5 if activation == "gelu" else 1e-6)


def test_numbers_that_are_not_finite_stay_so(isa: str) -> None:
    layer = Layer("Q4_0", "Q4_0", "Q4_0", 64, 64)
    x = torch.randn(3, 64)
    x[1, 7], x[2, 7] = float("nan"), float("inf")
    found = run(layer.experts(), x, *choices(3, 2))
    assert found[0].isfinite().all()
    assert not found[1:].isfinite().any()


@pytest.mark.parametrize(("kind", "tokens"), [("Q4_K", 1), ("Q4_K", 40), ("Q8_0", 3), ("BF16", 200)])
def test_any_number_of_threads_gives_the_same_bits(isa: str, kind: str, tokens: int) -> None:
    layer = Layer(kind, kind, kind, 256, 256, count=7)
    x, (index, weights), experts = torch.randn(tokens, 256), choices(tokens, 4, 7), layer.experts()
    alone = run(experts, x, index, weights, 1)
    for threads in (2, 5):
        assert torch.equal(run(experts, x, index, weights, threads), alone)


def test_an_expert_that_a_token_chose_twice_counts_twice() -> None:
    layer = Layer("Q4_K", "Q4_K", "Q6_K", 256, 256)
    x = torch.randn(4, 256)
    index = torch.tensor([[3, 3], [1, 3], [3, 0], [3, 3]])
    expected, allowed = reference.experts(x, index, torch.ones(4, 2), layer.every, functional.silu)
    assert ((run(layer.experts(), x, index, torch.ones(4, 2)) - expected).abs() <= allowed).all()


def test_bfloat16_tokens_and_int32_choices_are_taken_as_they_are() -> None:
    layer = Layer("Q8_0", "Q8_0", "F32", 64, 96)
    x, (index, weights) = torch.randn(9, 64).bfloat16(), choices(9, 3)
    assert torch.equal(run(layer.experts(), x, index.int(), weights), run(layer.experts(), x.float(), index, weights))


def test_a_shared_expert_is_added_with_a_weight_for_each_token() -> None:
    layer, other = Layer("Q4_K", "Q4_K", "Q4_K", 256, 512), Layer("Q8_0", "Q8_0", "Q6_K", 256, 768, count=1, seed=1)
    experts = layer.experts(shared=(other.gate, other.up, other.down))
    x, (index, weights), share = torch.randn(6, 256), choices(6, 2), torch.rand(6)
    alone = run(layer.experts(), x, index, weights).double()
    nothing = torch.zeros(6, 1, dtype=torch.long)
    for given, counted in ((share, share), (None, torch.ones(6))):
        expected, allowed = reference.experts(x, nothing, counted[:, None], other.every, functional.silu)
        found = run(experts, x, index, weights, shared_weights_T=given) - alone
        assert ((found - expected).abs() <= allowed + 1e-5 * alone.abs().max()).all()


def test_a_sum_may_be_added_to_what_is_there() -> None:
    layer = Layer("Q4_0", "Q4_0", "Q4_0", 64, 64)
    x, (index, weights) = torch.randn(5, 64), choices(5, 2)
    wide = torch.ones(5, 100)
    layer.experts()(x, index, weights, wide[:, 10:74], 2, add=True)
    torch.testing.assert_close(wide[:, 10:74], 1 + run(layer.experts(), x, index, weights))
    assert (wide[:, :10] == 1).all()
    assert (wide[:, 74:] == 1).all()


def test_no_choices_give_zeros_and_no_tokens_give_no_rows() -> None:
    experts = Layer("Q4_0", "Q4_0", "Q4_0", 64, 64).experts()
    assert (run(experts, torch.randn(3, 64), *choices(3, 0)) == 0).all()
    assert run(experts, torch.randn(0, 64), *choices(0, 2)).shape == (0, 64)


def test_matrices_may_lie_in_one_stack_or_each_by_itself() -> None:
    layer = Layer("Q4_0", "Q4_0", "Q8_0", 64, 32)
    x, (index, weights) = torch.randn(5, 64), choices(5, 2)
    expected = run(layer.experts(), x, index, weights)
    gates, ups, downs = (np.split(stack.owner.reshape(stack.rows, -1), COUNT) for stack in (layer.gate, layer.up, layer.down))
    pairs = [cpu.blocks("Q4_0", 32, 64, data.copy()) for pair in zip(gates, ups, strict=True) for data in pair]
    each = [cpu.blocks("Q8_0", 64, 32, data.copy()) for data in downs]
    fused = cpu.blocks("Q4_0", COUNT * 64, 64, np.concatenate([part for pair in zip(gates, ups, strict=True) for part in pair]))
    for gate_up, down in ((pairs, each), ((fused,), (layer.down,))):
        assert torch.equal(run(Experts(COUNT, gate_up, down, "silu"), x, index, weights), expected)


def test_experts_are_copied_by_reference_and_pickled_with_their_bytes() -> None:
    layer = Layer("Q4_K", "Q4_K", "Q6_K", 256, 256)
    experts, x, (index, weights) = layer.experts(), torch.randn(3, 256), choices(3, 2)
    again = pickle.loads(pickle.dumps(experts))
    assert copy.deepcopy(experts) is experts
    assert torch.equal(run(again, x, index, weights), run(experts, x, index, weights))
    assert again.nbytes == experts.nbytes == sum(each.nbytes for each in (layer.gate, layer.up, layer.down))


@pytest.mark.parametrize("bad", [-1, COUNT, 1 << 40])
def test_an_expert_that_is_not_there_is_an_error_and_nothing_is_written(isa: str, bad: int) -> None:
    experts, (index, weights) = Layer("Q4_0", "Q4_0", "Q4_0", 64, 64).experts(), choices(4, 3)
    index[2, 1] = bad
    out = torch.ones(4, 64)
    with pytest.raises(ValueError, match=f"token 2 chose expert {bad}, and there are experts 0 to {COUNT - 1}"):
        experts(torch.randn(4, 64), index, weights, out, 2)
    assert (out == 1).all()


def test_tensors_that_do_not_fit_are_refused() -> None:
    experts = Layer("Q4_0", "Q4_0", "Q4_0", 64, 64).experts()
    x, (index, weights), out = torch.randn(4, 64), choices(4, 3), torch.empty(4, 64)
    for call in (
        (x[:, :32], index, weights, out),
        (x[:3], index, weights, out),
        (x, index, weights[:, :2], out),
        (x, index, weights, out[:2]),
        (x.double(), index, weights, out),
        (x, index.short(), weights, out),
        (x, index, weights.bfloat16(), out),
        (x, index, weights, out.bfloat16()),
        (x.T.contiguous().T, index, weights, out),
        (x.to("meta"), index, weights, out),
    ):
        with pytest.raises(ValueError, match=r"fit|can't be|must be"):
            experts(*call, 1)
    with pytest.raises(ValueError, match="fit"):
        experts(x, index, weights, out, 1, shared_weights_T=torch.ones(3))


def test_matrices_that_are_no_layers_experts_are_refused() -> None:
    layer, other = Layer("Q4_0", "Q4_0", "Q4_0", 64, 64), Layer("Q4_0", "Q4_0", "Q4_0", 64, 96)
    for gate_up, down in (
        ((layer.gate, other.up), (layer.down,)),
        ((layer.gate, layer.up), (other.down,)),
        ((layer.gate, layer.up, layer.up), (layer.down,)),
        ((layer.gate, layer.up), (layer.down, layer.down)),
        ((layer.gate, layer.down), (layer.up, other.up)),
    ):
        with pytest.raises(KtoptError, match=r"must be|aren't those|shared out"):
            Experts(COUNT, gate_up, down, "silu")
    with pytest.raises(KtoptError, match="no CPU kernel for the activation mish; there are silu"):
        layer.experts("mish")
    with pytest.raises(KtoptError, match="hidden the same"):
        layer.experts(shared=(other.gate, layer.up, layer.down))


def test_the_extension_checks_sizes_itself() -> None:
    extension, layer = cpu._needed(), Layer("Q4_0", "Q4_0", "Q4_0", 64, 64, count=1)
    matrices = (*layer.gate.call, *layer.up.call, *layer.down.call)
    made = extension.experts(0, 0, *matrices)
    for arguments, error in (
        ((0,), TypeError),
        ((0, 0), ValueError),
        ((0, 0, 1), TypeError),
        ((99, 0, *matrices), ValueError),
        ((-1, 0, *matrices), ValueError),
        ((0, 0, *matrices[:5], *matrices[:4], 7, *matrices[10:]), ValueError),
    ):
        with pytest.raises(error):
            extension.experts(*arguments)
    for wrong, error in (((object(), *[1] * 12), ValueError), ((made, 1, 2), TypeError), ((made, *[0] * 12), ValueError)):
        with pytest.raises(error):
            extension.run_experts(*wrong)
