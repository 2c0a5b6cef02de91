"""KEmbedding: a table read row by row from the blocks of its file, alone and tied to the head."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from apply_fixtures import PROMPT, greedy, make_model
from gguf_fixtures import make_gguf
from quantized import block_elements, random_blocks
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding, BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

import ktopt
from ktopt.diagnostics import KtoptError
from ktopt.folder import save_folder
from ktopt.graph import Module, ModuleClass, Tensor
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu, reference
from ktopt.operators.modules import linear as linear_module
from ktopt.operators.modules.embedding import KEmbedding
from ktopt.operators.modules.linear_cpu import KLinearCPUInfer
from ktopt.operators.modules.stored import StoredWeight
from ktopt.plan import Step
from ktopt.registry import find
from ktopt.source import SourceFile

if not cpu.available()[0]:
    pytest.skip(cpu.available()[1], allow_module_level=True)

RULES = SourceFile(
    "rules.yaml",
    """
version: 1
dtype: float32
place: {cpu: "@**"}
rules:
  - {id: linears, match: class=Linear, replace: KTransformersLinear, kwargs: {generate_op: KLinearCPUInfer}}
  - {id: table, match: class=Embedding, replace: KEmbedding, kwargs: {generate_op: KEmbeddingCPU}}
""",
)
ROWS, COLUMNS = 29, 512
IDS = torch.tensor([[3, 0, 28], [3, 3, 7]])


class Stored:
    """A source that holds one table in blocks."""

    def __init__(self, kind: str) -> None:
        columns = max(block_elements(kind), COLUMNS)
        data = random_blocks(kind, ROWS, columns, np.random.default_rng(0))
        self.parts, self.weight = [(kind, (ROWS, columns), data)], reference.weight(kind, data, columns)

    def raw(self, name: str) -> list[Any]:
        return self.parts

    def read(self, name: str, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        return self.weight.to(dtype, copy=True)


def made(original: nn.Module, source: Stored, dtype: torch.dtype = torch.float32) -> Any:
    config = find("KEmbedding").config()  # type: ignore[union-attr]
    cls = ModuleClass("torch.nn.modules.sparse.Embedding", ("torch.nn.modules.sparse.Embedding",))
    module = Module("embed", cls, (Tensor("weight", tuple(source.weight.shape), "float32"),), 0, -1, 1)
    name = str(dtype).removeprefix("torch.")
    step = Step("embed", cls.name, "embedding", "KEmbedding", config.to_kwargs(), "cpu", "cpu", name, 0)
    context = BuildContext(step, config, module, torch.device("cpu"), dtype, None, source)
    with torch.device("meta"):
        table: Any = KEmbedding.build(original, context)
    with torch.no_grad():
        table.load_tensors(context)
    return table


def own(cls: Any, source: Stored, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """A table of transformers' own class with the source's weights."""
    table = cls(ROWS, source.weight.shape[1], *args, **kwargs).requires_grad_(False)
    table.weight = nn.Parameter(source.weight.to(dtype), requires_grad=False)
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16", "F32"])
def test_rows_are_those_of_the_dequantised_table(kind: str, dtype: torch.dtype) -> None:
    source = Stored(kind)
    table = made(nn.Embedding(ROWS, source.weight.shape[1], padding_idx=3), source, dtype)
    for ids in (IDS, IDS.int(), IDS.T, IDS[0, 0], torch.empty(2, 0, dtype=torch.long)):
        found = table(ids)
        assert found.dtype is dtype
        assert torch.equal(found, nn.functional.embedding(ids, source.weight.to(dtype)))
    assert table.padding_idx == 3
    assert list(table.parameters()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cls", "args"), [(Gemma3TextScaledWordEmbedding, (0, 1.7)), (BartScaledWordEmbedding, (0, 1.7))])
def test_a_class_that_scales_its_rows_scales_them_still(cls: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    source = Stored("Q6_K")
    original = own(cls, source, dtype, *args)
    assert torch.equal(made(original, source, dtype)(IDS), original(IDS))


def test_a_class_that_norms_its_rows_norms_them_still() -> None:
    class Normed(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            rows = super().forward(input)
            return rows / rows.norm(dim=-1, keepdim=True)

    source = Stored("Q6_K")
    original = own(Normed, source, torch.float32)
    assert torch.equal(made(original, source)(IDS), original(IDS))


@pytest.mark.parametrize("original", [BartLearnedPositionalEmbedding(ROWS - 2, COLUMNS), nn.Embedding(ROWS, COLUMNS, max_norm=1.0)])
def test_a_class_that_does_not_look_ids_up_is_refused(original: nn.Module) -> None:
    with pytest.raises(KtoptError, match="use `default` for it"):
        made(original, Stored("Q8_0"))


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_an_id_that_is_no_row_is_an_index_error(wrong: int) -> None:
    table = made(nn.Embedding(ROWS, COLUMNS), Stored("Q8_0"))
    with pytest.raises(IndexError, match=rf"id {wrong} \(at place 2\) is none of the {ROWS} rows"):
        table(torch.tensor([0, 1, wrong]))
    with pytest.raises(TypeError, match="token ids are int64 or int32"):
        table(torch.tensor([1.0]))


def test_a_type_without_a_kernel_is_dequantised_and_looked_up_by_torch() -> None:
    source = Stored("Q8_0")
    source.parts[0] = ("IQ2_XS", *source.parts[0][1:])
    table = made(nn.Embedding(ROWS, COLUMNS), source)
    assert isinstance(table.weight, nn.Parameter)
    assert torch.equal(table(IDS), nn.functional.embedding(IDS, source.weight))


def test_without_kernels_the_original_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    linear_module.cpu_kernels.cache_clear()
    monkeypatch.setattr(linear_module.cpu, "available", lambda: (False, "no compiler"))
    config = find("KEmbedding").config()  # type: ignore[union-attr]
    step = Step("embed", "", "embedding", "KEmbedding", config.to_kwargs(), "cpu", "cpu", "float32", 0)
    original = nn.Embedding(2, 2)
    module: Any = None
    context = BuildContext(step, config, module, torch.device("cpu"), torch.float32, None)
    assert KEmbedding.build(original, context) is original
    linear_module.cpu_kernels.cache_clear()


# tied to the head


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model whose head is its embedding, and a Q8_0 file of it."""
    model = make_model("tied")
    return model, make_gguf(tmp_path_factory.mktemp("tied") / "m.gguf", model, "Q8_0")


