"""What is open in the editor, and when it is checked.

Texts are checked in a thread of their own, one at a time, while the connection is served. An edit is checked at once. Edits that
come during a check are checked together, after it; where a check takes long, after a pause.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lsprotocol import types

from ktopt.lsp.analysis import Analyser, Analysis, looks_like_rules
from ktopt.lsp.rules import Known
from ktopt.lsp.text import Shown, Text

log = logging.getLogger(__name__)

SLOW_S = 0.1
"""A check that takes longer is made only once the typing pauses."""
LONGEST_PAUSE_S = 0.5
LONGEST_WAIT_S = 5.0
"""How long a request waits for the check of the text that it is about."""
IDLE_S = 1.0
"""After so long without a check, garbage is collected: during one it would cost as much as the check itself."""
MOST_UNCOLLECTED = 300
"""Checks after which garbage is collected in any case."""


@dataclass
class OpenFile:
    """A document that the editor has open.

    analysis  of the last text that was checked; good, of the last that compiled
    is_rules  whether it has ever looked like a rule file since it was opened
    stale     whether there is something newer to check
    checking  the task that checks it, as long as there is something to check
    took_s    how long the last check took
    """

    uri: str
    path: str
    text: Text
    version: int
    analysis: Analysis | None = None
    good: Analysis | None = None
    is_rules: bool = False
    stale: bool = True
    checking: asyncio.Task[None] | None = None
    took_s: float = 0.0

    @property
    def shown(self) -> Shown:
        return Shown.of(self.text, self.path)


Asked = tuple[OpenFile, Analysis, Known]


@dataclass
class Files:
    """The open documents. `checked` is called when a document's present text has been checked."""

    analyser: Analyser
    checked: Callable[[OpenFile, Analysis], None]
    open: dict[str, OpenFile] = field(default_factory=dict)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "check"))
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    tidying: asyncio.TimerHandle | None = None
    uncollected: int = 0

    def add(self, file: OpenFile) -> None:
        self.open[file.uri] = file
        self.check(file)

    def change(self, uri: str, version: int, changes: list[types.TextDocumentContentChangeEvent]) -> None:
        file = self.open.get(uri)
        if file is None:
            return
        for change in changes:
            file.text = file.text.changed(change)
        file.version = version
        self.check(file)

    def check_all(self) -> None:
        for file in self.open.values():
            self.check(file)

    def check(self, file: OpenFile) -> None:
        """Have a document checked, once what is being checked is."""
        file.stale = True
        if file.checking is None:
            file.checking = self.start(self.keep_checked(file))

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside what else is done."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def keep_checked(self, file: OpenFile) -> None:
        """Check a document until there is nothing newer to check."""
        try:
            while file.stale and self.open.get(file.uri) is file:
                if file.took_s > SLOW_S:
                    await self.pause(file)
                await self.check_once(file)
        except Exception:
            log.exception("%s: can't be checked", file.uri)
        finally:
            file.checking = None
            self.tidy_later()

    async def pause(self, file: OpenFile) -> None:
        """Wait until no edit has come for as long as a check takes."""
        text = None
        while text is not file.text:
            text = file.text
            await asyncio.sleep(min(file.took_s, LONGEST_PAUSE_S))

    async def check_once(self, file: OpenFile) -> None:
        file.stale = False
        shown = file.shown
        file.is_rules = file.is_rules or looks_like_rules(shown.text.text)
        if not file.is_rules:
            file.analysis = Analysis(shown)
            return
        start = time.perf_counter()
        loop = asyncio.get_running_loop()
        analysis = await loop.run_in_executor(self.thread, self.analyser.analyse, shown, self.is_imported(file))
        file.took_s = time.perf_counter() - start
        self.uncollected += 1
        file.analysis = analysis
        if analysis.ruleset is not None:
            file.good = analysis
        if shown.text is file.text and self.open.get(file.uri) is file:
            self.checked(file, analysis)

    def is_imported(self, file: OpenFile) -> bool:
        """Whether another open file imports this one, so that its ignore comments may be for that one's findings."""
        others = (o.analysis.check for o in self.open.values() if o is not file and o.analysis is not None)
        return any(check is not None and file.path in check.sources for check in others)

    async def current(self, uri: str, wait_s: float = LONGEST_WAIT_S) -> Asked | None:
        """A rule file, the analysis of its present text (an older one where the check takes too long), and the last that compiled.
        None for other files."""
        file = self.open.get(uri)
        if file is not None and file.checking is not None:
            await asyncio.wait({file.checking}, timeout=wait_s)
        if file is None or file.analysis is None or not file.is_rules:
            return None
        return file, file.analysis, Known.of(file.analysis, file.good)

    def tidy_later(self) -> None:
        """Collect garbage once nobody types."""
        if self.tidying is not None:
            self.tidying.cancel()
        wait = IDLE_S if self.uncollected < MOST_UNCOLLECTED else 0.0
        self.tidying = asyncio.get_running_loop().call_later(wait, self.tidy)

    def tidy(self) -> None:
        self.uncollected = 0
        self.thread.submit(gc.collect)
