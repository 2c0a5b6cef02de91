"""Text out of a model, piece by piece, with what it took: `ktopt run` prints it.

The work is done in a thread, by transformers' own `generate`, or by the shorter loop of decoding.py where only the likeliest token
is asked for; both hand over tokens as they come, and this makes text of them and keeps time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktopt.diagnostics import UsageError
from ktopt.runtime.memory import peak_device_bytes, peak_resident_bytes, resident_bytes

Prompt = str | Sequence[Mapping[str, str]]
"""Plain text, or chat messages of `role` and `content`."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes half a character to."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a generation took.

    prompt_tokens, new_tokens   tokens read and made
    first_token_s               from the start to the first new token: prefill, and choosing that token
    decode_s                    from the first new token to the last
    peak_bytes                  resident memory of the process at its peak, less the baseline
    device_bytes                allocated at the peak on each CUDA device
    """

    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    decode_s: float
    peak_bytes: int
    device_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.first_token_s if self.first_token_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.new_tokens - 1) / self.decode_s if self.new_tokens > 1 and self.decode_s else 0.0


class TextStream:
    """Pieces of generated text, in order; iterate once. `stats` is there when the last has come; closing early stops the model."""

    def __init__(self, model: Any, tokenizer: Any, inputs: Mapping[str, Any], baseline_bytes: int, options: dict[str, Any]) -> None:
        self.stats: Stats | None = None
        self._model, self._tokenizer, self._inputs = model, tokenizer, inputs
        self._baseline_bytes, self._options = baseline_bytes, options
        self._events: queue.Queue[tuple[float, list[int]] | Exception | None] = queue.Queue()
        self._stopped = threading.Event()
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating after the token in work."""
        self._pieces.close()  # type: ignore[attr-defined]

    def _run(self) -> Iterator[str]:
        start = time.perf_counter()
        worker = threading.Thread(target=self._generate, daemon=True)
        worker.start()
        text = IncrementalText(self._tokenizer)
        times: list[float] = []
        try:
            while (event := self._events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                times += [event[0]] * len(event[1])
                if piece := text.add(event[1]):
                    yield piece
            if piece := text.rest():
                yield piece
        finally:
            self._stopped.set()
            worker.join()
            self.stats = self._measure(start, times)

    def _generate(self) -> None:
        try:
            from ktopt.runtime.decoding import only_likeliest, prompt_piece_of

            if only_likeliest(self._model, self._options):
                self._decode()
            else:
                if (piece := prompt_piece_of(self._model)) is not None:
                    self._options.setdefault("prefill_chunk_size", piece)
                self._model.generate(
                    **self._inputs, streamer=_Tokens(self._events), stopping_criteria=[self._stop], **self._options
                )
            self._events.put(None)
        except Exception as error:
            self._events.put(error)

    def _decode(self) -> None:
        from ktopt.runtime.decoding import Decoder

        end = self._options.get("eos_token_id")
        if end is None:
            end = getattr(getattr(self._model, "generation_config", None), "eos_token_id", None)
        ends = end if isinstance(end, list) else [end]
        for token in Decoder(self._model).tokens(self._inputs["input_ids"], self._options["max_new_tokens"]):
            self._events.put((time.perf_counter(), [token]))
            if token in ends or self._stopped.is_set():
                return

    def _stop(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        return torch.full((input_ids.shape[0],), self._stopped.is_set(), device=input_ids.device)

    def _measure(self, start: float, times: list[float]) -> Stats:
        return Stats(
            prompt_tokens=int(self._inputs["input_ids"].shape[-1]),
            new_tokens=len(times),
            first_token_s=times[0] - start if times else 0.0,
            decode_s=times[-1] - times[0] if times else 0.0,
            peak_bytes=max(peak_resident_bytes() - self._baseline_bytes, 0),
            device_bytes=peak_device_bytes(),
        )


class _Tokens:
    """The streamer that `generate` pushes tokens into. Its first push is the prompt."""

    def __init__(self, events: queue.Queue[Any]) -> None:
        self._events = events
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            self._events.put((time.perf_counter(), value.reshape(-1).tolist()))
        self._prompt_seen = True

    def end(self) -> None:
        """The end is told by generate's return."""


class IncrementalText:
    """Turns tokens into text as they come, holding back what is only half a character. Lines that are complete are not decoded
    again, so that time doesn't grow with the text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._given = 0

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens add, perhaps none yet."""
        self._tokens += tokens
        text = self._decode()
        if text.endswith(_UNFINISHED):
            return ""
        piece = text[self._given :]
        self._given = len(text)
        if text.endswith("\n"):
            self._tokens, self._given = [], 0
        return piece

    def rest(self) -> str:
        """What was held back to the end."""
        return self._decode()[self._given :]

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return text


def generate_stream(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    max_new_tokens: int = 256,
    *,
    baseline_bytes: int | None = None,
    **options: Any,
) -> TextStream:
    """Generate from a prompt or from chat messages; iterate over the result for the text, then read its `stats`.

    Messages go through the tokenizer's chat template. baseline_bytes: resident memory that `stats` leaves out, by default what the
    process holds now. Other options are those of transformers' `generate` (do_sample, temperature, assistant_model, ...).
    UsageError for an empty prompt, for messages without a chat template, or where prompt and new tokens exceed the model's context.
    """
    baseline = resident_bytes() if baseline_bytes is None else baseline_bytes
    inputs = encode(model, tokenizer, prompt)
    check_length(model, int(inputs["input_ids"].shape[-1]), max_new_tokens)
    return TextStream(model, tokenizer, inputs, baseline, {"max_new_tokens": max_new_tokens, **options})


def check_length(model: Any, prompt_tokens: int, max_new_tokens: int) -> None:
    """UsageError where a prompt, or it and what is to be generated, is longer than the model's context."""
    context = context_tokens(model)
    if context is None or prompt_tokens + max_new_tokens <= context:
        return
    if prompt_tokens >= context:
        raise UsageError(f"the prompt has {prompt_tokens} tokens, and the model's context is {context}: shorten it")
    raise UsageError(
        f"the prompt has {prompt_tokens} tokens, which with {max_new_tokens} new ones exceeds the model's context of {context}: "
        f"generate at most {context - prompt_tokens} (-n {context - prompt_tokens})"
    )


def context_tokens(model: Any) -> int | None:
    """The tokens that a model was made for, those of its rotary embedding's scaling included; None where its config doesn't say."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    scaled = int(factor * original) if isinstance(factor, int | float) and isinstance(original, int) else 0
    return max(length, scaled)


def encode(model: Any, tokenizer: Any, prompt: Prompt) -> Mapping[str, Any]:
    """input_ids and attention_mask (1, tokens) of a prompt, beside the model's embedding."""
    if isinstance(prompt, str):
        encoded = tokenizer(prompt, return_tensors="pt")
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError("the tokenizer has no chat template, so it can't take messages; give the prompt as text")
        encoded = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True, tokenize=True
        )
    if encoded["input_ids"].shape[-1] == 0:
        raise UsageError("the prompt is empty: it has no tokens")
    device = model.get_input_embeddings().weight.device
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask") if name in encoded}