@pytest.fixture
def loaded(tied: tuple[Any, Path]) -> Any:
    return ktopt.apply(RULES, tied[1])


def is_one_tensor_in_blocks(model: Any) -> bool:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, KEmbedding)
    assert isinstance(head, KLinearCPUInfer)
    return len(table.parts) == len(head.parts) == 1 and table.parts[0][1] is head.parts[0][1]


def test_the_head_and_the_embedding_are_one_stored_tensor_that_is_never_dequantised(
    tied: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "dequantize", None)
    model = ktopt.apply(RULES, tied[1])
    assert is_one_tensor_in_blocks(model)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    expected = tied[0](PROMPT).logits
    assert (model(PROMPT).logits - expected).norm() <= 0.03 * expected.norm()
    assert model.dtype is torch.float32
    assert model.get_input_embeddings().weight.device.type == "cpu"
    assert greedy(model)


@pytest.mark.parametrize("copy_weights", [False, True])
def test_a_folder_keeps_the_tie(tied: tuple[Any, Path], loaded: Any, tmp_path: Path, copy_weights: bool) -> None:
    out = save_folder(loaded.ktopt_plan, tmp_path / "out", tied[1], copy_weights=copy_weights)
    again, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert is_one_tensor_in_blocks(again)
    assert torch.equal(again(PROMPT).logits, loaded(PROMPT).logits)


def test_copies_and_pickles_keep_the_tie(loaded: Any) -> None:
    for made_again in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert is_one_tensor_in_blocks(made_again)
        assert torch.equal(made_again(PROMPT).logits, loaded(PROMPT).logits)
    stored = sum(part.nbytes for _, part in loaded.lm_head.parts)
    head = len(pickle.dumps(loaded.lm_head))
    assert stored < head
    assert len(pickle.dumps([loaded.lm_head, loaded.model.embed_tokens])) < head + stored / 2


