"""`ktopt serve`: apply a rule file and answer requests of OpenAI's API over HTTP."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.cli.loading import Loaded, add_force_think, add_what_runs, load
from ktopt.cli.options import model_argument, weights_exist
from ktopt.cli.terminal import size
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.plan_options import LONG_CONTEXT
from ktopt.runtime.memory import return_large_blocks
from ktopt.runtime.threads import calm_openmp, parse_threads
from ktopt.server.flags import add_ktransformers, take_over
from ktopt.server.settings import DEFAULT_PORT, LOOPBACK, Sampled, Served, Settings

if TYPE_CHECKING:
    from ktopt.cache.paged import PrefixFolder
    from ktopt.engine.engine import Engine

SINGLE, BATCH = "ktransformers", "balance_serve"
LOG_LEVELS = ("debug", "info", "warning", "error")
CACHE_TOKENS = 16_384
PREFIX_BYTES = 8 << 30
PAGED_ALONE = ("cache_lens", "page_size", "steady", "prefix_folder", "prefix_bytes")
OWN_RULES = "(rules of ktopt's own)"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
MOST = 1 << 30
_COUNTS = ("cache_lens", "page_size", "max_batch_size", "max_waiting", "max_new_tokens", "max_prompt_tokens", "max_body_bytes")
_RANGES: dict[str, tuple[float, int]] = {
    "port": (0, 65535),
    **dict.fromkeys((*_COUNTS, "max_choices", "max_streams", "chunk_size"), (1, MOST)),
    "prefix_bytes": (1, 1 << 50),
    "drain_s": (0, MOST),
    "read_timeout_s": (0.1, MOST),
}


def configure(parser: argparse.ArgumentParser) -> None:
    add_what_runs(parser)
    _add_engine(parser)
    _add_network(parser)
    _add_limits(parser)
    _add_sampling(parser)
    add_ktransformers(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--backend_type",
        choices=(SINGLE, BATCH),
        help=f"{BATCH}: many requests at once, on a paged cache; {SINGLE}: one at a time (default: {BATCH}, where the model can)",
    )
    group.add_argument("--cache_lens", type=int, metavar="N", help=f"tokens that the paged cache holds (default {CACHE_TOKENS:,})")
    group.add_argument("--page_size", type=int, metavar="N", help="tokens of a page of that cache (default 64)")
    group.add_argument("--max_batch_size", type=int, default=16, metavar="N", help="answers written at once, at most (default 16)")
    group.add_argument("--steady", action="store_true", help="answers have the same bits whoever else is answered; slower alone")
    group.add_argument("--prefix_folder", metavar="DIR", help="keep pages of prompts there, for when the server starts again")
    group.add_argument("--prefix_bytes", type=int, metavar="N", help=f"bytes that they may take (default {PREFIX_BYTES:,})")
    add_force_think(group)
    group.add_argument("--max_waiting", type=int, default=256, metavar="N", help="requests that may wait (default 256)")


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen at (default 127.0.0.1; 0.0.0.0 is all)")
    group.add_argument("--port", type=int, default=DEFAULT_PORT, metavar="N", help=f"port (default {DEFAULT_PORT}; 0: any)")
    group.add_argument("--api_key", metavar="KEY", help="what requests must bring (default: $KTOPT_API_KEY, or none)")
    group.add_argument("--model_name", action="append", metavar="NAME", help="what requests call the model; repeatable")
    group.add_argument("--any_model", action="store_true", help="take requests for whatever model name")
    group.add_argument(
        "--allowed-hosts", action="append", default=[], metavar="NAME", help="a name that this server is reached by; repeatable"
    )
    group.add_argument(
        "--allowed-origins", action="append", default=[], metavar="URL", help="web pages that may call it (https://...); repeatable"
    )
    group.add_argument("--ssl_keyfile", metavar="FILE", help="TLS key, in PEM")
    group.add_argument("--ssl_certfile", metavar="FILE", help="its certificate, in PEM")
    group.add_argument("--log_file", metavar="FILE", help="where the log goes (default: standard error)")
    group.add_argument("--log_level", choices=LOG_LEVELS, default="info", help="info has a line for each request (default)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    usual = Settings()
    group = parser.add_argument_group("limits")

    def add(name: str, default: Any, what: str) -> None:
        group.add_argument(name, type=type(default), default=default, metavar="N", help=f"{what} (default {default:,})")

    add("--max_new_tokens", usual.max_new_tokens, "new tokens of a request at most, and where it doesn't say")
    group.add_argument("--max_prompt_tokens", type=int, metavar="N", help="tokens of a prompt at most (default: the context)")
    add("--max_body_bytes", usual.max_body_bytes, "bytes of a request")
    add("--max_choices", usual.max_choices, "choices of a request (n)")
    add("--max_streams", usual.max_streams, "requests answered or waiting at once")
    add("--read_timeout_s", usual.write_timeout_s, "seconds that a client may leave its answer unread")
    add("--drain_s", usual.drain_s, "seconds for running requests to end when the server is told to stop")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling, where a request doesn't say (default: the model's generation config)")
    group.add_argument("--temperature", type=float, metavar="T")
    group.add_argument("--top_p", type=float, metavar="P")
    group.add_argument("--top_k", type=int, metavar="K")
    group.add_argument("--repetition_penalty", type=float, metavar="X")
    group.add_argument("--frequency_penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--presence_penalty", type=float, default=0.0, metavar="X")


def run(args: argparse.Namespace) -> int:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise UsageError(f"the server needs {', '.join(missing)}: pip install 'ktopt[serve]'")
    take_over(args)
    weights_exist(args)
    settings, certificate = settings_of(args), _certificate(args)
    _check(args, settings)
    calm_openmp()
    return_large_blocks()
    threads = parse_threads(args.threads, args.affinity)
    threads.stay_on_cores()
    from ktopt.long_context.rules import rules_for
    from ktopt.server.running import bound

    bound(settings).close()  # what can't be bound is told before weights are loaded
    _log_to(args.log_file, args.log_level)
    if args.rules is None and args.mode != LONG_CONTEXT:
        args.rules = replace(rules_for(model_argument(args), args.device or "cpu"), path=OWN_RULES)
        _tell(f"without RULES, by those that ktopt has for any model on {args.device or 'cpu'}")
    args.room = args.cache_lens or CACHE_TOKENS
    loaded = load(args, threads)
    _check_class(args.architectures, loaded)
    with ExitStack() as kept:
        _serve(args, loaded, _engine(args, loaded, kept), settings, certificate)
    return 0


def _check_class(wanted: str | None, loaded: Loaded) -> None:
    """UsageError where the model isn't what --architectures says."""
    if wanted not in (None, found := type(loaded.model).__name__):
        raise UsageError(f"--architectures {wanted}: this model is a {found}; leave it out, since the model's config says so")


