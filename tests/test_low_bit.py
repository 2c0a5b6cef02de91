"""Linears and experts of 4 and 8 bits for CUDA, on the CPU's variants of torch's products, and on a GPU where there is one.

Weights are compared with what a plain quantiser makes, activations go through a product in float64.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from apply_fixtures import PROMPT, StateSource, hand_plan, make_model, source_of
from torch import nn

import ktopt
from ktopt.applying import apply_plan
from ktopt.applying.dry_run import dry_run
from ktopt.diagnostics import KtoptError
from ktopt.graph import Module, ModuleClass, Tensor
from ktopt.implementation import BuildContext
from ktopt.operator import build_config
from ktopt.operators.modules import low_bit
from ktopt.operators.modules.experts import KTransformersExperts
from ktopt.operators.modules.experts_cuda import KExpertsMarlin
from ktopt.operators.modules.linear_cuda import Float8Linear, Int4Linear, Int8Linear, LowBitLinear
from ktopt.operators.modules.low_bit import Float8, Int4, Int8
from ktopt.placement import Device, Hardware
from ktopt.plan import Plan, Step
from ktopt.registry import find
from ktopt.source import SourceFile

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]
N, K = 50, 200
BF16 = 2.0**-8
OPS = {"KLinearMarlin": Int4Linear, "VLinearMarlin": Int4Linear, "KLinearQ8": Int8Linear, "KLinearFP8": Float8Linear}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Given:
    """A source of one weight and a bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def read(self, name: str, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        value = self.weight if name.endswith("weight") else torch.arange(float(len(self.weight)))
        return value.to(device=device, dtype=dtype, copy=True)


def made(cls: type[LowBitLinear], weight: torch.Tensor, device: str, bias: bool = False, **options: Any) -> Any:
    class Context:
        dtype, config, tensors = torch.float32, type("Config", (), {"group_size": 64, **options}), Given(weight)

        @staticmethod
        def name(parameter: str) -> str:
            return f"linear.{parameter}"

    Context.device = torch.device(device)  # type: ignore[attr-defined]
    rows, columns = weight.shape
    linear = cls(columns, rows, bias=bias, device="meta", dtype=torch.float32).requires_grad_(False)
    linear.load_tensors(Context)  # type: ignore[arg-type]
    return linear


# weights against a plain quantiser


@pytest.mark.parametrize("group", Int4.GROUPS)
def test_four_bits_are_off_by_half_a_step_of_their_group(group: int) -> None:
    weight = drawn(48, 512)
    q, scales = Int4.quantize(weight, group)
    assert q.dtype is torch.uint8
    assert (int(q.min()), int(q.max())) == (0, 15)
    assert scales.shape == (512 // group, 48, 2)
    scale, zero = scales.float().permute(1, 0, 2).repeat_interleave(group, 1).unbind(-1)
    spans = weight.view(48, -1, group)
    step = ((spans.amax(-1) - spans.amin(-1)) / 15).repeat_interleave(group, 1)
    allowed = step / 2 + BF16 * (16 * step + zero.abs())
    assert (((q.float() - 8) * scale + zero - weight).abs() <= allowed).all()


def test_eight_bits_are_off_by_half_a_step_of_their_output() -> None:
    weight = drawn(48, 512)
    q, scale = Int8.quantize(weight)
    step = weight.abs().amax(-1, keepdim=True) / 127
    assert ((Int8.numbers(q, scale).float() - weight).abs() <= step / 2 + BF16 * 3 * weight.abs() + BF16 * step).all()


def test_eight_bit_floats_are_off_by_a_sixteenth() -> None:
    weight = drawn(48, 512)
    bits, scale = Float8.quantize(weight)
    assert scale.shape == (48, 1)
    assert ((bits.float() * scale - weight).abs() <= weight.abs() / 16 + scale * 2.0**-10).all()
    assert torch.allclose((bits.float() * scale).abs().amax(-1), weight.abs().amax(-1), rtol=1e-6)


@pytest.mark.parametrize("quantize", [lambda rows: Int4.quantize(rows, 64), Int8.quantize, Float8.quantize])
def test_rows_at_a_time_are_rounded_as_all_of_them(quantize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, dim = drawn(50, 128), 1 if quantize not in (Int8.quantize, Float8.quantize) else 0
    whole = quantize(weight)
    monkeypatch.setattr(low_bit, "ROUNDED_AT_A_TIME", 16 * 128)
    for found, wanted in zip(low_bit.in_pieces(quantize, weight, dim), whole, strict=True):
        assert torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("value", [0.0, 1e-38, 3.0, -1e30])
def test_a_weight_of_one_value_keeps_it(value: float) -> None:
    weight = torch.full((16, 128), value)
    q, scales = Int4.quantize(weight, 64)
    made_again = (q.float() - 8) * scales[0, 0, 0].float() + scales[0, 0, 1].float()
    for found in (made_again, Int8.numbers(*Int8.quantize(weight)).float(), Float8.quantize(weight)[0].float()):
        assert found.isfinite().all()
    assert torch.allclose(made_again, weight, rtol=2 * BF16, atol=1e-29)


# layers


@pytest.mark.parametrize(
    ("cls", "options"), [(Int4Linear, {"group_size": g}) for g in Int4.GROUPS] + [(Int8Linear, {}), (Float8Linear, {})]
)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_layer_multiplies_with_the_weight_that_it_shows(
    cls: type[LowBitLinear], options: dict[str, Any], tokens: int, device: str
) -> None:
    """Sizes are multiples of nothing, so that padding is met too."""
    weight = drawn(N, K)
    linear = made(cls, weight, device, bias=True, **options)
    assert list(dict(linear.named_parameters())) == ["bias"]
    shown = linear.weight.cpu()
    assert shown.shape == (N, K)
    assert (shown - weight).norm() <= (0.12 if cls is Int4Linear else 0.04) * weight.norm()
    x = drawn(1, tokens, K, seed=1).to(device)
    y = linear(x).cpu() - torch.arange(float(N))
    expected = x.cpu().double() @ shown.double().T
    rounding = 0.04 if cls is Float8Linear else 0.01  # activations in e4m3, or in bfloat16
    assert y.shape == (1, tokens, N)
    assert (y - expected).norm() <= rounding * expected.norm() + 0.3


@pytest.mark.parametrize("cls", [Int4Linear, Int8Linear, Float8Linear])
def test_a_layer_is_small_and_can_be_copied_pickled_cast_and_saved(cls: type[LowBitLinear], device: str) -> None:
    linear = made(cls, drawn(64, 256), device)
    held = sum(buffer.nbytes for buffer in linear.buffers())
    assert held <= 64 * 256 * (0.6 if cls is Int4Linear else 1.05)
    x = drawn(3, 256).to(device)
    for again in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear)), copy.deepcopy(linear).to(torch.bfloat16)):
        assert torch.allclose(again(x), linear(x), rtol=0.02, atol=0.1)
    assert torch.equal(linear.state_dict()["weight"], linear.weight)
    assert linear(x[:0]).shape == (0, 64)
    linear.weight = nn.Parameter(torch.zeros(64, 256, device=device), requires_grad=False)
    assert not linear(x).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_result_has_the_inputs_dtype(dtype: torch.dtype, device: str) -> None:
    for cls in (Int4Linear, Int8Linear, Float8Linear):
        assert made(cls, drawn(16, 128), device)(drawn(2, 128).to(device, dtype)).dtype is dtype


