"""Whether a grammar can be compiled, found out by a process of its own: `python -m ktopt.engine.grammar_check` reads questions as
lines of JSON and answers each with a line.

A stranger's schema can keep a compiler busy for hours (an intersection of a few patterns does). A thread can't be stopped, but a
process can, and its memory has a bound.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import threading
from typing import Any

from ktopt.engine.request import GrammarSpec

WHITESPACE = r"( |\n[ \t]{0,40})?"
"""Between the tokens of JSON: less than JSON allows, since models that may write any whitespace write it forever."""
CHECK_S = 2.0
"""Seconds of processor time that a grammar may take to compile: a machine that is busy refuses none for that."""
PATIENCE_S = 20.0
"""Seconds that it may take in all."""
CHECK_BYTES = 2 << 30
"""Memory that it may take."""
START_S = 30.0
"""Seconds that the process may take to begin."""


def written(spec: GrammarSpec) -> str:
    """A grammar as llguidance takes it. ValueError where a schema isn't JSON."""
    from llguidance import LLMatcher

    if spec.kind == "regex":
        return str(LLMatcher.grammar_from_regex(spec.text))
    if spec.kind == "lark":
        return str(LLMatcher.grammar_from_lark(spec.text))
    schema = spec.text if spec.kind == "json_schema" else '{"type": "object"}'
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))


def limits() -> Any:
    """What compiling and each token may take, in llguidance's measures."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=500_000, max_grammar_size=200_000, max_lexer_states=50_000, verbose_errors=False)


def fault_of(spec: GrammarSpec) -> str:
    """What is wrong with a grammar; "" where it can be compiled."""
    from llguidance import LLMatcher

    try:
        failed, said = LLMatcher.validate_grammar_with_warnings(written(spec), limits=limits())
    except ValueError as error:
        return str(error)
    return str(said[0]).removesuffix("<non-verbose/>").strip() if failed else ""


class Checker:
    """Asks the process, which it starts at the first question and again after it had to be ended. One question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def fault_of(self, spec: GrammarSpec) -> str:
        """What is wrong with a grammar, one that takes too long or too much included; "" where nothing is."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([spec.kind, spec.text]) + "\n")
                process.stdin.flush()
                answer = self._line(process, PATIENCE_S)
            except BrokenPipeError:
                answer = ""
            if answer:
                return str(json.loads(answer))
            self.close()
            return f"it takes more than {CHECK_S:g} s or {CHECK_BYTES >> 30} GB to compile: make it simpler"

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            command = [sys.executable, "-P", "-m", "ktopt.engine.grammar_check"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            self._line(self._process, START_S)
        return self._process

    def _line(self, process: subprocess.Popen[str], wait_s: float) -> str:
        """Its next line; "" where none comes in time, or it has ended."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], wait_s)
        return process.stdout.readline() if ready else ""

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # where there is no such bound, time alone is one
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (CHECK_BYTES, CHECK_BYTES))
    import llguidance  # noqa: F401  # before it says that it is ready

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        _end_after(CHECK_S)
        fault = fault_of(GrammarSpec(*json.loads(line)))
        _end_after(0)
        print(json.dumps(fault), flush=True)


def _end_after(processor_s: float) -> None:
    """Have the process end by a signal once it has taken so much time, whatever it does then; 0: not any more."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, processor_s)


if __name__ == "__main__":
    main()
