"""Tiny random models, plans made by hand, and weight sources, for the tests of apply."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf_fixtures import tiny_model

import ktopt
from ktopt import registry
from ktopt.operator import build_config
from ktopt.plan import ModelRef, Plan, RuleRef, Step, Transfer
from ktopt.trees import graph_from_module
from ktopt.weights import MissingTensor, StoredTensor

KINDS = ("llama", "tied", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3_text")
PROMPT = torch.tensor([[5, 6, 7, 8, 9]])


def make_model(kind: str = "llama", seed: int = 0):
    """A tiny random model of three layers (Gemma has its own number); "tied" is a llama whose head is its embedding."""
    if kind == "gemma3_text":
        return tiny_model(kind, seed)
    changes = {"num_hidden_layers": 3, "tie_word_embeddings": kind == "tied"}
    return tiny_model("llama" if kind == "tied" else kind, seed, **changes)


def greedy(model, tokens: int = 12, prompt: torch.Tensor = PROMPT) -> list[int]:
    """The tokens that a model continues a prompt with."""
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    return made[0, prompt.shape[1] :].tolist()


def hand_plan(model, *, devices=None, operators=None, transfers=(), dtype="float32", rule_line=7) -> Plan:
    """A plan of `model` made without the compiler: `devices` maps path prefixes to devices (the longest wins), `operators` maps
    paths to (operator, kwargs), which a rule for each operator decided. An unknown operator counts as the default."""
    graph = graph_from_module(model)
    names = ["KTransformersLinear", *sorted({name for name, _ in (operators or {}).values()} - {"KTransformersLinear"})]
    steps = []
    for module in graph.modules:
        device = placed(module.path, devices or {})
        operator, kwargs = (operators or {}).get(module.path, ("default", {}))
        spec = registry.find(operator) or registry.find("default")
        config = build_config(spec, kwargs)[0] or spec.config()
        size = spec.footprint(module, config, dtype).weight_bytes if module.tensors else 0
        rule = names.index(operator) if module.path in (operators or {}) else None
        steps.append(Step(module.path, module.cls.name, module.role, operator, kwargs, device, device, dtype, size, rule=rule))
    rules = tuple(RuleRef("linear" if i == 0 else name, "rules.yaml", rule_line, 3, name) for i, name in enumerate(names))
    config = model.config.to_dict()
    ref = ModelRef(str(config.get("_name_or_path") or "tiny"), config["model_type"], (type(model).__name__,), graph.digest, config)
    return Plan(ref, "rules.yaml", "0" * 64, rules, tuple(steps), tuple(transfers), "cpu", dtype, ktopt_version=ktopt.__version__)


def placed(path: str, devices: dict[str, str]) -> str:
    inside = [prefix for prefix in devices if not prefix or path == prefix or path.startswith(prefix + ".")]
    return devices[max(inside, key=len)] if inside else "cpu"


class StateSource:
    """A weight source over a dict of tensors, with faults on demand: `fail_at` is the name whose reading raises."""

    def __init__(self, state, fail_at: str = "", error: Exception | None = None):
        self.state = {name: tensor.clone() for name, tensor in state.items()}
        self.path = Path("weights.fake")
        self.fail_at, self.error = fail_at, error or OSError("the disk went away")
        self.reads: list[str] = []

    @property
    def files(self):
        return (self.path,)

    def __contains__(self, name):
        return name in self.state

    def names(self):
        return iter(self.state)

    def stored(self, name):
        if name not in self.state:
            raise MissingTensor(f"{self.path} has no {name}")
        tensor = self.state[name]
        return StoredTensor(name, (name,), tuple(tensor.shape), ("F32",), tensor.nbytes, self.path)

    def read(self, name, dtype, device="cpu"):
        self.reads.append(name)
        if name == self.fail_at:
            raise self.error
        return self.state[name].to(device=device, dtype=dtype, copy=True)

    def close(self):
        pass


def source_of(model, **faults) -> StateSource:
    """The weights of a model as a file would hold them: without the tied copies."""
    state = model.state_dict()
    for target in model.all_tied_weights_keys:
        state.pop(target, None)
    return StateSource(state, **faults)


def cut(transfers: tuple[Transfer, ...], index: int) -> tuple[Transfer, ...]:
    """The transfers without one."""
    return transfers[:index] + transfers[index + 1 :]


def make_tokenizer():
    """A byte-level tokenizer of 320 tokens: 256 bytes, <|start|>, <|end|>, and unused ones. It pads on the left."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    words = [*bytes_to_unicode().values(), "<|start|>", "<|end|>", *(f"<unused{i}>" for i in range(62))]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for m in messages %}<|start|>{{ m['role'] }} {{ m['content'] }}<|end|>{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|end|>", padding_side="left",
        chat_template=template,
    )  # fmt: skip
