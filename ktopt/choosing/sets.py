"""The rule sets that ship: rules/<model>/<machine>.yaml, by name.

A set says itself what it is for: its file's name is the machine (24gb is one card of 24 GB, 8x80gb eight of 80, any other name is
none), `architectures:` the models, `expect:` their size, and the first sentence of its comment what it does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

ALSO_CALLED = {
    "deepseek-r1/24gb": "deepseek-v3/24gb",
    "deepseek-r1/2x24gb": "deepseek-v3/2x24gb",
    "deepseek-r1/8x80gb": "deepseek-v3/8x80gb",
    "deepseek-r1/cpu": "deepseek-v3/cpu",
    "deepseek-v2-lite/cpu": "deepseek-v3/cpu",
    "kimi-k2/cpu": "deepseek-v3/cpu",
    "llama-3.1-70b/cpu": "llama/cpu",
    "llama-3.1-8b/cpu": "llama/cpu",
    "moonlight/cpu": "deepseek-v3/cpu",
    "qwen3-235b-a22b/cpu": "qwen3-moe/cpu",
    "qwen3-30b-a3b/cpu": "qwen3-moe/cpu",
}
"""Sets that serve several models, by each one's name."""
_CARDS = re.compile(r"(?:(\d+)x)?(\d+)gb")
_COMMENT = re.compile(r"#( ?[^\n]*)\n")


@dataclass(frozen=True, slots=True)
class ShippedSet:
    """One set: its name, such as "deepseek-v3/24gb", and its file."""

    name: str
    path: Path

    @property
    def folder(self) -> str:
        """What it is for: a model, or a family of models."""
        return self.name.partition("/")[0]

    @property
    def cards(self) -> tuple[int, int]:
        """How many cards it needs, of so many GB each; (0, 0) where it needs none."""
        found = _CARDS.fullmatch(self.name.partition("/")[2])
        return (int(found[1] or 1), int(found[2])) if found else (0, 0)

    @property
    def machine(self) -> str:
        """The preset of the machine that it was written for, as `--hardware` takes it."""
        count, size = self.cards
        return f"{count}x{size}GB" if count else "cpu"

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def summary(self) -> str:
        """The first sentence of its comment."""
        return first_sentence(self.text())


def first_sentence(text: str) -> str:
    """The first sentence of the comment at a rule file's beginning."""
    lines = []
    while (found := _COMMENT.match(text)) and found[1].strip():
        lines.append(found[1].strip())
        text = text[found.end() :]
    return re.split(r"(?<=\.)\s", " ".join(lines))[0]


@cache
def shipped_sets() -> tuple[ShippedSet, ...]:
    """Every set once, by name."""
    root = Path(str(files("ktopt.rules")))
    return tuple(ShippedSet(path.relative_to(root).with_suffix("").as_posix(), path) for path in sorted(root.glob("*/*.yaml")))


@cache
def shipped_rules() -> dict[str, Path]:
    """Every name that a set goes by, and its file: "kimi-k2/cpu" is deepseek-v3/cpu."""
    found = {each.name: each.path for each in shipped_sets()}
    return dict(sorted((found | {name: found[other] for name, other in ALSO_CALLED.items()}).items()))


def named(text: str) -> Path | None:
    """The file of the set that a command line names: smollm2/cpu, or rules/smollm2/cpu.yaml. None where there is none."""
    return shipped_rules().get(text.replace("\\", "/").removeprefix("rules/").removesuffix(".yaml"))


def called(file: str, model: str) -> str:
    """What messages call a rule file: a set that ships by its name for a model, any other by its path."""
    return next((name_for(each, model) for each in shipped_sets() if str(each.path) == file), file)


def names_beside(text: str) -> list[str]:
    """The sets of the model that a set's name begins with."""
    folder, slash, _ = text.partition("/")
    return [name for name in shipped_rules() if slash and name.startswith(f"{folder}/")]


def name_for(shipped: ShippedSet, model: str) -> str:
    """What a set is called for a model: the name that has the model's, where there is one."""
    names = (other for other, name in ALSO_CALLED.items() if name == shipped.name and is_of(other, model))
    return next(names, shipped.name)


def is_of(name: str, model: str) -> bool:
    """Whether a set's name is a model's: kimi-k2/cpu of kimi-k2, smollm2/cpu of models/SmolLM2-135M-Instruct.Q4_1.gguf."""
    folder = name.partition("/")[0].replace("-", "")
    return bool(folder) and folder in Path(model).name.lower().replace("-", "")
