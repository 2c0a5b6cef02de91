"""chunk_prefill and decode_wrapper as KTransformers' examples call them: on the model that was loaded last."""

from __future__ import annotations

from typing import Any

from ktopt.diagnostics import UsageError

_last: list[Any] = []


def set_current(session: Any) -> None:
    """Have these functions work on a session. An earlier one is closed."""
    while _last:
        _last.pop().close()
    _last.append(session)


def current() -> Any:
    """The session of the model that was loaded last. UsageError where there is none."""
    if not _last:
        raise UsageError('no model was loaded for long contexts: model, tokenizer = load_model(..., mode="long_context")')
    return _last[-1]


def chunk_prefill(inputs: Any, cache_position: Any = None, past_key_values: Any = None) -> Any:
    """LongContextSession.chunk_prefill of the model loaded last."""
    return current().chunk_prefill(inputs, cache_position, past_key_values)


def decode_wrapper(
    next_token: Any,
    position_ids: Any = None,
    cache_position: Any = None,
    cuda_graph_runner: Any = None,
    past_key_values: Any = None,
    inputs: Any = None,
    seq_length: int | None = None,
) -> Any:
    """LongContextSession.decode_wrapper of the model loaded last."""
    return current().decode_wrapper(
        next_token, position_ids, cache_position, cuda_graph_runner, past_key_values, inputs, seq_length
    )
