"""Parts of blocks read by the CPU kernels, and whether reading ahead pays."""

import mmap
import os
import zlib

import numpy as np
import pytest

from ktopt.cache.blocks.files import FileShape
from ktopt.cache.blocks.foresight import TRY_EVERY, Foresight
from ktopt.cache.blocks.layout import BlockLayout
from ktopt.cache.blocks.reading import Wanted
from ktopt.kernels import cpu
from ktopt.kernels.cpu import block_io

needs_kernels = pytest.mark.skipif(not cpu.available()[0], reason="there are no kernels")
LAYOUT = BlockLayout(tokens=16, key_dim=32, value_dim=32, kind="F16")  # 2,048 bytes
SHAPE = FileShape("a model", LAYOUT, 2, 3)
BLOCKS = 5


@pytest.mark.parametrize("seed", [0, 0xDEADBEEF])
def test_checksums_are_zlib_s(isa, seed):
    random = np.random.default_rng(0)
    for count in (1, 7, 15, 16, 63, 64, 65, 79, 80, 127, 128, 129, 1000, 4096, 17_408, 100_003):
        data = random.integers(0, 256, count + 3, dtype=np.uint8)[3:]
        assert cpu._needed().crc32(seed, data.ctypes.data, count) == zlib.crc32(data.tobytes(), seed)


class Files:
    """Blocks of random bytes in files, and their checksums."""

    def __init__(self, folder, direct):
        self.direct = direct
        shape = (BLOCKS, SHAPE.layers, SHAPE.rows, LAYOUT.nbytes)
        self.data = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
        self.paths = [folder / str(block) for block in range(BLOCKS)]
        self.expected = np.zeros(shape[:3], dtype=np.uint32)
        for block, path in enumerate(self.paths):
            whole = bytearray(SHAPE.nbytes)
            for layer, row in np.ndindex(SHAPE.layers, SHAPE.rows):
                at, part = SHAPE.offset(layer, row), self.data[block, layer, row].tobytes()
                whole[at : at + LAYOUT.nbytes] = part
                self.expected[block, layer, row] = SHAPE.checksum(block, layer, row, part)
            path.write_bytes(whole)

    def read(self, layer, parts, depth=2):
        """Parts (block, row) of a layer, and what the kernels say."""
        blocks, rows = (np.array(each, dtype=np.int64) for each in zip(*parts, strict=True))
        flags = os.O_RDONLY | (os.O_DIRECT if self.direct else 0)
        opened = [os.open(path, flags) for path in self.paths]
        files = np.array(opened, dtype=np.int64)[blocks]
        out = np.zeros((len(parts), LAYOUT.nbytes), dtype=np.uint8)
        to = out.ctypes.data + np.arange(len(parts), dtype=np.int64) * LAYOUT.nbytes
        offsets = SHAPE.offset(layer, 0) + rows * LAYOUT.nbytes
        buffer = memoryview(mmap.mmap(-1, depth * SHAPE.layer_bytes)) if self.direct else None
        said = block_io.read_parts(
            LAYOUT.nbytes, layer, SHAPE.seed, files, blocks, rows, offsets, to, self.expected[blocks, layer, rows], buffer,
            SHAPE.layer_bytes,
        )  # fmt: skip
        for file in opened:
            os.close(file)
        return out, said


