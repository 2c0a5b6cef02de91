"""Prompts whose right answers are known: asked alone, before the load, and cut where the model is no longer sure of its next token.

A prompt lists random words several times and begins again, so the likeliest answer goes on with the list. That is certain for many
tokens, and needs the keys and values of just the right tokens. Where two tokens are close, rounding may decide, and which kernels
compute depends on who else is in a step: from such a place on an answer isn't compared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from serve_client import ask

LEAST_TOKENS, MOST_TOKENS = 8, 32
SHARED_WORDS = 700
REPEATS = 4
_TEXT = (
    "apple bird bread bridge candle castle cloud coffee desert dragon eagle engine farmer feather finger flower forest garden "
    "glass guitar hammer harbor honey horse island jacket jungle kettle kitchen ladder lemon letter lion market meadow mirror "
    "monkey mountain needle ocean orange paper pencil pepper piano pillow planet pocket potato rabbit river rocket salad school "
    "shadow silver spider spoon station stone storm summer table temple ticket tiger tower train valley village violin wagon water "
    "whale window winter wizard yellow zebra"
)
NOUNS = _TEXT.split()
_OTHERS = (
    "quickly under because although seven eleven gentle hollow bitter between during beyond nearly rather written spoken hidden "
    "borrowed forgotten measured carefully sometimes always never without against younger older deeper wider"
)
OTHERS = _OTHERS.split()
"""What fills long prompts, so that no word of a list is in it."""


@dataclass(frozen=True)
class Reference:
    """A prompt, as a request's fields, and the text that so many tokens of its answer make."""

    name: str
    path: str
    fields: dict[str, Any]
    tokens: int
    text: str

    def request(self, **more: Any) -> dict[str, Any]:
        return {**self.fields, "max_tokens": self.tokens, "temperature": 0, **more}


def candidates(count: int, seed: int) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, path, fields): short ones, long ones with prefixes of their own, long ones that share one, and chats."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    shared = _filler(random.Random(f"{seed} shared"), SHARED_WORDS)
    for i in range(count):
        draw = random.Random(f"{seed} {i}")
        words, earlier = _words(draw), _words(draw)
        task = "\n".join([*[" ".join(words)] * REPEATS, " ".join(words[: draw.randint(3, 5)])])
        own = _filler(draw, draw.randint(300, 900))
        chat = [{"role": "user" if j % 2 == 0 else "assistant", "content": " ".join(earlier if j < 2 else words)} for j in range(5)]
        found.append((f"short {i}", "/v1/completions", {"prompt": task}))
        found.append((f"long {i}", "/v1/completions", {"prompt": f"{own}\n\n{task}"}))
        found.append((f"shared {i}", "/v1/completions", {"prompt": f"{shared}\n\n{task}"}))
        found.append((f"chat {i}", "/v1/chat/completions", {"messages": chat}))
    return found


def _words(draw: random.Random) -> list[str]:
    return draw.sample(NOUNS, 20)


def _filler(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(OTHERS, k=words))


async def references(port: int, headers: dict[str, str], count: int, seed: int, margin: float) -> list[Reference]:
    """The candidates of whose answers enough is certain: the likeliest token is ahead by `margin`, in nats."""
    found = []
    for name, path, fields in candidates(count, seed):
        chat = path.endswith("chat/completions")
        wanted = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        given = {**fields, "temperature": 0, "max_tokens": MOST_TOKENS, **wanted}
        choice = (await _asked(port, path, given, headers))["choices"][0]
        sure = _sure(_gaps(choice["logprobs"], chat), margin)
        if sure < LEAST_TOKENS:
            continue
        made = Reference(name, path, fields, sure, "")
        text = _text((await _asked(port, path, made.request(), headers))["choices"][0])
        if not _text(choice).startswith(text.rstrip("\ufffd")):
            raise RuntimeError(f"{name}: asked twice alone, the answers differ: {_text(choice)!r} and {text!r}")
        found.append(Reference(name, path, fields, sure, text))
    return found


async def _asked(port: int, path: str, given: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    reply = await ask(port, path, given, headers=headers)
    if reply.status != 200:
        raise RuntimeError(f"{path} answered {reply.status}: {reply.body[:600].decode(errors='replace')}")
    answer: dict[str, Any] = reply.json()
    return answer


def _text(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def _gaps(logprobs: dict[str, Any], chat: bool) -> list[float]:
    """How far the likeliest token was ahead of the second, for each token of an answer."""
    if chat:
        tops = [sorted((top["logprob"] for top in token["top_logprobs"]), reverse=True) for token in logprobs["content"]]
    else:
        tops = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]]
    return [top[0] - top[1] if len(top) > 1 else 0.0 for top in tops]


def _sure(gaps: list[float], margin: float) -> int:
    return next((i for i, gap in enumerate(gaps) if gap < margin), len(gaps))