def _serve(
    args: argparse.Namespace, loaded: Loaded, engine: Engine, settings: Settings, certificate: tuple[str, str] | None
) -> None:
    from ktopt.server.running import serve

    _tell(f"loaded in {loaded.seconds:.2f} s; {_engine_line(engine)}")
    if settings.host not in LOOPBACK and settings.api_key is None:
        _tell(f"warning: listening at {settings.host} without --api_key: whoever reaches this port can use the model")
    serve(engine, settings, _served(args, loaded), certificate=certificate, ready=lambda at: _tell(f"serving at {at}/v1"))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def settings_of(args: argparse.Namespace) -> Settings:
    key = args.api_key if args.api_key is not None else os.environ.get("KTOPT_API_KEY") or None
    if key is not None and (" " in key or not key.isprintable()):
        raise UsageError("--api_key: a key has no blanks or control characters, which no request could bring")
    return Settings(
        host=args.host,
        port=args.port,
        api_key=key,
        any_model=args.any_model,
        force_think=args.force_think,
        max_new_tokens=args.max_new_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        max_body_bytes=args.max_body_bytes,
        max_choices=args.max_choices,
        max_streams=args.max_streams,
        write_timeout_s=args.read_timeout_s,
        drain_s=args.drain_s,
        allowed_hosts=tuple(args.allowed_hosts),
        allowed_origins=tuple(args.allowed_origins),
        sampled=Sampled(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            repetition_penalty=args.repetition_penalty,
            frequency_penalty=args.frequency_penalty,
            presence_penalty=args.presence_penalty,
        ),
    )


def _certificate(args: argparse.Namespace) -> tuple[str, str] | None:
    if args.ssl_keyfile is None and args.ssl_certfile is None:
        return None
    if args.ssl_keyfile is None or args.ssl_certfile is None:
        raise UsageError("--ssl_keyfile and --ssl_certfile go together")
    for name in ("ssl_keyfile", "ssl_certfile"):
        if not Path(getattr(args, name)).is_file():
            raise UsageError(f"--{name} {getattr(args, name)}: no such file")
    return args.ssl_keyfile, args.ssl_certfile


