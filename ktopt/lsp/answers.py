"""Answers in the protocol's terms: what the other files find, with offsets and lines made into the editor's positions.

Each function takes an open document's analysis and answers one request; none of them knows of the connection.
"""

from __future__ import annotations

from pathlib import Path

from lsprotocol import types

from ktopt.diagnostics import CompileError, KtoptError
from ktopt.lsp import actions as doing
from ktopt.lsp.analysis import Analysis
from ktopt.lsp.complete import Around, Choice, complete
from ktopt.lsp.findings import Uris, finding, location
from ktopt.lsp.hover import hover
from ktopt.lsp.navigate import definition, outline
from ktopt.lsp.rules import Known, hints, lets_of
from ktopt.lsp.text import Shown

_KINDS = {
    "key": types.CompletionItemKind.Property,
    "operator": types.CompletionItemKind.Class,
    "class": types.CompletionItemKind.Class,
    "op": types.CompletionItemKind.EnumMember,
    "value": types.CompletionItemKind.Value,
    "segment": types.CompletionItemKind.Module,
    "ref": types.CompletionItemKind.Variable,
    "field": types.CompletionItemKind.Field,
    "function": types.CompletionItemKind.Function,
    "file": types.CompletionItemKind.File,
    "code": types.CompletionItemKind.Constant,
    "snippet": types.CompletionItemKind.Snippet,
}
FIX_ALL = "source.fixAll.ktopt"


def completions(shown: Shown, now: Analysis | None, position: types.Position, snippets: bool) -> list[types.CompletionItem]:
    """What may stand at a position. `now` need not be of the text at hand: the trees are the same."""
    imported: dict[str, str] = {}
    if now is not None and now.document is not None:
        imported = {name: text for d in now.document.imports for name, (text, _) in lets_of(d).items()}
    around = Around(now.graphs if now is not None else {}, imported, Path(shown.source.path).parent)
    choices = complete(shown.text, shown.text.offset(position), around)
    return [_item(choice, shown, snippets) for choice in choices if snippets or not choice.snippet]


def _item(choice: Choice, shown: Shown, snippets: bool) -> types.CompletionItem:
    return types.CompletionItem(
        label=choice.label,
        kind=_KINDS[choice.kind],
        detail=choice.detail or None,
        documentation=_markdown(choice.page) if choice.page else None,
        sort_text=f"{choice.rank:04d}",
        filter_text=choice.insert.strip("\"'") if not choice.snippet else None,
        insert_text_format=types.InsertTextFormat.Snippet if choice.snippet else types.InsertTextFormat.PlainText,
        text_edit=types.TextEdit(shown.text.range(choice.start, choice.end), choice.insert),
        data=choice.subject or None,
    )


def _markdown(text: str) -> types.MarkupContent:
    return types.MarkupContent(types.MarkupKind.Markdown, text)


def hovered(now: Analysis, known: Known, position: types.Position) -> types.Hover | None:
    found = hover(now, known, now.shown.text.offset(position))
    return types.Hover(_markdown(found.page), now.shown.text.range(found.start, found.end)) if found is not None else None


def definitions(now: Analysis, known: Known, position: types.Position, uri_of: Uris) -> list[types.Location]:
    """Places in the file itself are those of the last text that compiled."""
    found = definition(now, known, now.shown.text.offset(position))
    places = []
    for origin in found:
        of = known.analysis if origin.file == known.analysis.path and known.moved is not None else now
        places.append(location(origin, of, uri_of))
    return places


def symbols(now: Analysis, known: Known) -> list[types.DocumentSymbol]:
    text = now.shown.text
    found = []
    for entry in outline(now, known):
        start = text.line_starts[entry.first]
        whole, first = text.range(start, text.line_end(entry.last)), text.range(start, text.line_end(entry.first))
        kind = types.SymbolKind.Object if entry.kind == "rule" else types.SymbolKind.Namespace
        found.append(types.DocumentSymbol(entry.name, kind, whole, first, entry.detail or None))
    return found


def inlay_hints(known: Known, shown: Shown, where: types.Range) -> list[types.InlayHint]:
    """Each rule's counts at the end of the line that its `match` stands on."""
    text = shown.text
    return [
        types.InlayHint(text.position(text.line_end(line)), label, types.InlayHintKind.Type, padding_left=True)
        for line, label in hints(known)
        if where.start.line <= line <= where.end.line
    ]


def code_actions(now: Analysis, uri: str, params: types.CodeActionParams, uri_of: Uris) -> list[types.CodeAction]:
    """Fixes and ignore comments for what stands on the lines asked about, and all certain fixes at once."""
    only = params.context.only

    def wanted(kind: str) -> bool:
        return not only or any(kind == asked or kind.startswith(f"{asked}.") for asked in only)

    found = []
    if wanted(types.CodeActionKind.QuickFix):
        first, last = (now.shown.line_of(p) for p in (params.range.start, params.range.end))
        for action in doing.actions(now, first, last):
            edit = _rewrite(now.shown, uri, action.text)
            concerned = [finding(action.diagnostic, now, uri_of)]
            found.append(
                types.CodeAction(action.title, types.CodeActionKind.QuickFix, concerned, action.preferred or None, edit=edit)
            )
    if wanted(FIX_ALL) and doing.has_fixes(now):
        found.append(types.CodeAction("Fix all that is certain", FIX_ALL, data={"uri": uri}))
    return found


def all_fixed(now: Analysis, uri: str) -> types.WorkspaceEdit | None:
    return _rewrite(now.shown, uri, doing.fixed(now))


def formatted(now: Analysis) -> list[types.TextEdit] | None:
    """The edit that brings a file into normal form; None where it can't be read."""
    from ktopt.authoring.fmt import format_text

    try:
        return _edits(now.shown, format_text(now.shown.source))
    except (CompileError, KtoptError):
        return None


def _rewrite(shown: Shown, uri: str, text: str) -> types.WorkspaceEdit | None:
    edits = _edits(shown, text)
    return types.WorkspaceEdit({uri: edits}) if edits else None


def _edits(shown: Shown, text: str) -> list[types.TextEdit]:
    edit = doing.change(shown.source, text)
    return [types.TextEdit(shown.range(edit.span), edit.text)] if edit is not None else []