def test_a_state_dict_has_the_numbers_once_and_loads_again(tied: tuple[Any, Path], loaded: Any) -> None:
    with torch.inference_mode():
        state = loaded.state_dict()
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    assert torch.equal(state["lm_head.weight"], tied[0].lm_head.weight)
    state["lm_head.weight"].zero_()
    assert torch.equal(loaded.state_dict()["lm_head.weight"], tied[0].lm_head.weight)
    assert not loaded.load_state_dict(tied[0].state_dict()).missing_keys
    assert loaded.lm_head.parts == ()
    assert (loaded(PROMPT).logits - tied[0](PROMPT).logits).abs().max() < 1e-4


def test_save_pretrained_writes_the_tied_tensor_once(loaded: Any, tmp_path: Path) -> None:
    loaded.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert torch.equal(plain.lm_head.weight, loaded.lm_head.weight)


def test_tie_weights_changes_nothing_and_ties_what_was_apart(loaded: Any) -> None:
    expected = loaded(PROMPT).logits
    loaded.tie_weights()
    assert is_one_tensor_in_blocks(loaded)
    loaded.lm_head.weight = nn.Parameter(torch.zeros(loaded.lm_head.weight.shape))
    assert not loaded(PROMPT).logits.any()
    loaded.tie_weights()
    assert is_one_tensor_in_blocks(loaded)
    assert torch.equal(loaded(PROMPT).logits, expected)


def test_resizing_and_changing_in_place_are_refused_and_change_nothing(loaded: Any) -> None:
    expected = loaded(PROMPT).logits
    with pytest.raises(KtoptError, match="lies in the blocks of a file"):
        loaded.resize_token_embeddings(400)
    with pytest.raises(KtoptError, match="lies in the blocks of a file"):
        loaded.lm_head.weight.mul_(2)
    assert torch.equal(loaded(PROMPT).logits, expected)
    assert loaded.config.vocab_size == loaded.model.embed_tokens.num_embeddings == 320


def test_the_weight_reads_as_a_parameter_without_memory(tied: tuple[Any, Path], loaded: Any) -> None:
    weight, numbers = loaded.lm_head.weight, tied[0].lm_head.weight
    assert isinstance(weight, StoredWeight)
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype) == (numbers.shape, torch.float32)
    assert torch.equal(weight, numbers)
    assert torch.equal(weight[5], numbers[5])
    assert np.array_equal(weight.numpy(), numbers.detach().numpy())
    assert "stored as Q8_0" in repr(weight)
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(weight))), numbers)


def test_a_cast_changes_what_results_are_in_and_leaves_the_blocks(loaded: Any) -> None:
    expected = loaded(PROMPT).logits
    cast = loaded.to(torch.bfloat16)
    assert is_one_tensor_in_blocks(cast)
    assert cast.model.embed_tokens(PROMPT).dtype is torch.bfloat16
    assert cast.lm_head.weight.dtype is torch.bfloat16
    assert (cast(PROMPT).logits.float() - expected).norm() < 0.1 * expected.norm()


def test_a_model_in_hand_keeps_its_numbers_and_its_tie(tied: tuple[Any, Path]) -> None:
    model = ktopt.apply(RULES, copy.deepcopy(tied[0]))
    assert isinstance(model.model.embed_tokens, KEmbedding)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.allclose(model(PROMPT).logits, tied[0](PROMPT).logits, atol=1e-4)


def test_gemmas_scaled_embedding_comes_from_a_file(tmp_path: Path) -> None:
    model = make_model("gemma3_text")
    made_model = ktopt.apply(RULES, make_gguf(tmp_path / "m.gguf", model, "Q8_0"))
    assert is_one_tensor_in_blocks(made_model)
    assert torch.equal(made_model.model.embed_tokens(PROMPT), model.model.embed_tokens(PROMPT))
    expected = model(PROMPT).logits
    assert (made_model(PROMPT).logits - expected).norm() <= 0.05 * expected.norm()
