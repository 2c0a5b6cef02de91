"""Memory of caches in huge pages, where the system gives them."""

import re
from pathlib import Path

import pytest
import torch

from ktopt.cache.huge_pages import LEAST_BYTES, ask_for_huge_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(tensor: torch.Tensor) -> int:
    """What of the mapping that a tensor lies in is backed by huge pages."""
    within, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(each, 16) for each in found.groups())
            within = begin < tensor.data_ptr() + tensor.nbytes and end > tensor.data_ptr()
        elif within and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this system has no huge pages for whoever asks"
)
def test_large_memory_lies_in_huge_pages_once_it_is_written_to() -> None:
    tensor = ask_for_huge_pages(torch.empty(8 * LEAST_BYTES, dtype=torch.uint8))
    assert huge_bytes(tensor) == 0
    tensor.fill_(7)
    if huge_bytes(tensor) == 0:
        pytest.skip("the system has no huge page to give just now")
    assert huge_bytes(tensor) <= tensor.nbytes
    assert int(tensor.long().sum()) == 7 * tensor.numel()


@pytest.mark.parametrize("bytes_", [0, 1, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1])
def test_the_tensor_itself_comes_back_whatever_its_size(bytes_: int) -> None:
    tensor = torch.zeros(bytes_, dtype=torch.uint8)
    assert ask_for_huge_pages(tensor) is tensor
    assert int(tensor.sum()) == 0


def test_tensors_without_memory_are_left_alone() -> None:
    tensor = torch.empty(LEAST_BYTES, dtype=torch.uint8, device="meta")
    assert ask_for_huge_pages(tensor) is tensor
