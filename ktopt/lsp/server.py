"""The language server: the session with an editor, and who answers which message.

What is asked about a text waits for its check (files.py), and is answered in a thread of its own, so that the connection is always
served. No error leaves the server but as a line on stderr: the editor gets an empty answer.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method
from pygls.uris import to_fs_path

from ktopt import __version__
from ktopt.lsp import answers
from ktopt.lsp.analysis import Analyser, Analysis, may_become_rules
from ktopt.lsp.complete import subject_page
from ktopt.lsp.files import Files, OpenFile
from ktopt.lsp.findings import file_uri, published
from ktopt.lsp.models import Models
from ktopt.lsp.project import Project
from ktopt.lsp.text import Text

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.3
"""How long the first completion waits for the check that loads the trees."""
TRIGGERS = [".", "@", "$", "[", '"', "'", " ", "=", "&", "|", "(", "{", ","]
WATCHED = ("**/pyproject.toml", "**/*.yaml", "**/*.yml", "**/config.json")
T = TypeVar("T")


class Protocol(LanguageServerProtocol):
    """pygls' protocol, without its copies of documents: those take lines to end where the protocol doesn't."""

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: types.DidOpenTextDocumentParams) -> None:  # type: ignore[override]
        self._server.opened(params)  # type: ignore[attr-defined]

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: types.DidChangeTextDocumentParams) -> None:  # type: ignore[override]
        self._server.changed(params)  # type: ignore[attr-defined]

    @lsp_method(types.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: types.DidCloseTextDocumentParams) -> None:  # type: ignore[override]
        self._server.closed(params)  # type: ignore[attr-defined]


def guarded(handler: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A handler that answers nothing where it fails, and leaves the reason on stderr. What was to be completed goes back as it
    came."""

    @wraps(handler)
    async def safe(self: Server, params: Any) -> Any:
        try:
            return await handler(self, params)
        except Exception:
            log.exception("%s failed", handler.__name__)
            return params if isinstance(params, types.CompletionItem | types.CodeAction) else None

    return safe


