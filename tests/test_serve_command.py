"""`ktopt serve` and `python -m ktopt.server.main`: flags, and a real process with a real model."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import openai

from ktopt.cli import main, parser_of, serve
from ktopt.diagnostics import UsageError
from ktopt.server.flags import HARMLESS, REFUSED, take_over

ROOT = Path(__file__).resolve().parents[1]
KTRANSFORMERS = [
    "host", "port", "api_key", "ssl_keyfile", "ssl_certfile", "web", "model_name", "model_dir", "model_path", "device",
    "architectures", "q4_gguf_path", "gguf_path", "draft_model_path", "draft_gguf_path", "optimize_config_path", "cpu_infer",
    "backend_type", "chunk_size", "tp", "max_batch_size", "max_new_tokens", "json_mode", "healing", "ban_strings", "gpu_split",
    "length", "rope_scale", "rope_alpha", "no_flash_attn", "low_mem", "experts_per_token", "load_q4", "fast_safetensors",
    "draft_model_dir", "no_draft_scale", "modes", "mode", "username", "botname", "system_prompt", "temperature",
    "smoothing_factor", "dynamic_temperature", "top_k", "top_p", "top_a", "skew", "typical", "repetition_penalty",
    "frequency_penalty", "presence_penalty", "response_chunk", "no_code_formatting", "cache_8bit", "cache_q4", "ngram_decoding",
    "print_timings", "amnesia", "batch_size", "cache_lens", "kvc2_config_dir", "log_dir", "log_file", "log_level",
    "backup_count", "db_type", "db_host", "db_port", "db_name", "db_pool_size", "db_database", "user_secret_key",
    "user_algorithm", "force_think", "no-force_think", "use_cuda_graph", "no-use_cuda_graph", "web_cross_domain",
    "file_upload_dir", "assistant_store_dir", "prompt_file", "sched_strategy", "page_size", "memory_gpu_only",
    "utilization_percentage", "cpu_memory_size_GB",
]  # fmt: skip
"""The options of its server's argument parser."""


def parse(*arguments: str) -> argparse.Namespace:
    found: argparse.Namespace = parser_of("serve", serve).parse_args(list(arguments))
    take_over(found)
    return found


def test_every_flag_of_ktransformers_is_known() -> None:
    known = parser_of("serve", serve)._option_string_actions
    assert [name for name in KTRANSFORMERS if f"--{name}" not in known] == []
    assert {name.removeprefix("--") for name in (*REFUSED, *HARMLESS)} <= set(KTRANSFORMERS)


def test_the_flags_of_its_tutorial_do_what_they_say() -> None:
    found = parse(
        *(
            "--port",
            "10002",
            "--model_path",
            "M",
            "--gguf_path",
            "W",
            "--optimize_config_path",
            "R.yaml",
            "--max_new_tokens",
            "1024",
        ),
        *("--cache_lens", "32768", "--chunk_size", "256", "--max_batch_size", "4", "--backend_type", "balance_serve"),
        *("--cpu_infer", "3", "--api_key", "k", "--host", "0.0.0.0", "--model_name", "DeepSeek"),
    )
    assert (found.model, found.weights, found.rules, found.threads) == ("M", "W", "R.yaml", "3")
    settings = serve.settings_of(found)
    assert (settings.port, settings.host, settings.api_key, settings.max_new_tokens) == (10002, "0.0.0.0", "k", 1024)
    assert (found.cache_lens, found.chunk_size, found.max_batch_size, found.backend_type) == (32768, 256, 4, "balance_serve")
    assert parse("--model_dir", "M").model == "M"
    assert parse("--web_cross_domain", "True").allowed_origins == ["*"]
    assert parse("--web_cross_domain", "False").allowed_origins == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_flag_that_means_nothing_here_is_refused_with_a_reason(name: str) -> None:
    for value in ([], ["1"]):
        with pytest.raises(UsageError) as caught:
            parse(name, *value)
        assert str(caught.value) == f"{name}: {REFUSED[name]}"


