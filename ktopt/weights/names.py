"""Which GGUF tensors a model's parameter is made of: transformers' names to llama.cpp's.

The names themselves come from the gguf package's TensorNameMap. What this file adds is what llama.cpp's converters do to the
weights on the way (and what transformers v5 did to its models since): rotary rows permuted in the llama family, one added to
Gemma's norms, experts fused in two or three tensors or one tensor an expert, MLA's kv_b in one piece or split in two. Nothing
here reads weights: it looks at names and shapes only, and answers with recipes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from typing import Any

from ktopt.weights.gguf import GGUFFile, GGUFTensor
from ktopt.weights.recipes import Part, Recipe, Rows, grouped_rows, rotary_rows, single
from ktopt.weights.source import WeightError

MODEL_TYPES: dict[str, tuple[str, ...]] = {
    "llama": ("llama", "mistral", "mixtral"),
    "internlm2": ("llama",),
    "qwen2": ("qwen2",),
    "qwen2moe": ("qwen2_moe",),
    "qwen3": ("qwen3",),
    "qwen3moe": ("qwen3_moe",),
    "qwen3next": ("qwen3_next",),
    "deepseek2": ("deepseek_v2", "deepseek_v3", "kimi_k2"),
    "gemma3": ("gemma3_text", "gemma3"),
    "glm4moe": ("glm4_moe",),
}
ROTARY_PERMUTED = ("llama", "internlm2")
NORMS_PLUS_ONE = {"gemma3": ("norm",), "qwen3next": ("norm",)}

TOP = ("model.embed_tokens", "model.norm", "lm_head")
LAYER = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
    "self_attn.k_norm", "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.conv1d",
    "linear_attn.norm", "linear_attn.out_proj", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate", "mlp.shared_expert.gate_proj",
    "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj", "mlp.shared_expert_gate", "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj",
)  # fmt: skip
LAYER_BARE = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.e_score_correction_bias", "linear_attn.dt_bias",
              "linear_attn.A_log")  # fmt: skip
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_BARE_NAMES = {"e_score_correction_bias": "e_score_correction", "dt_bias": "dt_proj"}


def check_model_type(architecture: str, model_type: str, where: str) -> None:
    """WeightError unless a GGUF of this architecture can hold a model of this transformers model_type."""
    if architecture not in MODEL_TYPES:
        raise WeightError(
            f"{where}: models of GGUF architecture {architecture!r} can't be read; known are {', '.join(MODEL_TYPES)}"
        )
    if model_type and model_type not in MODEL_TYPES[architecture]:
        raise WeightError(
            f"{where} is the wrong file for this model: it holds one of GGUF architecture {architecture!r}, not {model_type}"
        )


def decoder_layers(file: GGUFFile) -> int:
    """The model's decoder layers: its blocks, less those that predict further tokens, which stand at the end."""
    arch, blocks = file.architecture, 0
    for key, sign in (("block_count", 1), ("nextn_predict_layers", -1)):
        value = file.metadata.get(f"{arch}.{key}", 0)
        if type(value) is not int or not 0 <= value <= len(file.tensors):
            raise WeightError(
                f"{file.path}: the metadata key {arch}.{key} is {value!r:.60}, and the file has {len(file.tensors)} tensors"
            )
        blocks += sign * value
    if blocks < 1:
        raise WeightError(f"{file.path}: the metadata lacks {arch}.block_count, or it leaves no layer")
    return blocks