class Server(LanguageServer):
    """The server and its state. Everything here runs in the event loop's thread, but for what `in_thread` runs."""

    def __init__(self) -> None:
        super().__init__("ktopt", __version__, protocol_cls=Protocol)
        self.project = Project()
        self.models = Models(self.model_loaded)
        self.files = Files(Analyser(self.project, self.models), self.publish)
        self.answerer = ThreadPoolExecutor(1, "answer")
        self.loop: asyncio.AbstractEventLoop | None = None
        self.options: Any = None
        self.asked_to_stop = False
        _register(self)

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Errors of the connection: for stderr, not for the editor's user."""
        log.warning("%s: %s", type(error).__name__, error)

    # The session

    def started(self, params: types.InitializeParams) -> None:
        self.loop = asyncio.get_running_loop()
        folders = params.workspace_folders or []
        root = to_fs_path(folders[0].uri) if folders else to_fs_path(params.root_uri) if params.root_uri else params.root_path
        self.project.root = Path(root) if root else None
        self.options = params.initialization_options
        self.project.configure(self.options)
        self.files.thread.submit(warm_up)

    @guarded
    async def ready(self, params: Any) -> None:
        """Ask for the editor's settings, and to be told of changes of files and settings, where it knows how."""
        workspace = self.client_capabilities.workspace
        watches = workspace.did_change_watched_files if workspace else None
        if watches is not None and watches.dynamic_registration:
            watchers = [types.FileSystemWatcher(pattern) for pattern in WATCHED]
            options = types.DidChangeWatchedFilesRegistrationOptions(watchers)
            files = types.Registration("ktopt-files", types.WORKSPACE_DID_CHANGE_WATCHED_FILES, options)
            await self.client_register_capability_async(types.RegistrationParams([files]))
        settings = workspace.did_change_configuration if workspace else None
        if settings is not None and settings.dynamic_registration:
            section = types.DidChangeConfigurationRegistrationOptions("ktopt")
            asked = types.Registration("ktopt-settings", types.WORKSPACE_DID_CHANGE_CONFIGURATION, section)
            await self.client_register_capability_async(types.RegistrationParams([asked]))
        await self.ask_for_settings()

    async def ask_for_settings(self) -> bool:
        """Take the editor's own `ktopt` settings, where it can be asked; those that it began with, where it has none."""
        workspace = self.client_capabilities.workspace
        if workspace is None or not workspace.configuration:
            return False
        items = [types.ConfigurationItem(section="ktopt")]
        found = await self.workspace_configuration_async(types.ConfigurationParams(items))
        self.project.configure(found[0] if found and found[0] else self.options)
        self.files.check_all()
        return True

    @guarded
    async def settings_changed(self, params: types.DidChangeConfigurationParams) -> None:
        if not await self.ask_for_settings():
            self.project.configure(params.settings or self.options)
        self.look_again()

    def look_again(self) -> None:
        """Read settings and models again, and check everything: files on disk have changed."""
        self.project.forget()
        self.models.forget()
        self.files.check_all()

    def model_loaded(self, name: str) -> None:
        """Called from another thread when a tree is there that was waited for."""
        log.info("the tree of %s is there", name)
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.files.check_all)

    # Documents

    def opened(self, params: types.DidOpenTextDocumentParams) -> None:
        document = params.text_document
        text = Text(document.text, self.encoding)
        self.files.add(OpenFile(document.uri, self.path_of(document.uri), text, document.version))

    def changed(self, params: types.DidChangeTextDocumentParams) -> None:
        document = params.text_document
        self.files.change(document.uri, document.version, list(params.content_changes))

    def closed(self, params: types.DidCloseTextDocumentParams) -> None:
        file = self.files.open.pop(params.text_document.uri, None)
        if file is not None and file.is_rules:
            self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(file.uri, [], file.version))

    @property
    def encoding(self) -> str:
        return str(
            getattr(self.server_capabilities.position_encoding, "value", self.server_capabilities.position_encoding) or "utf-16"
        )

    def path_of(self, uri: str) -> str:
        """A document's path; for one that isn't a file, such as one never saved, a name in the workspace."""
        if uri.startswith("file:"):
            return to_fs_path(uri) or uri
        name = "".join(c if c.isalnum() or c in "._- " else "-" for c in uri.rpartition("/")[2].rpartition(":")[2]) or "untitled"
        return str((self.project.root or Path.cwd()) / name)

    def uri_of(self, path: str) -> str:
        """The URI of a path: as the editor writes it, where it has the file open."""
        return next((file.uri for file in list(self.files.open.values()) if file.path == path), None) or file_uri(path)

    def publish(self, file: OpenFile, analysis: Analysis) -> None:
        """Send what was found in a document, and have its hints asked for anew."""
        found = published(analysis, self.uri_of)
        self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(file.uri, found, file.version))
        workspace = self.client_capabilities.workspace
        if workspace is not None and workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.files.start(self.workspace_inlay_hint_refresh_async(None))

    # Requests

    def in_thread(self, work: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        """Run what may take a moment, such as a regex over all modules, without holding up the connection."""
        return asyncio.get_running_loop().run_in_executor(self.answerer, partial(work, *arguments))

    @guarded
    async def complete(self, params: types.CompletionParams) -> types.CompletionList | None:
        """Completion doesn't wait for a check: it reads the text as it is, and the trees of the last one."""
        file = self.files.open.get(params.text_document.uri)
        if file is None or not (file.is_rules or may_become_rules(file.text.text)):
            return None
        if file.analysis is None:
            await self.files.current(file.uri, FIRST_WAIT_S)
        typed = params.context.trigger_character if params.context else None
        before = file.text.text[: file.text.offset(params.position)]
        if typed == " " and not before.rstrip(" ").endswith((":", ",", "&", "|", "=", "{", "(")):
            return None
        found = await self.in_thread(answers.completions, file.shown, file.analysis, params.position, self.takes_snippets)
        return types.CompletionList(False, found)

    @property
    def takes_snippets(self) -> bool:
        document = self.client_capabilities.text_document
        item = document.completion.completion_item if document and document.completion else None
        return bool(item and item.snippet_support)

    @guarded
    async def resolve_completion(self, item: types.CompletionItem) -> types.CompletionItem:
        page = subject_page(item.data) if isinstance(item.data, str) else ""
        if page:
            item.documentation = types.MarkupContent(types.MarkupKind.Markdown, page)
        return item

    @guarded
    async def hover(self, params: types.HoverParams) -> types.Hover | None:
        found = await self.files.current(params.text_document.uri)
        return await self.in_thread(answers.hovered, *found[1:], params.position) if found else None

    @guarded
    async def define(self, params: types.DefinitionParams) -> list[types.Location] | None:
        found = await self.files.current(params.text_document.uri)
        return await self.in_thread(answers.definitions, *found[1:], params.position, self.uri_of) if found else None

    @guarded
    async def symbols(self, params: types.DocumentSymbolParams) -> list[types.DocumentSymbol] | None:
        found = await self.files.current(params.text_document.uri)
        return await self.in_thread(answers.symbols, *found[1:]) if found else None

    @guarded
    async def hints(self, params: types.InlayHintParams) -> list[types.InlayHint] | None:
        found = await self.files.current(params.text_document.uri)
        return await self.in_thread(answers.inlay_hints, found[2], found[1].shown, params.range) if found else None

    @guarded
    async def act(self, params: types.CodeActionParams) -> list[types.CodeAction] | None:
        found = await self.files.current(params.text_document.uri)
        return await self.in_thread(answers.code_actions, found[1], found[0].uri, params, self.uri_of) if found else None

    @guarded
    async def resolve_action(self, action: types.CodeAction) -> types.CodeAction:
        uri = action.data.get("uri", "") if isinstance(action.data, dict) else ""
        found = await self.files.current(uri)
        if found is not None and action.edit is None:
            action.edit = await self.in_thread(answers.all_fixed, found[1], uri)
        return action

    @guarded
    async def format(self, params: types.DocumentFormattingParams) -> list[types.TextEdit] | None:
        found = await self.files.current(params.text_document.uri)
        return await self.in_thread(answers.formatted, found[1]) if found else None


def warm_up() -> None:
    """Import what the first check needs, before it."""
    from ktopt import registry
    from ktopt.diagnostics import Report
    from ktopt.selector import parse_selector
    from ktopt.source import FILE_START, Origin

    parse_selector("class=Linear", Origin("", FILE_START), {}, Report())
    registry.specs()


def _register(server: Server) -> None:
    """Tie each message to its method. pygls asks for plain functions."""
    actions = types.CodeActionOptions([types.CodeActionKind.QuickFix, answers.FIX_ALL], resolve_provider=True)
    completion = types.CompletionOptions(TRIGGERS, resolve_provider=True)
    requests: list[tuple[str, Callable[[Any], Any], Any]] = [
        (types.INITIALIZED, server.ready, None),
        (types.WORKSPACE_DID_CHANGE_CONFIGURATION, server.settings_changed, None),
        (types.TEXT_DOCUMENT_COMPLETION, server.complete, completion),
        (types.COMPLETION_ITEM_RESOLVE, server.resolve_completion, None),
        (types.TEXT_DOCUMENT_HOVER, server.hover, None),
        (types.TEXT_DOCUMENT_DEFINITION, server.define, None),
        (types.TEXT_DOCUMENT_DOCUMENT_SYMBOL, server.symbols, None),
        (types.TEXT_DOCUMENT_INLAY_HINT, server.hints, None),
        (types.TEXT_DOCUMENT_CODE_ACTION, server.act, actions),
        (types.CODE_ACTION_RESOLVE, server.resolve_action, None),
        (types.TEXT_DOCUMENT_FORMATTING, server.format, None),
    ]
    for method, handler, options in requests:
        _tie(server, method, handler, options)
    server.feature(types.INITIALIZE)(lambda params: server.started(params))
    server.feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)(lambda params: server.look_again())
    server.feature(types.TEXT_DOCUMENT_DID_SAVE)(lambda params: server.look_again())
    server.feature(types.SHUTDOWN)(lambda params: setattr(server, "asked_to_stop", True))


def _tie(server: Server, method: str, handler: Callable[[Any], Any], options: Any) -> None:
    async def answer(params: Any) -> Any:
        return await handler(params)

    server.feature(method, options)(answer)


def serve() -> int:
    """Serve on standard input and output until the editor says so. Whatever prints to standard output meanwhile goes to stderr."""
    import sys

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="ktopt lsp: %(message)s")
    sys.stdout.flush()
    wire = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    gc.disable()  # the server collects when it is idle
    server = Server()
    server.start_io(sys.stdin.buffer, wire)
    sys.stderr.flush()
    os._exit(0 if server.asked_to_stop else 1)  # a thread may still be at a long check, which nobody waits for
