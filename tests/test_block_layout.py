"""A block's sizes are those of its numbers in ggml's layouts."""

import pytest

from ktopt.cache.blocks.layout import ANCHOR_TYPES, KINDS, BlockLayout, anchor_bytes
from ktopt.diagnostics import KtoptError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (192, 128), (32, 96)])
def test_a_blocks_bytes_are_those_of_ggufs_table(kind: str, key_dim: int, value_dim: int) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    layout = BlockLayout(128, key_dim, value_dim, kind)
    for dim, row_bytes in ((key_dim, layout.key_row_bytes), (value_dim, layout.value_row_bytes)):
        assert quant_shape_to_byte_shape((1, dim), GGMLQuantizationType[kind]) == (1, row_bytes)
    assert layout.value_offset == 128 * layout.key_row_bytes
    assert layout.nbytes == 128 * (layout.key_row_bytes + layout.value_row_bytes)


def test_blocks_are_multiples_of_64_bytes() -> None:
    layout = BlockLayout(1, 32, 32, "Q4_0")
    assert (layout.value_offset, layout.nbytes) == (18, 64)


def test_shared_values_take_nothing_and_lie_in_the_keys() -> None:
    layout = BlockLayout(64, 576, 512, "BF16", shared=True)
    assert (layout.value_offset, layout.value_row_bytes, layout.nbytes) == (0, 1152, 64 * 1152)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((128, 64, 64, "Q6_K"), "Q6_K: take one of F32"),
        ((128, 48, 64, "Q8_0"), "32 numbers together, which 48 .* take FP16"),
        ((128, 64, 80, "Q4_0"), "which 64 of a key and 80 of a value"),
        ((0, 64, 64, "F16"), "holds nothing"),
        ((128, 64, 128, "F16", True), "can't be the first of keys of 64"),
    ],
)
def test_layouts_that_there_are_none_of_are_refused(arguments: tuple[int, int, int, str], words: str) -> None:
    with pytest.raises(KtoptError, match=words):
        BlockLayout(*arguments)


def test_anchors_take_what_their_vectors_take() -> None:
    taken = {name: anchor_bytes(name, 3, 128, 64) for name in ANCHOR_TYPES}
    assert taken == {
        "FIXED": 3 * 128,
        "BLOCK_MEAN": 128,
        "BLOCK_MAX": 128,
        "DYNAMIC": 3 * 128,
        "QUEST": 256,
        "KEY_INT4": 256 + 128 * (32 + 4) + 128 * (8 + 2) + 128,
    }
    with pytest.raises(KtoptError, match="MEAN is no type of anchors"):
        anchor_bytes("MEAN", 1, 128, 64)
