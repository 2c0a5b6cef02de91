"""Pages of prefixes that outlive their process: found again, and never wrong."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from layer_fixtures import random_model
from test_paged_cache import PAGE, prompt

from ktopt.cache.paged import PagedCache, PrefixFolder, forward_paged
from ktopt.diagnostics import KtoptError

IDS = prompt(1, 3 * PAGE + 5)


@pytest.fixture(scope="module")
def llama():
    return random_model("llama")


def opened(model, folder: Path, name: str = "one", quota_bytes: int | None = None, tokens: int = 20 * PAGE) -> PagedCache:
    return PagedCache(
        model, tokens=tokens, page_tokens=PAGE, prefixes=PrefixFolder(folder, model_hash=name, quota_bytes=quota_bytes)
    )


def read(model, cache: PagedCache, ids: list[int]) -> tuple[int, torch.Tensor]:
    """Tokens that a prompt found there, and the logits (V) after it."""
    sequence = cache.sequence(ids)
    logits = forward_paged(model, cache, [(sequence, ids[sequence.length :])])[0]
    found = sequence.cached_tokens
    cache.release(sequence)
    cache.check()
    return found, logits


def kept(model, folder: Path, ids: list[int] = IDS, **options) -> torch.Tensor:
    """The logits after a prompt whose pages are in the folder now."""
    cache = opened(model, folder, **options)
    logits = read(model, cache, ids)[1]
    cache.close()
    return logits


def test_a_later_cache_finds_the_pages_of_an_earlier_one(llama, tmp_path):
    expected = kept(llama, tmp_path)
    assert len(list(tmp_path.glob("*.block"))) == 3
    cache = opened(llama, tmp_path)
    found, logits = read(llama, cache, IDS)
    assert found == 3 * PAGE
    assert torch.equal(logits, expected) or (logits - expected).abs().max() < 1e-6
    cache.prefixes.flush()
    assert (cache.prefixes.counts.read, cache.prefixes.counts.written) == (3, 0)
    assert read(llama, cache, IDS)[0] == 3 * PAGE
    assert cache.prefixes.counts.read == 3


def test_a_prefix_goes_on_where_memory_ends(llama, tmp_path):
    kept(llama, tmp_path)
    cache = opened(llama, tmp_path)
    read(llama, cache, IDS[: PAGE + 1])
    longer = [*IDS[: 2 * PAGE], *prompt(2, PAGE)]
    assert read(llama, cache, longer)[0] == 2 * PAGE
    cache.close()
    assert len(list(tmp_path.glob("*.block"))) == 4


def test_a_cache_that_is_full_leaves_what_is_on_disk_there(llama, tmp_path):
    kept(llama, tmp_path)
    cache = opened(llama, tmp_path, tokens=3 * PAGE)
    other = cache.sequence([1])
    cache.reserve(other, 2 * PAGE)
    assert cache.sequence(IDS).cached_tokens == PAGE
    assert cache.free_pages == 0
    cache.check()


@pytest.mark.parametrize("place", [0, 9, 20, 100, 200, 4000, 4096, 5000, -1])
def test_a_flipped_bit_is_a_miss(llama, tmp_path, place, caplog):
    expected = kept(llama, tmp_path)
    for file in tmp_path.glob("*.block"):
        data = bytearray(file.read_bytes())
        data[place] ^= 4
        file.write_bytes(data)
    cache = opened(llama, tmp_path)
    found, logits = read(llama, cache, IDS)
    assert found == 0
    assert (logits - expected).abs().max() < 1e-6
    assert cache.prefixes.counts.damaged == 1
    assert "is kept no longer" in caplog.text
    cache.close()
    assert read(llama, opened(llama, tmp_path), IDS)[0] == PAGE  # what was damaged was written again; the others were known by name


@pytest.mark.parametrize("length", [0, 10, 4095, 4096, 5000])
def test_a_file_that_ends_early_is_a_miss(llama, tmp_path, length):
    kept(llama, tmp_path)
    for file in tmp_path.glob("*.block"):
        os.truncate(file, length)
    assert read(llama, opened(llama, tmp_path), IDS)[0] == 0


def test_pages_of_another_model_or_shape_are_not_found(llama, tmp_path):
    kept(llama, tmp_path)
    assert read(llama, opened(llama, tmp_path, name="two"), IDS)[0] == 0
    qwen = random_model("qwen3", num_hidden_layers=2)
    assert read(qwen, opened(qwen, tmp_path), IDS)[0] == 0
    assert read(llama, opened(llama, tmp_path), IDS)[0] == 3 * PAGE


def test_a_file_under_the_name_of_another_is_a_miss(llama, tmp_path):
    kept(llama, tmp_path)
    kept(llama, tmp_path / "other", ids=prompt(9, 3 * PAGE + 1))
    mine, others = sorted(tmp_path.glob("*.block")), sorted((tmp_path / "other").glob("*.block"))
    for name, other in zip(mine, others, strict=True):
        name.write_bytes(other.read_bytes())
    assert read(llama, opened(llama, tmp_path), IDS)[0] == 0


def test_a_quota_holds_and_what_was_used_last_stays(llama, tmp_path):
    size = 4096 + PAGE * 768
    folder = PrefixFolder(tmp_path, model_hash="one", quota_bytes=8 * size)
    cache = PagedCache(llama, tokens=100 * PAGE, page_tokens=PAGE, prefixes=folder)
    for n in range(6):
        read(llama, cache, prompt(n, 2 * PAGE + 1))
        read(llama, cache, prompt(0, 2 * PAGE + 1))
        folder.flush()
        assert sum(file.stat().st_size for file in tmp_path.glob("*.block")) == folder.held_bytes <= 8 * size
    cache.close()
    later = opened(llama, tmp_path)
    assert read(llama, later, prompt(0, 2 * PAGE + 1))[0] == 2 * PAGE
    assert read(llama, later, prompt(5, 2 * PAGE + 1))[0] == 2 * PAGE
    assert read(llama, later, prompt(1, 2 * PAGE + 1))[0] == 0


def test_a_quota_of_less_than_a_page_keeps_nothing(llama, tmp_path, caplog):
    kept(llama, tmp_path, quota_bytes=1000)
    assert not list(tmp_path.glob("*.block"))
    assert "no room in its quota" in caplog.text


def test_a_folder_that_vanishes_costs_nothing_but_the_reuse(llama, tmp_path, caplog):
    folder = tmp_path / "gone"
    cache = opened(llama, folder)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert read(llama, cache, IDS)[0] == 0
    cache.close()
    assert "can't be kept there" in caplog.text
    assert cache.prefixes.counts.left_out == 3


def test_a_folder_that_cannot_be_is_refused(llama, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KtoptError, match="can't be kept there"):
        PrefixFolder(tmp_path / "file", model_hash="one")
    folder = PrefixFolder(tmp_path, model_hash="one")
    PagedCache(llama, tokens=64, page_tokens=PAGE, prefixes=folder)
    with pytest.raises(KtoptError, match="open for a cache already"):
        PagedCache(llama, tokens=64, page_tokens=PAGE, prefixes=folder)


def test_latents_are_kept_too(tmp_path):
    from layer_fixtures import RULES, fused

    pytest.importorskip("ktopt.kernels.cpu._cpu")
    ours = fused(random_model("deepseek_v3"), RULES)
    expected = kept(ours, tmp_path)
    found, logits = read(ours, opened(ours, tmp_path), IDS)
    assert found == 3 * PAGE
    assert (logits - expected).abs().max() < 1e-5


WRITER = """
    import sys
    import numpy as np
    import torch
    from ktopt.cache.paged.pools import LayerShape
    from ktopt.cache.paged.prefixes import PrefixFolder

    folder = PrefixFolder(sys.argv[1], model_hash="one", quota_bytes=int(sys.argv[2]))
    folder.open([LayerShape(1, 16, 16, torch.float32, torch.device("cpu"))], 16)
    print("open", flush=True)
    for n in range(int(sys.argv[3])):
        ids = np.full(16, n, dtype=np.int32).tobytes()
        folder.write(folder.following(folder.root, ids), 0, ids, np.full(300_000, n % 251, dtype=np.uint8))
        if n % 16 == 0:
            folder.flush()
    folder.close()
