"""Servers as processes that benchmarks start, ask, watch and end: `ktopt serve`, and llama.cpp's llama-server on the same file."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT
from serve_client import HOST, ask

from ktopt.runtime.foreign_load import ForeignLoad
from ktopt.runtime.threads import SPIN_VARIABLES

START_S = 300.0
RULES = ROOT / "rules" / "smollm2"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Kind:
    """A server that can be started: the name that tables have, its command without a port, the body of a request that reads the
    prompt anew, and of one that may use what is cached of it."""

    name: str
    command: tuple[str, ...]
    fresh: tuple[tuple[str, Any], ...] = ()


def ktopt_kind(weights: Path, *, slots: int, tokens: int, threads: int, rules: str = "cpu", more: Sequence[str] = ()) -> Kind:
    """`ktopt serve` with balance_serve, room for so many requests and tokens."""
    command = [sys.executable, "-P", "-m", "ktopt", "serve", str(RULES / f"{rules}.yaml"), "--model", "smollm2-135m"]
    command += ["--weights", str(weights), "--backend_type", "balance_serve", "--max_batch_size", str(slots)]
    command += ["--cache_lens", str(tokens), "--cpu_infer", str(threads), *more]
    return Kind("ktopt", tuple(command))


def llama_kinds(binary: Path, weights: Path, *, slots: int, tokens: int, threads: int) -> list[Kind]:
    """llama-server with as many slots, flash attention on and off. Its cache of prompts is kept to what slots hold."""
    command = [str(binary), "-m", str(weights), "-t", str(threads), "-tb", str(threads), "-np", str(slots)]
    command += ["-c", str(tokens), "-cram", "0", "--no-ui"]
    names = {"on": "llama-server flash", "off": "llama-server plain"}
    return [Kind(name, (*command, "-fa", flash), (("cache_prompt", False),)) for flash, name in names.items()]


class Server:
    """A process that answers on `port`. Use it as a context manager: it is killed where it hasn't ended."""

    def __init__(self, kind: Kind, port: int | None = None) -> None:
        self.kind, self.port = kind, port or free_port()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {name: value for name, value in os.environ.items() if name not in SPIN_VARIABLES}
        command = [*kind.command, "--host", HOST, "--port", str(self.port)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": self.log, "stderr": self.log}
        environment["HF_HUB_OFFLINE"] = "1"
        self.process = subprocess.Popen(command, **streams, cwd=tempfile.gettempdir(), env=environment)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()

    async def ready(self) -> float:
        """Wait until it answers; seconds that this took. RuntimeError with its log where it ends or takes too long."""
        start = time.perf_counter()
        while time.perf_counter() - start < START_S:
            if self.process.poll() is not None:
                break
            try:
                if (await ask(self.port, "/health", timeout_s=5)).status == 200:
                    return time.perf_counter() - start
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{' '.join(self.kind.command)} doesn't answer:\n{self.said()[-3000:]}")

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """End it by a signal; its exit code, -9 where it didn't end in time."""
        self.process.send_signal(how)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def said(self) -> str:
        """Its log so far."""
        return os.pread(self.log.fileno(), 1 << 26, 0).decode(errors="replace")

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES

    def cpu_s(self) -> float:
        """Seconds that it has worked, all threads together."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


class Busy:
    """From its making on: cores that this process, a server and all others use."""

    def __init__(self, server: Server) -> None:
        self._server, self._load, self._start = server, ForeignLoad(), time.perf_counter()
        self._own, self._served = time.process_time(), server.cpu_s()

    def cores(self) -> dict[str, float]:
        took = time.perf_counter() - self._start
        server = (self._server.cpu_s() - self._served) / took
        client = (time.process_time() - self._own) / took
        return {"server": server, "client": client, "foreign": max(0.0, (self._load.cores() or 0.0) - server)}


def die_with_servers() -> None:
    """Make SIGTERM end this process by an exception, so that servers are killed on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


async def metrics(port: int, headers: dict[str, str] | None = None) -> dict[str, float]:
    """What /metrics says, by name with labels."""
    text = (await ask(port, "/metrics", headers=headers)).body.decode()
    found = re.findall(r"^([a-zA-Z_:][^ #]*(?:\{[^}]*\})?) ([-+0-9.eE]+|NaN|[+-]Inf)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}