@needs_kernels
@pytest.mark.parametrize("direct", [False, True])
class TestReads:
    @pytest.fixture
    def files(self, tmp_path, direct):
        return Files(tmp_path, direct)

    @pytest.mark.parametrize("depth", [1, 2, 16])
    def test_parts_come_as_they_are_in_the_files(self, files, depth):
        parts = [(0, 0), (0, 1), (0, 2), (1, 1), (2, 0), (2, 2), (3, 2), (4, 0), (4, 1)]
        for layer in range(SHAPE.layers):
            out, said = files.read(layer, parts, depth)
            assert said == (-1, 0)
            for found, (block, row) in zip(out, parts, strict=True):
                assert np.array_equal(found, files.data[block, layer, row])

    def test_a_part_in_another_s_place_is_told(self, files):
        files.expected[2, 1, 0] = files.expected[2, 1, 1]
        assert files.read(1, [(0, 0), (1, 0), (2, 0), (3, 0)])[1] == (2, -1)
        assert files.read(0, [(2, 0)])[1] == (-1, 0)

    def test_a_flipped_bit_is_told(self, files):
        with files.paths[1].open("r+b") as file:
            file.seek(SHAPE.offset(1, 2) + 100)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
        assert files.read(1, [(0, 2), (1, 1), (1, 2)])[1] == (2, -1)

    @pytest.mark.parametrize("end", [SHAPE.offset(1, 0), SHAPE.offset(1, 1) + 5])
    def test_a_file_that_ends_early_is_told(self, files, end):
        os.truncate(files.paths[3], end)
        for parts in ([(3, 2)], [(0, 0), (1, 0), (3, 2)]):
            assert files.read(1, parts)[1] == (len(parts) - 1, -2)

    def test_many_parts_through_few_pieces_of_memory(self, files):
        parts = [(block, row) for _ in range(40) for block in range(BLOCKS) for row in (0, 2)]
        out, said = files.read(0, parts, depth=3)
        assert said == (-1, 0)
        assert all(np.array_equal(found, files.data[block, 0, row]) for found, (block, row) in zip(out, parts, strict=True))


@needs_kernels
def test_arrays_that_can_not_be_are_refused(tmp_path):
    one, none = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    expected = np.zeros(1, dtype=np.uint32)
    with pytest.raises(ValueError, match="as long as one another"):
        block_io.read_parts(64, 0, 0, one, one, none, one, one, expected, None, 4096)
    buffer = memoryview(mmap.mmap(-1, 8192))
    with pytest.raises(ValueError, match="whole pages"):
        block_io.read_parts(64, 0, 0, one, one, one, one, one, expected, buffer, 1000)


def test_parts_are_put_in_the_files_order():
    rows, max_blocks, layer = 3, 10, 1
    parts = np.array(
        [layer * rows * max_blocks + row * max_blocks + block for row, block in ((2, 4), (0, 4), (1, 7), (1, 4), (0, 1))]
    )
    wanted = Wanted.of(parts, np.arange(5), rows, max_blocks)
    assert wanted.layer == layer
    assert list(zip(wanted.blocks_S, wanted.rows_S, strict=True)) == [(1, 0), (4, 0), (4, 1), (4, 2), (7, 1)]
    assert wanted.slots_S.tolist() == [4, 1, 3, 0, 2]
    assert [len(run) for run in wanted.runs] == [1, 3, 1]


class TestForesight:
    def step(self, foresight, used):
        """Read ten parts ahead, if it pays, of which so many are then asked for."""
        if not foresight.pays():
            return False
        foresight.brings(0, np.arange(10))
        foresight.asked(0, np.arange(10 - used, 20 - used)[None])
        return True

    def test_reading_ahead_goes_on_while_it_is_of_use(self):
        foresight = Foresight()
        assert all(self.step(foresight, 8) for _ in range(50))

    def test_where_it_is_of_no_use_it_is_tried_now_and_then(self):
        foresight = Foresight()
        done = [self.step(foresight, 1) for _ in range(20 * TRY_EVERY)]
        assert 10 <= sum(done[TRY_EVERY:]) <= 20
        assert any(self.step(foresight, 10) for _ in range(20 * TRY_EVERY))
        assert sum(self.step(foresight, 10) for _ in range(20 * TRY_EVERY)) > 10 * TRY_EVERY

    def test_what_was_not_read_ahead_says_nothing(self):
        foresight = Foresight()
        foresight.asked(0, np.arange(4)[None])
        foresight.brings(1, np.arange(0))
        foresight.asked(1, np.arange(4)[None])
        assert foresight.used_share == 1