def _check(args: argparse.Namespace, settings: Settings) -> None:
    """UsageError for numbers that can't be meant."""
    from ktopt.engine.request import Refused, Sampling, check_sampling

    for name, (least, most) in _RANGES.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise UsageError(f"--{name}: from {least} to {most:,}, not {value}")
    if args.mode == LONG_CONTEXT and args.backend_type is not None:
        raise UsageError(f"--mode {LONG_CONTEXT} has an engine of its own; leave out --backend_type")
    paged = args.backend_type != SINGLE and args.mode != LONG_CONTEXT
    if not paged and (given := [name for name in PAGED_ALONE if getattr(args, name)]):
        raise UsageError(f"--{given[0]} is of the paged cache, which --backend_type {BATCH} has")
    if args.prefix_bytes is not None and args.prefix_folder is None:
        raise UsageError("--prefix_bytes is of --prefix_folder, which isn't given")
    usual = settings.sampled
    try:
        check_sampling(
            Sampling(
                temperature=usual.temperature,
                top_p=usual.top_p,
                top_k=usual.top_k,
                repetition_penalty=usual.repetition_penalty,
                frequency_penalty=usual.frequency_penalty,
                presence_penalty=usual.presence_penalty,
            ),
            1,
        )
    except Refused as error:
        raise UsageError(f"--{error}") from None


def _log_to(path: str | None, level: str) -> None:
    """Send the log to a file or standard error; the access log's lines are JSON, and stand by themselves."""
    try:
        handler = logging.FileHandler(path, encoding="utf-8") if path else logging.StreamHandler()
    except OSError as error:
        raise UsageError(f"--log_file {path}: {error.strerror or error}") from None
    handler.setFormatter(_Lines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class _Lines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if record.name == "ktopt.access" else super().format(record)


def _engine(args: argparse.Namespace, loaded: Loaded, kept: ExitStack) -> Engine:
    """The engine that the arguments ask for; `kept` closes what must outlive it."""
    if args.mode == LONG_CONTEXT:
        from ktopt.engine.single import SingleEngine
        from ktopt.long_context.session import LongContextSession

        session = LongContextSession(loaded.model, loaded.tokenizer, weights=loaded.weights)
        return SingleEngine.over_session(session, max_waiting=args.max_waiting)
    if args.backend_type != SINGLE:
        from ktopt.cache.paged import cannot_page

        why = cannot_page(loaded.model)
        if not why:
            return _batch_engine(args, loaded, kept)
        if args.backend_type == BATCH:
            raise KtoptError(f"--backend_type {BATCH}: {why}; --backend_type {SINGLE} serves this model, one request at a time")
        _tell(f"one request at a time, as {why}")
    from ktopt.engine.single import SingleEngine

    return SingleEngine(loaded.model, loaded.tokenizer, max_waiting=args.max_waiting)


def _batch_engine(args: argparse.Namespace, loaded: Loaded, kept: ExitStack) -> Engine:
    from ktopt.cache.paged import PagedCache
    from ktopt.engine.batch import BatchEngine

    pages = {"page_tokens": args.page_size} if args.page_size else {}
    tokens = args.cache_lens or CACHE_TOKENS
    cache = PagedCache(loaded.model, tokens=tokens, steady=args.steady, prefixes=_prefixes(args, loaded), **pages)
    kept.callback(cache.close)
    chunk = {"chunk_size": args.chunk_size} if args.chunk_size else {}
    return BatchEngine(
        loaded.model, loaded.tokenizer, cache, max_running=args.max_batch_size, max_waiting=args.max_waiting, **chunk
    )


def _prefixes(args: argparse.Namespace, loaded: Loaded) -> PrefixFolder | None:
    """The folder of --prefix_folder, for this model alone."""
    if args.prefix_folder is None:
        return None
    from ktopt.cache.paged import PrefixFolder
    from ktopt.config import LongContextSettings
    from ktopt.long_context.identity import model_hash

    found = model_hash(loaded.model.ktopt_plan, loaded.weights or loaded.name, LongContextSettings())
    return PrefixFolder(args.prefix_folder, model_hash=found, quota_bytes=args.prefix_bytes or PREFIX_BYTES)


def _engine_line(engine: Engine) -> str:
    status = engine.status()
    cache = f", a cache of {size(sum(status.memory_bytes.values()))}" if status.memory_bytes else ""
    return f"{engine.backend}: {status.max_running} at once, a context of {engine.context_tokens:,} tokens{cache}"


def _served(args: argparse.Namespace, loaded: Loaded) -> Served:
    plan = getattr(loaded.model, "ktopt_plan", None)
    weights: dict[str, int] = {}
    for step in plan.steps if plan is not None else ():
        for device, count in step.held_bytes.items():
            weights[device] = weights.get(device, 0) + count
    return Served(
        names=tuple(args.model_name or [Path(loaded.name).stem if loaded.name.endswith(".gguf") else Path(loaded.name).name]),
        plan=plan,
        created=int(time.time()),
        weight_bytes={device: count for device, count in weights.items() if count},
        details={"weights": loaded.weights, "loaded_s": round(loaded.seconds, 2)},
    )