# plans


RULES = """
version: 1
dtype: bfloat16
place: {cuda: "@**"}
rules:
  - {id: linears, match: class=Linear, replace: KTransformersLinear, kwargs: {generate_op: OP}}
"""
EXPERTS = """
  - {id: experts, match: class=MixtralExperts, replace: KTransformersExperts, kwargs: {generate_op: KExpertsMarlin}}
"""


def plan(op: str, model: Any, rules: str = RULES, **options: Any) -> Plan:
    return ktopt.compile(SourceFile("r.yaml", rules.replace("OP", op)), model, **options)


@pytest.mark.parametrize("op", OPS)
def test_a_plan_keeps_the_op_on_cuda_and_gives_way_where_it_is_remapped(op: str) -> None:
    made_plan = plan(op, make_model("llama"))
    assert made_plan.by_path["lm_head"].runs == {}
    remapped = plan(op, make_model("llama"), remap="cuda=cpu").by_path["lm_head"]
    other = "KLinearCPUInfer" if "Marlin" in op else "KLinearTorch"
    assert remapped.runs == {op: (other, f"{op} doesn't run on cpu")}


@pytest.mark.parametrize("op", OPS)
def test_planned_bytes_are_those_of_the_layers_that_load(op: str) -> None:
    model = make_model("llama")
    made_plan = plan(op, model)
    for path in ("lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.k_proj"):
        weight = model.get_submodule(path).weight
        held = made(OPS[op], weight.detach(), "cpu")
        assert made_plan.by_path[path].weight_bytes == sum(b.nbytes for b in held.buffers())


def test_a_tied_head_in_few_bits_is_a_copy_that_counts() -> None:
    head = plan("KLinearMarlin", make_model("tied")).by_path["lm_head"]
    assert head.weight_bytes > 0
    assert head.notes == ()


@pytest.mark.parametrize("kind", ["llama", "tied", "mixtral"])
@pytest.mark.parametrize("op", OPS)
def test_a_model_for_cuda_runs_on_fake_tensors(kind: str, op: str) -> None:
    model = make_model(kind)
    rules = RULES + EXPERTS * (kind == "mixtral")
    dry_run(plan(op, model.config.to_dict(), rules))


def machine(sm: int) -> Hardware:
    return Hardware("a machine", (Device("cuda:0", 24 << 30, sm=sm),), 64 << 30, 8)


