"""The flags of KTransformers' server, and what becomes of each here: another name of one of ktopt's, or a refusal with its reason.

The list is that of its argument parser. Flags that have the same name here (--host, --chunk_size, ...) need no entry.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ktopt.diagnostics import UsageError

_NOTHING = "KTransformers reads it and does nothing with it"
_SPECULATIVE = "this server has no draft models"
_BY_CACHE_LENS = "--cache_lens says how many tokens the cache holds, in main memory"
_NO_STORE = "this server keeps no files, users or assistants"
_IN_MESSAGES = "is for requests to say, in their messages"

REFUSED: dict[str, str] = {
    "--q4_gguf_path": _NOTHING,
    "--draft_model_path": _SPECULATIVE,
    "--draft_gguf_path": _SPECULATIVE,
    "--draft_model_dir": _SPECULATIVE,
    "--no_draft_scale": _SPECULATIVE,
    "--ngram_decoding": _SPECULATIVE,
    "--json_mode": "requests say so: response_format",
    "--healing": _NOTHING,
    "--ban_strings": _NOTHING,
    "--gpu_split": "rules say what lies on which device",
    "--length": "the model's config says its context; --max_prompt_tokens is a lower bound",
    "--rope_scale": "the model's config says it",
    "--rope_alpha": "the model's config says it",
    "--no_flash_attn": _NOTHING,
    "--low_mem": "rules say what lies on which device",
    "--experts_per_token": "the model's config says it",
    "--load_q4": "the weights' own types are kept where operators compute on them",
    "--fast_safetensors": "weights are mapped from their files in any case",
    "--modes": _NOTHING,
    "--username": _IN_MESSAGES,
    "--botname": _IN_MESSAGES,
    "--system_prompt": _IN_MESSAGES,
    "--smoothing_factor": _NOTHING,
    "--dynamic_temperature": _NOTHING,
    "--top_a": _NOTHING,
    "--skew": _NOTHING,
    "--typical": _NOTHING,
    "--response_chunk": _NOTHING,
    "--no_code_formatting": _NOTHING,
    "--cache_8bit": "the cache is held as the plan's operators hold it",
    "--cache_q4": "the cache is held as the plan's operators hold it",
    "--print_timings": "the access log has them, and /metrics",
    "--amnesia": _NOTHING,
    "--batch_size": "--max_batch_size says how many answers are written at once",
    "--kvc2_config_dir": _BY_CACHE_LENS,
    "--log_dir": "--log_file is a path",
    "--backup_count": "a log file isn't rotated here: logrotate and its like do that",
    "--db_type": _NO_STORE,
    "--db_host": _NO_STORE,
    "--db_port": _NO_STORE,
    "--db_name": _NO_STORE,
    "--db_pool_size": _NO_STORE,
    "--db_database": _NO_STORE,
    "--user_secret_key": _NO_STORE,
    "--user_algorithm": _NO_STORE,
    "--file_upload_dir": _NO_STORE,
    "--assistant_store_dir": _NO_STORE,
    "--prompt_file": "is for `ktopt chat`",
    "--memory_gpu_only": _BY_CACHE_LENS,
    "--utilization_percentage": _BY_CACHE_LENS,
    "--cpu_memory_size_GB": _BY_CACHE_LENS,
    "--use_cuda_graph": "decoding makes no CUDA graphs here",
}
HARMLESS: dict[str, tuple[str, ...]] = {
    "--no-use_cuda_graph": (),
    "--tp": ("1",),
    "--sched_strategy": ("FCFS",),
    "--web": ("True", "true"),
}
"""Flags that are taken where they ask for what is so anyway; () for one without a value."""


ALIASES = {"model_path": "model", "gguf_path": "weights", "optimize_config_path": "rules", "cpu_infer": "threads"}
"""Arguments that ktopt has by other names."""

Values = str | Sequence[Any] | None


def add_ktransformers(parser: argparse.ArgumentParser) -> None:
    """Those of KTransformers' flags that ktopt has by other names, and, unlisted, those that it refuses."""
    group = parser.add_argument_group("KTransformers' names")
    group.add_argument("--model_path", "--model_dir", dest="model_path", metavar="M", help="--model")
    group.add_argument("--gguf_path", metavar="W", help="--weights")
    group.add_argument("--optimize_config_path", metavar="RULES", help="RULES")
    group.add_argument("--cpu_infer", metavar="N", help="--threads")
    group.add_argument("--architectures", metavar="CLASS", help="what the model must be; any other is refused")
    group.add_argument("--web_cross_domain", metavar="BOOL", help="True is --allowed-origins '*'")
    for name, why in REFUSED.items():
        parser.add_argument(name, action=_Refused, nargs="?", const=why, help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    for name, values in HARMLESS.items():
        nargs = None if values else 0
        parser.add_argument(name, action=_Harmless, nargs=nargs, help=argparse.SUPPRESS, default=argparse.SUPPRESS)


class _Refused(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Values, option_string: str | None = None) -> NoReturn:
        raise UsageError(f"{option_string}: {REFUSED[str(option_string)]}")


class _Harmless(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Values, option_string: str | None = None) -> None:
        known = HARMLESS[str(option_string)]
        if known and values not in known:
            raise UsageError(f"{option_string} {values}: this server has {known[0]} alone")


def take_over(args: argparse.Namespace) -> None:
    """Put what was given by KTransformers' names where ktopt looks for it. UsageError where both were given."""
    for theirs, ours in ALIASES.items():
        value = getattr(args, theirs)
        if value is None:
            continue
        if getattr(args, ours) is not None:
            name = "RULES" if ours == "rules" else f"--{ours}"
            raise UsageError(f"--{theirs} is {name}, which is given too; leave one out")
        setattr(args, ours, value)
    if args.web_cross_domain is not None:
        if args.web_cross_domain.lower() not in ("true", "false"):
            raise UsageError(f"--web_cross_domain {args.web_cross_domain}: True or False")
        if args.web_cross_domain.lower() == "true":
            args.allowed_origins = [*args.allowed_origins, "*"]
