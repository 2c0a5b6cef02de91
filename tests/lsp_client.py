"""A small client of language servers, for tests and the benchmark: a child process spoken to over its standard input and output.

It knows the framing and nothing of ktopt; what the server says is kept as plain JSON values. `Doc` is an open document that is
edited and asked about by its text, as a person does, and not by positions.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CAPABILITIES = {
    "workspace": {
        "configuration": False,
        "inlayHint": {"refreshSupport": False},
        "didChangeWatchedFiles": {"dynamicRegistration": False},
    },
    "textDocument": {
        "publishDiagnostics": {"relatedInformation": True, "codeDescriptionSupport": True},
        "completion": {"completionItem": {"snippetSupport": True}},
    },
}


class LspError(Exception):
    """The server answered a request with an error."""


class LspClient:
    """One session. Use as a context manager; `initialize` comes first."""

    def __init__(self, cwd: str | Path | None = None, env: dict[str, str] | None = None) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "ktopt", "lsp"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=cwd or tempfile.gettempdir(),
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
        )
        self.answers: dict[int, Any] = {}
        self.inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.published: dict[str, dict[str, Any]] = {}
        self.messages: list[dict[str, Any]] = []
        self.settings: Any = None
        self.next_id = 0
        self.versions: dict[str, int] = {}
        self.texts: dict[str, str] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> LspClient:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout, self.log):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        stream = self.child.stdout
        assert stream is not None
        try:
            while header := stream.readline():
                length = 0
                while header.strip():
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                    header = stream.readline()
                self.inbox.put(json.loads(stream.read(length)))
        except ValueError:
            pass
        self.inbox.put(None)

    def send_raw(self, body: bytes) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.child.stdin.flush()

    def notify(self, method: str, params: Any = None) -> None:
        self.send_raw(json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode())

    def request(self, method: str, params: Any = None, timeout_s: float = 20) -> Any:
        """The result of a request. LspError where the server answers with an error."""
        self.next_id += 1
        number = self.next_id
        self.send_raw(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode())
        deadline = time.monotonic() + timeout_s
        while number not in self.answers:
            self.take(deadline)
        answer = self.answers.pop(number)
        if "error" in answer:
            raise LspError(json.dumps(answer["error"]))
        return answer.get("result")

    def take(self, deadline: float) -> dict[str, Any]:
        """The next message from the server, dealt with. TimeoutError past the deadline, EOFError where the server is gone."""
        try:
            message = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("the server says nothing") from None
        if message is None:
            raise EOFError("the server is gone")
        self.messages.append(message)
        if "method" not in message:
            self.answers[message["id"]] = message
        elif "id" in message:
            asked = message["params"].get("items", []) if message["method"] == "workspace/configuration" else None
            result = [self.settings for _ in asked] if asked is not None else None
            self.send_raw(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode())
        elif message["method"] == "textDocument/publishDiagnostics":
            self.published[message["params"]["uri"]] = message["params"]
        return message

    def initialize(
        self, root: str | Path | None = None, options: Any = None, capabilities: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        folders = [{"uri": Path(root).as_uri(), "name": "work"}] if root else None
        params = {
            "processId": os.getpid(),
            "rootUri": folders[0]["uri"] if folders else None,
            "workspaceFolders": folders,
            "capabilities": capabilities or CAPABILITIES,
            "initializationOptions": options,
        }
        result: dict[str, Any] = self.request("initialize", params)
        self.notify("initialized", {})
        return result

    def open(self, uri: str, text: str) -> None:
        self.versions[uri], self.texts[uri] = 1, text
        item = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
        self.notify("textDocument/didOpen", {"textDocument": item})

    def change(self, uri: str, *changes: dict[str, Any]) -> int:
        """Send edits; the version that they make."""
        self.versions[uri] += 1
        document = {"uri": uri, "version": self.versions[uri]}
        self.notify("textDocument/didChange", {"textDocument": document, "contentChanges": list(changes)})
        return self.versions[uri]

    def diagnostics(self, uri: str, version: int | None = None, timeout_s: float = 20) -> list[dict[str, Any]]:
        """What was published of a document's version; of its last where none is given."""
        wanted = version if version is not None else self.versions[uri]
        deadline = time.monotonic() + timeout_s
        while self.published.get(uri, {}).get("version") != wanted:
            self.take(deadline)
        found: list[dict[str, Any]] = self.published[uri]["diagnostics"]
        return found

    def at(self, uri: str, method: str, line: int, character: int, **more: Any) -> Any:
        """The result of a request about a position."""
        position = {"line": line, "character": character}
        return self.request(f"textDocument/{method}", {"textDocument": {"uri": uri}, "position": position, **more})

    def stop(self) -> int:
        """Shut down as an editor does; the server's exit code."""
        self.request("shutdown")
        self.notify("exit")
        return self.child.wait(10)

    def stderr(self) -> str:
        self.log.seek(0)
        return self.log.read().decode("utf-8", "replace")