def test_flags_that_ask_for_what_is_so_anyway_are_taken() -> None:
    assert not parse("--no-force_think").force_think
    parse("--no-use_cuda_graph", "--tp", "1", "--sched_strategy", "FCFS", "--web", "True")
    for wrong in (["--tp", "2"], ["--sched_strategy", "SJF"], ["--web", "False"]):
        with pytest.raises(UsageError, match="alone"):
            parse(*wrong)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cache_len", "5"], "--cache_lens"),
        (["--max-batch-size", "5"], "--max_batch_size"),
        (["--optimize_rule_path", "x"], "--optimize_config_path"),
        (["--model_path", "a", "--model", "b"], "leave one out"),
        (["--optimize_config_path", "a", "b"], "leave one out"),
        (["--port", "70000"], "--port: from 0 to 65,535"),
        (["--max_batch_size", "0"], "--max_batch_size: from 1"),
        (["--ssl_keyfile", "x"], "go together"),
        (["--ssl_keyfile", "x", "--ssl_certfile", "y"], "no such file"),
        (["--backend_type", "exllamav2"], "balance_serve"),
        (["--backend_type", "ktransformers", "--cache_lens", "5"], "is of the paged cache"),
        (["--mode", "long_context", "--backend_type", "balance_serve"], "leave out --backend_type"),
        (["--temperature", "-1"], "temperature"),
        (["--api_key", "a key"], "no blanks"),
        (["--api_key", "key\n"], "no blanks or control"),
        (["--backend_type", "ktransformers", "--prefix_folder", "x"], "is of the paged cache"),
        (["--prefix_bytes", "5"], "is of --prefix_folder"),
        (["--web_cross_domain", "maybe"], "True or False"),
        (["--log_file", "/nowhere/x", "--port", "0"], "--log_file"),
        (["--host", "no.such.host.invalid", "r.yaml"], "--host no.such.host.invalid"),
    ],
)
def test_what_is_asked_wrongly_is_told_before_anything_is_loaded(arguments: list[str], says: str, capsys: Any) -> None:
    assert main(["serve", *arguments]) in (1, 2)
    assert says in capsys.readouterr().err


class Process:
    """A server in a process of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ktopt.server.main", *arguments],
            stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        )  # fmt: skip
        self.lines: list[str] = []
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"serving at (\S+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.lines))
        self.openai = openai.OpenAI(base_url=self.url, api_key="k", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in a folder, as GGUF, and rules for it in KTransformers' form."""
    from apply_fixtures import make_model, make_tokenizer
    from gguf_fixtures import make_folder, make_gguf

    made = tmp_path_factory.mktemp("tiny")
    model, tokenizer = make_model("llama"), make_tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n'
        "{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(make_folder(made / "hf", model))
    make_gguf(made / "tiny.gguf", model)
    (made / "rules.yaml").write_text(
        "- match: {name: '^model\\.layers\\..*$', class: torch.nn.Linear}\n"
        "  replace:\n"
        "    class: ktransformers.operators.linear.KTransformersLinear\n"
        "    kwargs: {generate_device: cpu, prefill_device: cpu}\n"
    )
    return made


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Process]:
    made = Process(
        *("--port", "0", "--model_path", str(tiny / "hf"), "--gguf_path", str(tiny / "tiny.gguf"), "--device", "cpu"),
        *("--optimize_config_path", str(tiny / "rules.yaml"), "--max_new_tokens", "400", "--cache_lens", "1024"),
        *("--chunk_size", "256", "--max_batch_size", "4", "--backend_type", "balance_serve"), KTOPT_API_KEY="k",
    )  # fmt: skip
    yield made
    made.process.kill()
    made.process.wait()


def test_the_command_line_of_its_tutorial_serves(served: Process) -> None:
    made = served.openai.chat.completions.create(
        model="DeepSeek-R1", messages=[{"role": "user", "content": "hello"}], temperature=0.3, top_p=1.0, max_tokens=8, seed=1
    )
    assert made.model == "DeepSeek-R1"
    assert made.usage
    assert 1 <= made.usage.completion_tokens <= 8
    again = served.openai.chat.completions.create(
        model="x", messages=[{"role": "user", "content": "hello"}], temperature=0.3, top_p=1.0, max_tokens=8, seed=1, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in again) == made.choices[0].message.content
    with pytest.raises(openai.AuthenticationError):
        served.openai.with_options(api_key="other").models.list()


