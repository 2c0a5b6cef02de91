"""The GGUF reader and the dequantiser, against the gguf package, and against files that lie."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_fixtures import make_gguf, tiny_model

from ktopt.weights import WeightError
from ktopt.weights import dequantize as dequantizer
from ktopt.weights.dequantize import ROUTINES, dequantize, dequantize_into
from ktopt.weights.ggml_types import BY_NAME, BY_NUMBER
from ktopt.weights.gguf import open_gguf
from ktopt.weights.gguf_config import config_from_gguf
from ktopt.weights.names import GGUFNames


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", tiny_model("llama", num_hidden_layers=1), quant="Q8_0")


def agrees_with_gguf(path: Path) -> None:
    """Every field and every tensor as gguf's own reader has them."""
    theirs, ours = gguf.GGUFReader(path), open_gguf(path)
    fields = {name: f for name, f in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for name, field in fields.items():
        value, expected = ours.metadata[name], field.contents()
        assert value == expected, name
        assert type(value) is type(expected), name
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.type, mine.offset, mine.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert np.array_equal(ours.bytes_of(mine).reshape(-1), tensor.data.view(np.uint8).reshape(-1))
    ours.close()


def test_reads_the_demo_model_as_gguf_does_and_in_milliseconds(smollm2: Path) -> None:
    agrees_with_gguf(smollm2)
    times = []
    for _ in range(3):
        start = time.process_time()
        open_gguf(smollm2).close()
        times.append(time.process_time() - start)
    assert min(times) < 0.2


def test_reads_a_written_file_as_gguf_does(llama: Path) -> None:
    agrees_with_gguf(llama)


def test_reads_every_value_type(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_array("a.floats", [1.5, -2.0])
    writer.add_array("a.flags", [True, False, True])
    writer.add_array("a.texts", ["", "é", "a" * 1000])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    agrees_with_gguf(path)
    assert open_gguf(path).metadata.count("a.texts") == 3


def test_opening_imports_no_numpy_torch_or_gguf(llama: Path) -> None:
    code = (
        "import sys; from ktopt.weights.gguf_config import config_from_gguf; config_from_gguf(sys.argv[1]);"
        "print([m for m in ('numpy', 'torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code, str(llama)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_type_table_is_ggufs() -> None:
    theirs = {int(t): (t.name, *sizes) for t, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {t.number: (t.name, t.block_elements, t.block_bytes) for t in BY_NUMBER.values()}
    assert {number: ours[number] for number in theirs if number in ours} == {n: theirs[n] for n in theirs if n in ours}
    assert set(theirs) - set(ours) == set() or gguf.__version__ > "0.19"


# --- dequantisation


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, (rows, BY_NAME[kind].row_bytes(columns)), dtype=np.uint8)


@pytest.mark.parametrize("kind", sorted(BY_NAME))
def test_dequantises_exactly_as_gguf(kind: str) -> None:
    raw = random_blocks(kind, 24, 768)
    with np.errstate(all="ignore"):
        try:
            expected = gguf.quants.dequantize(raw, GGMLQuantizationType[kind])
        except NotImplementedError:
            expected = None
    if expected is None and kind not in dequantizer.PLAIN:
        with pytest.raises(WeightError, match=kind):
            dequantize(raw, kind)
        return
    if expected is None:
        with np.errstate(all="ignore"):
            expected = raw.view({"F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}[kind]).astype(np.float32)
    found = dequantize(raw, kind).numpy()
    assert found.dtype == np.float32
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("kind", [*sorted(ROUTINES), "F32", "F16", "BF16", "IQ3_S"])
def test_working_in_pieces_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(kind, 24, 768)
    whole = dequantize(raw, kind)
    monkeypatch.setattr(dequantizer, "PIECE_ELEMENTS", 1024)
    assert torch.equal(dequantize(raw, kind).nan_to_num(0), whole.nan_to_num(0))


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "F32", "F16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrower_dtype_is_the_rounded_float32(kind: str, dtype: torch.dtype) -> None:
    raw = random_blocks(kind, 24, 768)
    assert torch.equal(dequantize(raw, kind, dtype).nan_to_num(0), dequantize(raw, kind).to(dtype).nan_to_num(0))


def test_a_strided_destination_is_filled_in_place() -> None:
    raw = random_blocks("Q4_0", 12, 64).reshape(3, 4, -1)
    out = torch.zeros(3, 8, 64)
    dequantize_into(out[:, 4:], raw, "Q4_0")
    assert torch.equal(out[:, 4:].nan_to_num(0), dequantize(raw, "Q4_0").nan_to_num(0))
    assert not out[:, :4].any()


# --- split files


def split_model(folder: Path) -> list[Path]:
    writer = GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.full(8, i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def test_all_files_of_a_split_model_are_found_from_any(tmp_path: Path) -> None:
    files = split_model(tmp_path)
    assert len(files) == 3
    for path in files:
        opened = open_gguf(path)
        assert opened.files == tuple(files)
        assert opened.architecture == "llama"
        values = [opened.bytes_of(t).view(np.float32)[0] for t in opened.tensors.values()]
        assert values == [0, 1, 2, 3, 4]
        assert opened.file_of(opened.tensors["blk.4.attn_norm.weight"]) == files[2]


def test_a_missing_file_of_a_split_model_is_named(tmp_path: Path) -> None:
    files = split_model(tmp_path)
    files[1].unlink()
    with pytest.raises(WeightError, match=r"m-00002-of-00003\.gguf is missing"):
        open_gguf(files[0])


def test_a_renamed_file_of_a_split_model_is_refused(tmp_path: Path) -> None:
    files = split_model(tmp_path)
    with pytest.raises(WeightError, match="must keep its name"):
        open_gguf(files[0].rename(tmp_path / "model.gguf"))


def test_a_file_in_anothers_place_is_refused(tmp_path: Path) -> None:
    files = split_model(tmp_path)
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(WeightError, match="says that it is 2 of 3"):
        open_gguf(files[0])


# --- damaged and hostile files


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def padded(data: bytes, payload: int = 0) -> bytes:
    return data + bytes(-len(data) % 32) + bytes(payload)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes"),
    "not gguf": (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (header(version=1), "version 1"),
    "version 4": (header(version=4), "version 4"),
    "more tensors than bytes": (header(tensors=2**60) + bytes(64), "claims 1152921504606846976 tensors"),
    "more keys than bytes": (header(keys=2**63) + bytes(64), "keys, more than the file can hold"),
    "a key of 2^63 bytes": (header(keys=1) + struct.pack("<Q", 2**63) + bytes(64), "a metadata key has"),
    "a key that is not UTF-8": (header(keys=1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(64), "not UTF-8"),
    "a key twice": (header(keys=2) + (text("a") + struct.pack("<IB", 0, 1)) * 2, "the metadata key a stands twice"),
    "an unknown value type": (header(keys=1) + text("k") + struct.pack("<I", 13) + bytes(16), "k has the unknown value type 13"),
    "a string past the end": (header(keys=1) + text("k") + struct.pack("<IQ", 8, 2**64 - 1), "ends inside k"),
    "an array past the end": (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 2**20), "ends inside k"),
    "an array of absurd length": (
        header(keys=1) + text("k") + struct.pack("<IIQ", 9, 0, 2**60) + bytes(64), "more than a model needs"
    ),
    "strings past the end": (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 4) + bytes(16), "more than the file can hold"),
    "a string in an array of 2^64": (
        header(keys=1) + text("k") + struct.pack("<IIQQQ", 9, 8, 2, 2**64 - 1, 0) + bytes(32), "inside the strings of k"
    ),
    "arrays in arrays": (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "an array of arrays"),
    "alignment 0": (header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 0), "general.alignment is 0"),
    "alignment 2^31": (header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 2**31), "general.alignment"),
    "alignment in words": (
        header(keys=1) + text("general.alignment") + struct.pack("<I", 8) + text("no"), "general.alignment is 'no'"
    ),
    "no dimensions": (padded(header(1) + tensor("t", [], 0, 0), 64), "tensor t has 0 dimensions"),
    "nine dimensions": (padded(header(1) + tensor("t", [1] * 9, 0, 0), 64), "tensor t has 9 dimensions"),
    "2^32 dimensions": (header(1) + text("t") + struct.pack("<I", 2**32 - 1) + bytes(64), "dimensions"),
    "an unknown type": (padded(header(1) + tensor("t", [8], 99, 0), 64), "tensor t has the unknown storage type 99"),
    "half a block": (padded(header(1) + tensor("t", [33], 8, 0), 64), "no whole blocks of Q8_0"),
    "an empty dimension": (padded(header(1) + tensor("t", [8, 0], 0, 0), 64), "tensor t has the shape"),
    "an overflowing shape": (padded(header(1) + tensor("t", [2**32, 2**32, 2**32], 0, 0), 64), "more than the file has"),
    "an offset past the end": (padded(header(1) + tensor("t", [8], 0, 2**40), 64), "tensor t ends at byte"),
    "an odd offset": (padded(header(1) + tensor("t", [8], 0, 4), 64), "not a multiple of 32"),
    "truncated data": (padded(header(1) + tensor("t", [8], 0, 0), 31), "truncated"),
    "overlapping tensors": (padded(header(2) + tensor("t", [16], 0, 0) + tensor("u", [8], 0, 32), 64), "tensors t and u overlap"),
    "a tensor twice": (padded(header(2) + tensor("t", [8], 0, 0) * 2, 64), "the tensor t stands twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_lying_header_is_named(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(WeightError, match=r"bad\.gguf") as caught:
        open_gguf(path)
    assert message in str(caught.value)
    assert time.process_time() - start < 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"nothing\.gguf can't be read: No such file"):
        open_gguf(tmp_path / "nothing.gguf")


def test_a_truncated_model_names_the_tensor(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(llama.read_bytes()[:-40])
    last = max(open_gguf(llama).tensors.values(), key=lambda t: t.offset)
    with pytest.raises(WeightError, match=rf"short\.gguf: tensor {last.name} ends .* truncated"):
        open_gguf(path)


def test_a_damaged_header_is_an_error_or_reads_in_bounds(llama: Path, tmp_path: Path) -> None:
    """2,000 files with one to four bytes of the header changed: no other exception, no tensor out of the file, no wait."""
    good = llama.read_bytes()
    length = min(t.offset for t in open_gguf(llama).tensors.values())
    rng, path, refused = random.Random(1), tmp_path / "fuzz.gguf", 0
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(length)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            del data[rng.randrange(length, len(data)) :]
        path.write_bytes(data)
        try:
            opened = open_gguf(path)
            _read_all(opened)
            opened.close()
        except WeightError:
            refused += 1
    assert 200 < refused < 2000


def _read_all(opened: Any) -> None:
    names = GGUFNames(opened)
    assert all(names.recipe(name) for name in names.names())
    config_from_gguf(opened)
    for key in opened.metadata:
        opened.metadata[key]
    for found in opened.tensors.values():
        assert opened.bytes_of(found).nbytes == found.nbytes


def test_a_closed_file_says_so(llama: Path) -> None:
    opened = open_gguf(llama)
    opened.close()
    with pytest.raises(WeightError, match="was closed"):
        opened.bytes_of(next(iter(opened.tensors.values())))
    with pytest.raises(WeightError, match="was closed"):
        opened.metadata["general.name"]
    assert str(llama) not in Path("/proc/self/maps").read_text()


def test_closing_leaves_arrays_in_use_readable(llama: Path) -> None:
    opened = open_gguf(llama)
    array = opened.bytes_of(opened.tensors["output_norm.weight"])
    before = array.copy()
    opened.close()
    assert np.array_equal(array, before)