class Doc:
    """A document that is open in an editor, edited by text rather than by position."""

    def __init__(self, editor: LspClient, uri: str, text: str) -> None:
        self.editor, self.uri = editor, uri
        editor.open(uri, text)

    @property
    def text(self) -> str:
        return self.editor.texts[self.uri]

    def position(self, offset: int) -> dict[str, int]:
        before = self.text[:offset]
        return {
            "line": before.count("\n"),
            "character": len(before.rpartition("\n")[2].encode("utf-16-le")) // 2,
        }

    def place(self, word: str, inside: int = 0) -> dict[str, int]:
        """The position of the first `word`, or of a character inside it."""
        return self.position(self.text.index(word) + inside)

    def replace(self, old: str, new: str) -> None:
        """Replace the first `old`, as an incremental edit."""
        at = self.text.index(old)
        span = {"start": self.position(at), "end": self.position(at + len(old))}
        self.editor.texts[self.uri] = self.text[:at] + new + self.text[at + len(old) :]
        self.editor.change(self.uri, {"range": span, "text": new})

    def apply(self, edits: list[dict[str, Any]]) -> None:
        """Make the server's edits, the last first."""
        lines = self.text.split("\n")

        def offset(position: dict[str, int]) -> int:
            line = lines[position["line"]].encode("utf-16-le")[: 2 * position["character"]].decode("utf-16-le")
            return sum(len(other) + 1 for other in lines[: position["line"]]) + len(line)

        text = self.text
        for edit in sorted(edits, key=lambda e: -offset(e["range"]["start"])):
            text = text[: offset(edit["range"]["start"])] + edit["newText"] + text[offset(edit["range"]["end"]) :]
        self.editor.texts[self.uri] = text
        self.editor.change(self.uri, {"text": text})

    @property
    def findings(self) -> list[dict[str, Any]]:
        return self.editor.diagnostics(self.uri)

    @property
    def codes(self) -> list[str]:
        return [d.get("code", "") for d in self.findings]

    def shown(self, found: dict[str, Any]) -> str:
        """The text of a finding's range, by UTF-16 columns."""
        start, end = found["range"]["start"], found["range"]["end"]
        assert start["line"] == end["line"]
        line = self.text.split("\n")[start["line"]].encode("utf-16-le")
        return line[2 * start["character"] : 2 * end["character"]].decode("utf-16-le")

    def ask(self, method: str, **params: Any) -> Any:
        return self.editor.request(f"textDocument/{method}", {"textDocument": {"uri": self.uri}, **params})

    def hover(self, word: str, inside: int = 1) -> str:
        found = self.ask("hover", position=self.place(word, inside))
        return found["contents"]["value"] if found else ""

    def labels(self, word: str) -> list[str]:
        """What is offered behind `word`."""
        found = self.ask("completion", position=self.position(self.text.index(word) + len(word)))
        return [item["label"] for item in found["items"]] if found else []

    def hints(self) -> list[tuple[int, str]]:
        whole = {"start": {"line": 0, "character": 0}, "end": {"line": 999, "character": 0}}
        return [(h["position"]["line"], h["label"]) for h in self.ask("inlayHint", range=whole)]

    def actions(self, word: str, **context: Any) -> list[dict[str, Any]]:
        place = self.place(word)
        found: list[dict[str, Any]] = self.ask(
            "codeAction", range={"start": place, "end": place}, context={"diagnostics": [], **context}
        )
        return found
