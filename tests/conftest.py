"""Fixtures that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ktopt.kernels import cpu

if TYPE_CHECKING:
    from page_browser import Page


@pytest.fixture(params=cpu.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of the CPU kernels in turn, where this CPU has it."""
    if not cpu.available()[0]:
        pytest.skip(cpu.available()[1])
    if request.param not in cpu.isas():
        pytest.skip(f"this CPU lacks {request.param}")
    cpu.use_isa(request.param)
    yield str(request.param)
    cpu.use_isa(None)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small products gain nothing from more threads, and lose much where another process wants the cores; and sums are in the same
    order on every machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2's GGUF file, which a package carries."""
    from gguf_fixtures import smollm2_file

    return smollm2_file()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A headless Chromium, where there is one."""
    from page_browser import Page, started

    driver = started(tmp_path_factory.mktemp("chromium"))
    yield Page(driver)
    driver.quit()