"""


def writer(folder: Path, quota_bytes: int, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(WRITER), str(folder), str(quota_bytes), str(count)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def whole_pages(folder: Path, count: int) -> int:
    """How many pages of a writer are there, all of them right."""
    import numpy as np

    from ktopt.cache.paged.pools import LayerShape

    prefixes = PrefixFolder(folder, model_hash="one")
    prefixes.open([LayerShape(1, 16, 16, torch.float32, torch.device("cpu"))], 16)
    found = 0
    for n in range(count):
        ids = np.full(16, n, dtype=np.int32).tobytes()
        body = prefixes.read(prefixes.following(prefixes.root, ids), 0, ids)
        assert body is None or (len(body) == 300_000 and bool((body == n % 251).all()))
        found += body is not None
    prefixes.close()
    assert prefixes.counts.damaged == 0
    return found


def test_a_process_killed_while_it_writes_leaves_whole_pages_only(tmp_path):
    process = writer(tmp_path, 1 << 40, 100_000)
    assert process.stdout.readline() == "open\n"
    while len(list(tmp_path.glob("*.block"))) < 8:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    files = len(list(tmp_path.glob("*.block")))
    assert whole_pages(tmp_path, 2000) == min(files, 2000)
    assert not list(tmp_path.glob("*.tmp"))


def test_two_processes_share_a_folder_and_its_quota(tmp_path):
    quota = 20 * 310_000
    both = [writer(tmp_path, quota, 60) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    for process in both:
        process.stdout.close()
    assert 10 <= whole_pages(tmp_path, 60) <= 20 + 16
