"""Where a chat is shown: answers on standard output, all else there too if it is a terminal, or on standard error."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from typing import TextIO

from ktopt.chat.display import Display, MarkdownDisplay, PlainDisplay
from ktopt.chat.region import size_of
from ktopt.chat.safety import shown
from ktopt.render.style import Style


class Remarks(logging.Handler):
    """What is logged while an answer is drawn, to be said after it. What an engine logs of a request that failed is left out: it is
    the answer's own error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("ktopt.engine"):
            self._texts.append(record.getMessage())

    def taken(self) -> list[str]:
        """What there is, once."""
        texts, self._texts = self._texts, []
        return texts


class Screen:
    """`style` has colours where the terminal has; `quiet` leaves notes out."""

    def __init__(self, style: Style, quiet: bool = False) -> None:
        self.style, self.quiet, self.remarks = style, quiet, Remarks()

    @property
    def _terminal(self) -> bool:
        return sys.stdout.isatty()

    @property
    def _out(self) -> TextIO:
        return sys.stdout if self._terminal else sys.stderr

    def say(self, text: str) -> None:
        """What was asked for."""
        print(shown(text), file=self._out, flush=True)

    def note(self, text: str) -> None:
        """What is told unasked."""
        if not self.quiet:
            wide = size_of(self._out).columns
            lines = [textwrap.fill(line, wide, break_long_words=False, break_on_hyphens=False) for line in shown(text).split("\n")]
            print(self.style.paint("\n".join(lines), "dim"), file=self._out, flush=True)

    def gap(self) -> None:
        """An empty line between what belongs apart, on a terminal."""
        if self._terminal:
            print(flush=True)

    def error(self, error: object) -> None:
        """What is wrong."""
        print(f"{self.style.paint('error:', 'red')} {shown(str(error))}", file=self._out, flush=True)

    def display(self) -> Display:
        """For one answer: Markdown is drawn where the terminal can go back in what it has written."""
        if self._terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
            return MarkdownDisplay(sys.stdout, self.style)
        return PlainDisplay(sys.stdout)
