"""`Config`, as KTransformers' users read theirs: found where they keep it, by attributes and items, with findings."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from ktopt.diagnostics import CompileError, UsageError
from ktopt.server.config.config import Config

TEXT = """\
model: {name_or_path: smollm2-135m, device: cpu}
long_context:
  max_seq_len: 139000
  second_block_count: 7
kvc2: {cpu_memory_size_GB: 2}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a working folder, both empty."""
    (tmp_path / "work").mkdir()
    (tmp_path / ".ktransformers").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_a_config_is_read_from_the_home_and_before_that_from_the_working_folder(home: Path) -> None:
    (home / ".ktransformers" / "config.yaml").write_text(TEXT)
    config = Config()
    assert config.max_seq_len == 139_008
    assert config.path == str(home / ".ktransformers" / "config.yaml")
    Path("ktopt.yaml").write_text(TEXT.replace("139000", "16384"))
    assert Config().long_context.max_seq_len == 16_384
    assert Config().found
    assert not Config("ktopt.yaml").found


def test_values_are_attributes_and_items_by_every_spelling(home: Path) -> None:
    Path("c.yaml").write_text(TEXT)
    config = Config("c.yaml")
    assert config.model["name_or_path"] == config.model.name_or_path == "smollm2-135m"
    assert config.long_context["second_block_count"] == config.second_select_num == config.second_block_count == 7
    assert config.kvc2["cpu_memory_size_GB"] == 2
    with pytest.raises(AttributeError, match="did you mean 'max_seq_len'"):
        _ = config.max_seq_length
    with pytest.raises(KeyError):
        _ = config.model["max_seq_len"]


def test_a_length_that_is_rounded_up_is_said_with_its_place(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("c.yaml").write_text(TEXT)
    with caplog.at_level(logging.WARNING):
        Config("c.yaml")
    (record,) = caplog.records
    assert "c.yaml:3:16: KT211" in record.getMessage()
    assert "139000` is rounded up to 139008, 1086 blocks of 128 tokens" in record.getMessage()


def test_a_config_that_can_not_be_raises_with_place_and_remedy(home: Path) -> None:
    Path("c.yaml").write_text("model: {name_or_path: m}\nlong_context: {anchor_type: QUEST, anchor_num: 3}\n")
    with pytest.raises(CompileError, match=r"c.yaml:2:.*needs `anchor_num: 2`, not 3"):
        Config("c.yaml")


def test_where_there_is_none_it_is_said_where_one_would_be(home: Path) -> None:
    with pytest.raises(UsageError, match=r"ktopt.yaml or ~/.ktransformers/config.yaml"):
        Config()


def test_a_rule_file_called_ktopt_yaml_is_no_config(home: Path) -> None:
    Path("ktopt.yaml").write_text("version: 1\nrules: []\n")
    with pytest.raises(UsageError):
        Config()


def test_reading_a_config_imports_no_torch(home: Path) -> None:
    Path("ktopt.yaml").write_text(TEXT)
    code = "import sys; from ktopt.server.config.config import Config; Config(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
