"""Small blocks for the tests of the cache's tiers."""

import ctypes

import pytest
import torch

from ktopt.cache.blocks.disk import DiskTier
from ktopt.cache.blocks.layout import BlockLayout
from ktopt.cache.blocks.store import BlockStore
from ktopt.kernels.cpu.block_io import reader

LAYOUT = BlockLayout(tokens=4, key_dim=32, value_dim=32, kind="Q8_0")  # 272 bytes, rounded up to 320
LAYERS, ROWS, BLOCKS = 3, 2, 16
PLENTY = 1 << 20
SMALL = 7_000
"""Memory for some 16 of the 96 parts, beside the index."""
DIRECT = SMALL + 4 * 4096
"""The same where two readers, and twice as many of the caller's, have buffers for direct reads."""

READS = {"by": None}
"""What reads a store's parts: None is Python's threads."""


@pytest.fixture(params=["kernels", "threads"])
def each_reader(request):
    """Parts are read by the kernels, and without them."""
    READS["by"] = reader() if request.param == "kernels" else None
    if request.param == "kernels" and READS["by"] is None:
        pytest.skip("there are no kernels")
    yield
    READS["by"] = None


def data(layer, block, rows=ROWS, layout=LAYOUT):
    """A block's bytes: other ones for each layer, block and row."""
    generator = torch.Generator().manual_seed(layer * 1000 + block)
    return torch.randint(0, 256, (rows, layout.nbytes), dtype=torch.uint8, generator=generator)


def bytes_at(addresses_RK, nbytes=LAYOUT.nbytes):
    def at(address):
        return torch.frombuffer(bytearray(ctypes.string_at(int(address), nbytes)), dtype=torch.uint8)

    return torch.stack([torch.stack([at(address) for address in row]) for row in addresses_RK])


def fill(store, blocks=BLOCKS, first=0):
    for block in range(first, blocks):
        for layer in range(LAYERS):
            store.put(layer, block, data(layer, block))


def assert_right(store, layer, picks):
    """What is fetched are the bytes that were put."""
    found = bytes_at(store.fetch(layer, torch.tensor(picks, dtype=torch.int32)))
    for row, blocks in enumerate(picks):
        for k, block in enumerate(blocks):
            assert torch.equal(found[row, k], data(layer, block)[row]), (layer, row, block)


def assert_all_right(store, blocks=BLOCKS):
    for layer in range(LAYERS):
        for block in range(0, blocks, 2):
            assert_right(store, layer, [[block, block + 1], [block + 1, block]])


def small_store(folder, host_bytes=SMALL, device_bytes=0, max_blocks=BLOCKS, fetch_blocks=4, **options):
    """A store that needs its disk."""
    disk = DiskTier(folder, **{"model_hash": "a model", "readers": 2, "read_parts": READS["by"], **options})
    return BlockStore(
        LAYOUT, LAYERS, ROWS, max_blocks, device_bytes=device_bytes, host_bytes=host_bytes, disk=disk, fetch_blocks=fetch_blocks
    )