def test_a_schema_and_a_required_tool_are_kept_to_by_a_model_that_knows_nothing(served: Process) -> None:
    colour = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"], "additionalProperties": False}
    shape: Any = {"type": "json_schema", "json_schema": {"name": "colour", "strict": True, "schema": colour}}
    tool: Any = {"type": "function", "function": {"name": "paint", "parameters": colour}}
    message: Any = {"role": "user", "content": "x"}
    made = served.openai.chat.completions.create(model="x", messages=[message], max_tokens=60, seed=1, response_format=shape)
    assert json.loads(made.choices[0].message.content or "")["c"] in ("red", "blue")
    assert made.choices[0].finish_reason == "stop"
    called = served.openai.chat.completions.create(
        model="x", messages=[message], max_tokens=100, seed=1, tools=[tool], tool_choice="required"
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert (call.function.name, called.choices[0].finish_reason) == ("paint", "tool_calls")
    assert json.loads(call.function.arguments)["c"] in ("red", "blue")
    shape["json_schema"]["schema"] = {"type": "nonsense"}
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.chat.completions.create(model="x", messages=[message], response_format=shape)
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "response_format")


def test_sigterm_lets_what_runs_end_and_ends_with_0(served: Process) -> None:
    stream = served.openai.chat.completions.create(
        model="x", messages=[{"role": "user", "content": "hello"}], max_tokens=100, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    served.process.send_signal(signal.SIGTERM)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    start = time.monotonic()
    assert served.process.wait(timeout=30) == 0
    assert time.monotonic() - start < 20
    assert served.process.stderr
    rest = served.process.stderr.read()
    assert "Traceback" not in rest
    lines = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
    assert lines[-1]["finish"] == ["length"]
    assert lines[-1]["completion_tokens"] == 100


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What servers would have been started with."""
    made: list[Any] = []

    def serves(engine: Any, settings: Any, served: Any, **_: Any) -> None:
        engine.close()
        made.append((engine, settings, served))

    monkeypatch.setattr("ktopt.server.running.serve", serves)
    monkeypatch.setattr(serve, "_log_to", lambda *_: None)
    return made


def test_a_model_without_rules_has_those_of_ktopt_s_own(tiny: Path, started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--weights", str(tiny / "tiny.gguf"), "--cache_lens", "100", "--page_size", "32"]) == 0
    engine, _, served = started[0]
    assert engine.backend == "balance_serve"
    assert engine.cache.pages == 4
    assert served.names == ("tiny",)
    assert served.plan.rule_file == "(rules of ktopt's own)"
    assert served.weight_bytes["cpu"] == served.plan.weight_bytes
    assert "without RULES" in capsys.readouterr().err


def test_a_class_of_models_that_is_named_is_looked_at(tiny: Path, started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    given = ["serve", "--port", "0", "--weights", str(tiny / "tiny.gguf"), "--force_think", "--architectures"]
    assert main([*given, "LlamaForCausalLM"]) == 0
    assert started[0][1].force_think
    assert main([*given, "Qwen3MoeForCausalLM"]) == 2
    assert "this model is a LlamaForCausalLM" in capsys.readouterr().err


def test_prompts_are_kept_for_when_the_server_starts_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktopt.engine.events import Finished
    from ktopt.engine.request import Request

    cached = []

    def serves(engine: Any, settings: Any, served: Any, **_: Any) -> None:
        ended = [
            event for event in engine.stream(Request(prompt_ids=tuple(range(100)), max_tokens=1)) if isinstance(event, Finished)
        ]
        cached.append(ended[0].usage.cached_tokens)
        engine.close()

    monkeypatch.setattr("ktopt.server.running.serve", serves)
    monkeypatch.setattr(serve, "_log_to", lambda *_: None)
    given = ["serve", "--port", "0", "--weights", str(tiny / "tiny.gguf"), "--cache_lens", "256", "--page_size", "32", "--steady"]
    for _ in range(2):
        assert main([*given, "--prefix_folder", str(tmp_path / "kept"), "--prefix_bytes", "100000000"]) == 0
    assert cached == [0, 96]


def test_one_at_a_time_where_that_is_asked_for_or_all_that_a_model_can(
    tiny: Path, started: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["serve", str(tiny / "rules.yaml"), "--port", "0", "--weights", str(tiny / "tiny.gguf"), "--device", "cpu"]
    assert main([*given, "--backend_type", "ktransformers", "--host", "0.0.0.0"]) == 0
    assert started[0][0].backend == "ktransformers"
    assert "without --api_key" in capsys.readouterr().err
    monkeypatch.setattr("ktopt.cache.paged.cannot_page", lambda model: "its layers are of another kind")
    assert main(given) == 0
    assert started[1][0].backend == "ktransformers"
    assert "one request at a time, as its layers are of another kind" in capsys.readouterr().err
    assert main([*given, "--backend_type", "balance_serve"]) == 1
    assert "its layers are of another kind; --backend_type ktransformers serves this model" in capsys.readouterr().err
