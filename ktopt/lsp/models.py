"""The models that files are checked on: each tree is loaded once, and a slow one in the background.

Trees that ship with ktopt take some milliseconds. Another config's is built by transformers, which takes many seconds; until it is
there, files are checked without it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ktopt.diagnostics import KtoptError
from ktopt.graph import ModuleGraph
from ktopt.models.shipped import known_models
from ktopt.placement import Hardware

Key = tuple[str, int]


@dataclass
class Models:
    """Trees by name, and machines by name.

    loaded   called from another thread when a tree that was waited for is there, or can't be had
    """

    loaded: Callable[[str], None] = lambda name: None
    trees: dict[Key, ModuleGraph | str | None] = field(default_factory=dict)
    machines: dict[str, Hardware | str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tree(self, name: str) -> ModuleGraph | str | None:
        """A model's tree; None while it is being built; a message where it can't be had."""
        key = (name, _changed(name))
        with self.lock:
            if key in self.trees:
                return self.trees[key]
            self.trees[key] = None
        if name in known_models() or not os.path.exists(name):
            self.load(key)
        else:
            threading.Thread(target=self.build, args=(key,), daemon=True, name=f"tree of {name}").start()
        return self.trees[key]

    def load(self, key: Key) -> None:
        from ktopt.trees import load_tree

        try:
            self.trees[key] = load_tree(key[0])
        except KtoptError as error:
            self.trees[key] = str(error)
        except Exception as error:  # whatever transformers does to a config, files are still checked on the rest
            self.trees[key] = f"{key[0]}: the tree can't be built: {type(error).__name__}: {error}"
        if isinstance(self.trees[key], str):
            return
        gc.collect()
        gc.freeze()  # a tree stays: the collector need not look through its many thousand objects ever again

    def build(self, key: Key) -> None:
        self.load(key)
        self.loaded(key[0])

    def machine(self, name: str) -> Hardware | str:
        """A machine, or a message where there is none of that name. What could not be had is looked for again each time."""
        found = self.machines.get(name)
        if not isinstance(found, Hardware):
            from ktopt.hardware import load_hardware

            try:
                found = load_hardware(name)
            except KtoptError as error:
                found = str(error)
            self.machines[name] = found
        return found

    def forget(self) -> None:
        """Ask again for everything that isn't a shipped tree."""
        self.machines.clear()
        with self.lock:
            self.trees = {key: tree for key, tree in self.trees.items() if isinstance(tree, ModuleGraph) or tree is None}


def _changed(name: str) -> int:
    """When a model's file last changed; 0 for a name, or what isn't there."""
    for path in (os.path.join(name, "config.json"), name):
        try:
            return os.stat(path).st_mtime_ns
        except (OSError, ValueError):
            continue
    return 0