@cache
def _stems(architecture: str) -> Mapping[str, str]:
    """gguf's map from transformers' module names to GGUF's, for layer 0 and what is outside layers."""
    import gguf

    number = next((a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if number is None:
        raise WeightError(f"the gguf package installed here does not know the architecture {architecture!r}")
    return {name: found[1] for name, found in gguf.get_tensor_name_map(number, 1).mapping.items()}


class GGUFNames:
    """Recipes for the parameters of the model in a GGUF file."""

    def __init__(self, file: GGUFFile) -> None:
        check_model_type(file.architecture, "", str(file.path))
        self.file, self.arch, self.tensors = file, file.architecture, file.tensors

    @cached_property
    def layers(self) -> int:
        """The decoder layers, without those that predict further tokens."""
        return decoder_layers(self.file)

    def hyperparameter(self, key: str) -> Any:
        """An integer of the architecture's metadata, the first where it is given per layer."""
        value = self.file.metadata.get(f"{self.arch}.{key}")
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is not int or value < 1:
            raise WeightError(f"{self.file.path}: the metadata key {self.arch}.{key} is {value!r}, not a positive number")
        return value

    def names(self) -> Iterator[str]:
        """The parameters that the file holds, in the model's order."""
        for stem in TOP:
            yield from self._held(f"{stem}.weight")
        for layer in range(self.layers):
            for stem in (s for s in LAYER if not s.startswith(self._other_shared)):
                yield from self._held(f"model.layers.{layer}.{stem}.weight", f"model.layers.{layer}.{stem}.bias")
            for bare in LAYER_BARE:
                yield from self._held(f"model.layers.{layer}.{bare}")

    @property
    def _other_shared(self) -> str:
        """GGUF has one name for shared experts, transformers two: the start of the one that this model does not use."""
        return "mlp.shared_expert." if self.arch in ("deepseek2", "glm4moe") else "mlp.shared_experts."

    def _held(self, *names: str) -> Iterator[str]:
        return (name for name in names if self.recipe(name) is not None)

    def recipe(self, name: str) -> Recipe | None:
        """How the parameter `name` is made; None where the file lacks a part of it."""
        if name == "lm_head.weight" and "output.weight" not in self.tensors:
            name = "model.embed_tokens.weight"
        inside = _IN_LAYER.fullmatch(name)
        if inside:
            prefix, local = f"blk.{int(inside[1])}.", inside[2]
            special = _SPECIAL.get(local)
            if special and (found := special(self, prefix)):
                return found
        stored = self.stored_name(name)
        return self._plain(name, self.tensors[stored]) if stored in self.tensors else None

    def stored_name(self, name: str) -> str:
        """What GGUF calls the parameter, "" where it has no name for it."""
        stem, _, leaf = name.rpartition(".")
        if leaf in _BARE_NAMES:
            stem, leaf = f"{stem}.{_BARE_NAMES[leaf]}", "bias"
        elif leaf not in ("weight", "bias"):
            stem, leaf = name, "" if leaf == "A_log" else "weight"
        inside = _IN_LAYER.fullmatch(stem)
        if inside:
            found = _stems(self.arch).get(f"model.layers.0.{inside[2]}", "").replace("blk.0.", f"blk.{int(inside[1])}.", 1)
        else:
            found = _stems(self.arch).get(stem, "")
        return f"{found}.{leaf}" if found and leaf else found

    def _plain(self, name: str, tensor: GGUFTensor) -> Recipe:
        stem, _, leaf = name.rpartition(".")
        module = stem.rpartition(".")[2]
        if module == "shared_expert_gate" and len(tensor.shape) == 1:
            return single(tensor.name, (1, *tensor.shape), view=tensor.shape)
        if module == "conv1d" and len(tensor.shape) == 2:
            return single(tensor.name, (tensor.shape[0], 1, tensor.shape[1]), view=tensor.shape)
        if leaf == "A_log":
            return single(tensor.name, tensor.shape, after="log_of_negative")
        if module.endswith(NORMS_PLUS_ONE.get(self.arch, ("\0",))) and ".linear_attn." not in name:
            return single(tensor.name, tensor.shape, after="minus_one")
        return single(tensor.name, tensor.shape, rows=self._rows(module, tensor))

    def _rows(self, module: str, tensor: GGUFTensor) -> Rows | None:
        if self.arch not in ROTARY_PERMUTED or module not in ("q_proj", "k_proj"):
            return None
        heads = self.hyperparameter("attention.head_count")
        if module == "k_proj" and f"{self.arch}.attention.head_count_kv" in self.file.metadata:
            heads = self.hyperparameter("attention.head_count_kv")
        if tensor.shape[0] % (2 * heads):
            raise WeightError(f"{self.file.path}: {tensor.name} has {tensor.shape[0]} rows, which {heads} heads can't share")
        return rotary_rows(heads, tensor.shape[0])

    def get(self, *names: str) -> list[GGUFTensor] | None:
        """These tensors, or None where one is missing."""
        found = [self.tensors[name] for name in names if name in self.tensors]
        return found if len(found) == len(names) else None

    def each_expert(self, prefix: str, part: str) -> list[GGUFTensor]:
        """The tensors of a file that has one an expert, as Mixtral's first files had."""
        found: list[GGUFTensor] = []
        while tensor := self.tensors.get(f"{prefix}{part}.{len(found)}.weight"):
            found.append(tensor)
        return found

    def same_shape(self, tensors: list[GGUFTensor], rank: int) -> tuple[int, ...]:
        """The shape of tensors that must be alike and of that rank."""
        shape = tensors[0].shape
        for tensor in tensors:
            if tensor.shape != shape or len(shape) != rank:
                raise WeightError(
                    f"{self.file.path}: {tensor.name} has the shape {list(tensor.shape)}, "
                    f"{tensors[0].name} {list(shape)}; both should be alike, of {rank} dimensions"
                )
        return shape


def _gate_up(names: GGUFNames, prefix: str) -> Recipe | None:
    """Gate above up, for every expert: [experts, 2 * intermediate, hidden]."""
    if fused := names.get(f"{prefix}ffn_gate_up_exps.weight"):
        return single(fused[0].name, fused[0].shape)
    if pair := names.get(f"{prefix}ffn_gate_exps.weight", f"{prefix}ffn_up_exps.weight"):
        experts, inner, hidden = names.same_shape(pair, 3)
        whole = (experts, 2 * inner, hidden)
        every = slice(None)
        return Recipe(whole, whole, (Part(pair[0].name, (every, slice(0, inner))), Part(pair[1].name, (every, slice(inner, None)))))
    gates, ups = names.each_expert(prefix, "ffn_gate"), names.each_expert(prefix, "ffn_up")
    if not gates or len(gates) != len(ups):
        return None
    inner, hidden = names.same_shape(gates + ups, 2)
    parts = []
    for expert, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        parts += [Part(gate.name, (expert, slice(0, inner))), Part(up.name, (expert, slice(inner, None)))]
    whole = (len(gates), 2 * inner, hidden)
    return Recipe(whole, whole, tuple(parts))


def _down(names: GGUFNames, prefix: str) -> Recipe | None:
    downs = names.each_expert(prefix, "ffn_down")
    if not downs:
        return None
    hidden, inner = names.same_shape(downs, 2)
    whole = (len(downs), hidden, inner)
    return Recipe(whole, whole, tuple(Part(t.name, (expert,)) for expert, t in enumerate(downs)))


def _kv_b(names: GGUFNames, prefix: str) -> Recipe | None:
    """MLA's up-projection of the latent, split by newer converters in keys (transposed per head) and values."""
    split = names.get(f"{prefix}attn_k_b.weight", f"{prefix}attn_v_b.weight")
    if not split or f"{prefix}attn_kv_b.weight" in names.tensors:
        return None
    keys, values = split
    if len(keys.shape) != 3 or len(values.shape) != 3 or (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
        raise WeightError(
            f"{names.file.path}: {keys.name} {list(keys.shape)} and {values.name} {list(values.shape)} should be "
            "[heads, latent, key] and [heads, value, latent], of the same heads and latent"
        )
    heads, latent, key = keys.shape
    value = values.shape[1]
    parts = (Part(keys.name, (slice(None), slice(0, key)), transposed=True), Part(values.name, (slice(None), slice(key, None))))
    return Recipe((heads * (key + value), latent), (heads, key + value, latent), parts)


def _qkvz(names: GGUFNames, prefix: str) -> Recipe | None:
    """Qwen3-Next's input projection, which transformers keeps grouped by key head and newer GGUFs split in q|k|v and z."""
    split = names.get(f"{prefix}attn_qkv.weight", f"{prefix}attn_gate.weight")
    if not split or f"{prefix}ssm_in.weight" in names.tensors:
        return None
    qkv, gate = split
    heads = names.hyperparameter("ssm.group_count")
    key = names.hyperparameter("ssm.state_size") * heads
    value, hidden = gate.shape
    if qkv.shape != (2 * key + value, hidden) or value % heads:
        raise WeightError(f"{names.file.path}: {qkv.name} {list(qkv.shape)} and {gate.name} {list(gate.shape)} don't fit together")
    k, v = key // heads, value // heads
    whole = (heads, 2 * k + 2 * v, hidden)
    parts = (
        Part(qkv.name, (slice(None), slice(0, 2 * k + v)), rows=grouped_rows(heads, (k, k, v))),
        Part(gate.name, (slice(None), slice(2 * k + v, None))),
    )
    return Recipe((heads * whole[1], hidden), whole, parts)


_SPECIAL = {
    "mlp.experts.gate_up_proj": _gate_up,
    "mlp.experts.down_proj": _down,
    "self_attn.kv_b_proj.weight": _kv_b,
    "linear_attn.in_proj_qkvz.weight": _qkvz,
}