@pytest.mark.parametrize(("op", "least"), [("KLinearMarlin", 80), ("KLinearFP8", 89), ("KLinearQ8", 80)])
def test_an_older_gpu_is_refused_by_the_plan(op: str, least: int) -> None:
    assert not plan(op, make_model("llama").config.to_dict(), hardware=machine(least)).errors
    (error,) = plan(op, make_model("llama").config.to_dict(), hardware=machine(75)).errors
    assert "KT406" in error
    assert f"{op} needs compute capability {least / 10:.1f}, and cuda:0 has 7.5" in error


def test_on_an_older_gpu_a_rule_that_names_no_op_gets_one_that_runs() -> None:
    rules = RULES.replace(", kwargs: {generate_op: OP}", "")
    config = make_model("llama").config.to_dict()
    assert plan("", config, rules, hardware=machine(75)).by_path["lm_head"].kwargs["generate_op"] == "KLinearTorch"
    assert plan("", config, rules, hardware=machine(89)).by_path["lm_head"].kwargs["generate_op"] == "KLinearMarlin"


def test_an_older_gpu_is_refused_when_the_model_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(KtoptError, match=r"KLinearFP8 needs compute capability 8.9, and cuda:0 \(Tesla T4\) has 7.5"):
        low_bit.refuse_older(torch.device("cuda:0"), 89, "KLinearFP8")
    low_bit.refuse_older(torch.device("cuda:0"), 75, "KLinearFP8")
    low_bit.refuse_older(torch.device("cpu"), 89, "KLinearFP8")


def test_groups_that_torch_does_not_know_are_refused() -> None:
    spec = find("KTransformersLinear")
    assert spec is not None
    config, (problem,) = build_config(spec, {"generate_op": "KLinearMarlin", "group_size": 100})
    assert (config, problem.key, problem.kind) == (None, "group_size", "value")
    assert problem.message.endswith("torch's int4 product takes groups of 32, 64, 128 or 256 weights")
    for others in ({"num_bits": 8}, {"generate_op": "KLinearCPUInfer"}):
        assert build_config(spec, {"group_size": 100, **others})[0] is not None


def test_orders_that_nothing_tells_are_said_to_have_no_effect() -> None:
    ordered = plan("KLinearMarlin", make_model("llama"), RULES.replace("OP", "OP, act_order: true, is_k_full: false"))
    notes = ordered.by_path["lm_head"].notes
    assert any("act_order: true has no effect: columns keep their order" in note for note in notes)
    assert any("is_k_full: false has no effect" in note for note in notes)


# experts


@pytest.mark.parametrize("tokens", [1, 30])
def test_experts_compute_with_the_weights_that_they_show(tokens: int, device: str) -> None:
    model = make_model("mixtral")
    kwargs = {"generate_op": "KExpertsMarlin", "generate_device": device}
    original = model.model.layers[0].mlp.experts
    config = find("KTransformersExperts").config(**kwargs)  # type: ignore[union-attr]
    tensors = tuple(Tensor(n, tuple(p.shape), "float32") for n, p in original.named_parameters())
    module = Module("experts", ModuleClass("m.MixtralExperts", ("m.MixtralExperts",)), tensors, 0, -1, 1)
    step = Step("experts", "", "experts", "KTransformersExperts", config.to_kwargs(), device, device, "float32", 0)
    source: Any = StateSource({f"experts.{n}": p for n, p in original.state_dict().items()})
    context = BuildContext(step, config, module, torch.device(device), torch.float32, model.config, source)
    with torch.device("meta"):
        experts: Any = KTransformersExperts.build(original, context)
    assert isinstance(experts, KExpertsMarlin)
    held = dict(experts._parameters)
    experts._parameters.update(dict.fromkeys(held))  # as from_pretrained finds it, which asks what there is to load
    assert not experts.state_dict()
    experts._parameters.update(held)
    with torch.no_grad():
        experts.load_tensors(context)
    assert not list(experts.parameters())
    for name, weight in original.named_parameters():
        assert (getattr(experts, name).cpu() - weight).norm() <= 0.12 * weight.norm()
    plain = copy.deepcopy(original).to(device)
    for name, weight in plain.named_parameters():
        weight.data = getattr(experts, name)
    x = drawn(tokens, 64).to(device)
    index = torch.randint(0, 4, (tokens, 2), generator=torch.Generator().manual_seed(0)).to(device)
    weights = torch.full((tokens, 2), 0.5, device=device)
    expected = plain(x, index, weights)
    assert (experts(x, index, weights) - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("op", OPS)
def test_a_model_answers_on_a_gpu_about_as_it_does_in_float32(op: str) -> None:
    model = make_model("llama")
    expected = model(PROMPT).logits
    kwargs = {"generate_op": op}
    linears = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    made_plan = hand_plan(model, devices={"": "cuda:0"}, operators=dict.fromkeys(linears, ("KTransformersLinear", kwargs)))
    found = apply_plan(made_plan, weights=source_of(model))(PROMPT.cuda()).logits.cpu()
    assert (found - expected).norm() <= 0.3 * expected.norm()
