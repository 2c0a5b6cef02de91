"""A conversation as a file: Markdown to read, JSON for programs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ktopt.chat.conversation import Conversation
from ktopt.chat.safety import shown
from ktopt.diagnostics import UsageError

ENDINGS = (".md", ".json")


def save(conversation: Conversation, model: str, path: str, *, overwrite: bool = False) -> Path:
    """Write a conversation, turns included that the model no longer sees; where to. FileExistsError where there is such a file and
    it isn't to be overwritten, UsageError for another ending and where it can't be written."""
    place = Path(os.path.expanduser(path))  # ~ of somebody who isn't there stays as it is
    if place.suffix not in ENDINGS:
        raise UsageError(f"{path}: the name must end in {' or '.join(ENDINGS)}, which says what is written")
    text = (as_markdown if place.suffix == ".md" else as_json)(conversation, model)
    try:
        with place.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: can't be written: {getattr(error, 'strerror', None) or error}") from None
    return place


def as_markdown(conversation: Conversation, model: str) -> str:
    """Headings for who speaks; the texts as they are, without control characters."""
    parts = [f"# Conversation with {model}"]
    if conversation.system:
        parts += ["## System", conversation.system]
    for turn in conversation.turns:
        parts += ["## User", turn.question, "## Assistant", turn.answer]
        if turn.reason != "stop":
            parts.append("*(cut off)*")
    return shown("\n\n".join(part.strip("\n") for part in parts) + "\n")


def as_json(conversation: Conversation, model: str) -> str:
    """Messages in OpenAI's form; an answer's has `reason`, `usage` and `timings` beside it."""
    messages: list[dict[str, Any]] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.question})
        measured = {"reason": turn.reason, "usage": asdict(turn.usage), "timings": asdict(turn.timings)}
        messages.append({"role": "assistant", "content": turn.answer, **measured})
    saved = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps({"model": model, "saved": saved, "messages": messages}, ensure_ascii=False, indent=2) + "\n"
