"""`ktopt run --mode long_context`: a prompt is read with a progress bar; after the answer come its speed and its cache's tiers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from ktopt.cli.loading import Loaded
from ktopt.cli.run import prompt_of
from ktopt.cli.table import Column, layout
from ktopt.cli.terminal import TokenProgress, style_of


def run_long(args: argparse.Namespace, loaded: Loaded, text: str, options: dict[str, Any]) -> int:
    """Read `text` and answer it. `options` are those of transformers' `generate`."""
    from ktopt.long_context.sampling import chooser
    from ktopt.long_context.session import LongContextSession
    from ktopt.runtime.generation import encode

    model, tokenizer = loaded.model, loaded.tokenizer
    if args.seed is not None:
        import torch

        torch.manual_seed(args.seed)
    ids_1N = encode(model, tokenizer, prompt_of(args, text, tokenizer))["input_ids"]
    with closing(LongContextSession(model, tokenizer, weights=loaded.weights)) as session:
        for piece in _answer(session, ids_1N, args.max_tokens, chooser(model, options)):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
        if not args.quiet:
            print("\n" + style_of(sys.stdout).paint(summary(session, loaded.seconds), "dim"))
    return 0


def _answer(session: Any, ids_1N: Any, most: int, choose: Any) -> Iterator[str]:
    """The text of an answer as it comes, up to a token that ends it."""
    from ktopt.runtime.generation import IncrementalText
    from ktopt.weights.tokenizer import stop_tokens

    config = session.model.generation_config
    ends = stop_tokens(config.eos_token_id if config is not None else None, session.tokenizer) or []
    written = IncrementalText(session.tokenizer)
    with TokenProgress("reading") as session.progress:
        tokens = session.generate(ids_1N, most, choose)
        token = next(tokens, None)
    while token is not None and token not in ends:
        yield written.add([token])
        token = next(tokens, None)
    yield written.rest()


def summary(session: Any, loaded_s: float) -> str:
    """What it took, in two lines, and the tiers of the cache."""
    done = session.statistics
    lines = [
        f"read {done.prompt_tokens:,} tokens in {done.prompt_s:.2f} s ({done.prompt_tokens_per_s:,.1f} tokens/s), "
        f"then {done.decode_tokens_per_s:.1f} tokens/s",
        f"loaded in {loaded_s:.2f} s; the cache holds {session.length:,} of {session.capacity:,} tokens",
    ]
    if table := tiers(session):
        lines += ["", table]
    return "\n".join(lines)


def tiers(session: Any) -> str:
    """The tiers of a session's cache as a table; "" before the first token."""
    if not (table := session.table()):
        return ""
    head, *rows = table
    return layout([Column(title, right=place > 0) for place, title in enumerate(head)], rows, 100, least=8)
