"""Attention of many queries on the CPU, as a prefill needs it: what torch's scaled_dot_product_attention computes with a causal
mask, over a cache of keys and values that needn't be full, in a fraction of the time.

Scores never exist all at once, keys that a query doesn't see cost nothing, and query heads that share a KV head go through its
keys together. Legend: T queries (tokens), H query heads, G key and value heads (H is a multiple of G), C capacity of the cache,
D numbers of a query's and a key's head, V of a value's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktopt.kernels.cpu import _needed
from ktopt.weights.ggml_types import BY_NAME

if TYPE_CHECKING:
    import torch

KINDS = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


def prefill_attention(
    q_THD: torch.Tensor,
    keys_GCD: torch.Tensor,
    values_GCV: torch.Tensor,
    *,
    first: int = 0,
    start: int = 0,
    window: int = 0,
    scale: float | None = None,
    end: int | None = None,
    out_THV: torch.Tensor | None = None,
    log_sum_TH: torch.Tensor | None = None,
    threads: int = 1,
) -> torch.Tensor:
    """softmax(q @ keys.T * scale) @ values in float32 (T, H, V), each query on the keys up to its own.

    Query t stands at position first + t of the cache, whose keys and values up to there must be filled in; what lies behind isn't
    read into the result. It sees the keys from `start` on (before it lies padding), with a `window` only the last so many, its own
    included. With an `end` every query sees keys [start, end) instead. One that sees nothing gives zeros. scale: 1 / sqrt(D) where
    none is given. `log_sum` takes the natural logarithm of each softmax's sum, by which attention to several parts is merged.

    q is float32; keys and values are of one dtype, float32, float16 or bfloat16, and D and V multiples of 8. A token's heads must
    lie one after the other in q and out, and a head's tokens in keys and values, each contiguous; tokens of q and out and heads of
    the cache may be further apart, so that slices of wider tensors do. All on the CPU. Where the CPU multiplies bfloat16 (`isa` is
    avx512bf16) and the cache isn't float32, queries, keys, values and the softmax's numbers are rounded to it and summed up in
    float32; elsewhere all is float32. The result is the same for any number of threads. ValueError for what doesn't
    fit. Releases the GIL.
    """
    import torch

    tokens, heads, key_dim = q_THD.shape
    kv_heads, capacity, value_dim = values_GCV.shape
    if out_THV is None:
        out_THV = torch.empty(tokens, heads, value_dim)
    if keys_GCD.shape != (kv_heads, capacity, key_dim) or out_THV.shape != (tokens, heads, value_dim):
        shapes = [list(tensor.shape) for tensor in (q_THD, keys_GCD, values_GCV, out_THV)]
        raise ValueError(f"q {shapes[0]}, keys {shapes[1]}, values {shapes[2]} and out {shapes[3]} don't fit together")
    if q_THD.dtype != torch.float32 or out_THV.dtype != torch.float32:
        raise ValueError(f"q and out must be float32, not {q_THD.dtype} and {out_THV.dtype}")
    kind = KINDS.get(str(keys_GCD.dtype))
    if kind is None or values_GCV.dtype != keys_GCD.dtype:
        raise ValueError(f"keys and values must both be float32, float16 or bfloat16, not {keys_GCD.dtype} and {values_GCV.dtype}")
    for name, tensor in (("q", q_THD), ("out", out_THV), ("keys", keys_GCD), ("values", values_GCV)):
        if tensor.device.type != "cpu" or not tensor[:1].is_contiguous():
            raise ValueError(f"{name} must be on the CPU, the last two dimensions contiguous: strides {list(tensor.stride())}")
    if log_sum_TH is not None and (
        log_sum_TH.shape != (tokens, heads) or log_sum_TH.dtype is not torch.float32 or not log_sum_TH.is_contiguous()
    ):
        raise ValueError(f"sums must be float32 ({tokens}, {heads}), contiguous, not {log_sum_TH.dtype} {list(log_sum_TH.shape)}")
    size = keys_GCD.element_size()
    _needed().prefill_attention(
        BY_NAME[kind].number,
        keys_GCD.data_ptr(),
        values_GCV.data_ptr(),
        keys_GCD.stride(0) * size,
        values_GCV.stride(0) * size,
        capacity,
        heads,
        kv_heads,
        key_dim,
        value_dim,
        window,
        q_THD.data_ptr(),
        q_THD.stride(0),
        tokens,
        first,
        start,
        out_THV.data_ptr(),
        out_THV.stride(0),
        threads,
        -1 if end is None else end,
        0 if log_sum_TH is None else log_sum_TH.data_ptr(),
        key_dim**-0.5 if scale is None else scale,
    )
    return out_THV
