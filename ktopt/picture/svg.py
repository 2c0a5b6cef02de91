"""A picture as SVG: devices as lanes, nested boxes coloured by device, arrows for what passes between devices. Text and colours
suit light and dark grounds; every box and arrow says in a tooltip what it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from ktopt.picture.colours import DARK_GROUND, DARK_INK, DARK_SOFT, LIGHT_GROUND, LIGHT_INK, LIGHT_SOFT, colours
from ktopt.picture.layout import MARGIN, Arrow, Box, Layout, has_second_line, lay_out
from ktopt.picture.picture import DeviceUse, Picture
from ktopt.picture.words import edge_text, group_text, moved, name_of, operator_of, times
from ktopt.render.style import plural, printable, size

NAME_PX, WORD_PX, TITLE_PX = 6.7, 5.9, 8.0
"""Width of a character of names (fixed width, 11 px), of other words (10 px) and of the title."""
LANES_AT, TOP = 58, 122
FOOTER = 40
BAR_HEIGHT = 6
PALETTE = """\
.ground{{fill:{ground}}}.ink,.mono{{fill:{ink}}}.soft{{fill:{soft}}}
.lane{{fill:{ink};opacity:.035}}.frame{{fill:none;stroke:{soft};stroke-dasharray:3 3}}.rail{{fill:{ink};opacity:.13}}
.arrow{{fill:none;stroke:{arrow}}}.tip,.moved{{fill:{arrow}}}.halo{{stroke:{ground}}}
"""
FONTS = """\
text{font:10px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
.mono{font:11px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}.strong{font-weight:600}
.title{font-size:15px;font-weight:600}
.lane-name{font-size:13px;font-weight:600}.arrow{stroke-width:1.6}.moved{font-weight:600}
.halo{stroke-width:4;stroke-linejoin:round;paint-order:stroke}
"""


def to_svg(picture: Picture) -> str:
    """An SVG document by itself."""
    layout = lay_out(picture, TOP)
    return _document(picture, layout, f"<style>{FONTS}{_palette(picture)}</style>")


def drawing(picture: Picture) -> tuple[str, str]:
    """The SVG element for an HTML page, and the style sheet that it needs there. Boxes say in `data-path` which module they are."""
    return _document(picture, lay_out(picture, TOP), ""), FONTS


def _palette(picture: Picture) -> str:
    """Colours in both schemes."""
    light = PALETTE.format(ground=LIGHT_GROUND, ink=LIGHT_INK, soft=LIGHT_SOFT, arrow="#b3261e")
    dark = PALETTE.format(ground=DARK_GROUND, ink=DARK_INK, soft=DARK_SOFT, arrow="#ff8f80")
    for number, colour in enumerate(colours([d.name for d in picture.devices]).values()):
        light += f".d{number}{{fill:{colour.fill};stroke:{colour.line}}}.b{number}{{fill:{colour.line}}}"
        dark += f".d{number}{{fill:{colour.dark_fill};stroke:{colour.dark_line}}}.b{number}{{fill:{colour.dark_line}}}"
    return f"{light}\n@media(prefers-color-scheme:dark){{{dark}}}"


def _document(picture: Picture, layout: Layout, style: str) -> str:
    width = max(layout.width, MARGIN * 2 + TITLE_PX * min(len(picture.title), 140))
    height = layout.height + FOOTER
    held = ", ".join(f"{device.name} {size(device.held_bytes)}" for device in picture.devices)
    about = f"Modules of {picture.plan.model.source} by device: {held}. {_transfers_said(picture)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        'role="img" aria-labelledby="drawing-title drawing-about">',
        f'<title id="drawing-title">{_safe(picture.title)}</title>',
        f'<desc id="drawing-about">{_safe(about)}</desc>',
        style,
        '<rect class="ground" width="100%" height="100%"/>',
        _text(MARGIN, 34, _cut(picture.title, width - 2 * MARGIN, TITLE_PX), "ink title"),
        *(_lane(device, number, layout) for number, device in enumerate(picture.lanes)),
        *_boxes(picture, layout.root),
        *(_arrow(arrow) for arrow in layout.arrows),
        *(_label(arrow, layout) for arrow in layout.arrows),
        _text(MARGIN, layout.height + 14, _transfers_said(picture), "soft"),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _transfers_said(picture: Picture) -> str:
    if not picture.edges:
        return "Nothing passes between devices."
    crossings = sum(edge.moving for edge in picture.edges)
    total = picture.transfer_bytes
    much = f"{size(total)} in all" if total is not None else "how much in all isn't known"
    times = plural(crossings, "transfer")
    return f"Arrows: what each token moves between devices, {much}, in {times}. ×N: so many modules alike, their bytes together."


def _lane(device: DeviceUse, number: int, layout: Layout) -> str:
    """A device's lane: its name, what it holds of what it has, and a bar."""
    x, wide = layout.lanes[number], layout.lane_width
    held, have = device.held_bytes, device.memory_bytes
    said = f"{size(held)} of {size(have)}, {held / have:.0%}" if have else size(held)
    room = wide - len(device.name) * 8 - len(said) * WORD_PX - 24
    parts = [
        f"<g><title>{_safe(f'{device.name}: {said}')}</title>",
        f'<rect class="lane" x="{x:.0f}" y="{LANES_AT - 14}" width="{wide:.0f}" height="{layout.height - LANES_AT:.0f}" rx="4"/>',
        _text(x + 8, LANES_AT + 6, device.name, "ink lane-name"),
        _text(x + 14 + len(device.name) * 8, LANES_AT + 6, _first_that_fits([device.model], room), "soft"),
        _text(x + wide - 8, LANES_AT + 6, said, "moved" if have and held > have else "ink", end=True),
        f'<rect class="rail" x="{x + 8:.0f}" y="{LANES_AT + 14}" width="{wide - 16:.0f}" height="{BAR_HEIGHT}" rx="3"/>',
        f'<rect class="b{number}" x="{x + 8:.0f}" y="{LANES_AT + 14}" width="{(wide - 16) * _share(held, have):.1f}" '
        f'height="{BAR_HEIGHT}" rx="3"/>',
        _text(x + 8, LANES_AT + 34, _cut(_kinds(device), wide - 16, WORD_PX), "soft"),
        "</g>",
    ]
    return "".join(parts)


def _share(held: int, have: int) -> float:
    return min(1.0, held / have) if have else 1.0 if held else 0.0


def _kinds(device: DeviceUse) -> str:
    return ", ".join(f"{kind} {size(count)}" for kind, count in device.nbytes.items())


def _boxes(picture: Picture, box: Box) -> Iterator[str]:
    """A box with all that is in it; what is inside stands above it, so that its own tooltip is the nearest."""
    group = box.group
    tip = "\n".join(group_text(picture.plan, group))
    yield f'<g class="module" data-path="{_safe(group.paths[0])}"><title>{_safe(tip)}</title>'
    if box.kind == "frame":
        yield f'<rect class="frame" {_place(box)} rx="6"/>'
    elif box.kind == "box":
        yield f'<rect class="d{box.lane}" {_place(box)} rx="4"/>'
    else:
        yield f'<rect class="whole" {_place(box)} fill="none" pointer-events="all"/>'
    yield _caption(box)
    for child in box.children:
        yield from _boxes(picture, child)
    yield "</g>"


def _place(box: Box) -> str:
    return f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'


def _caption(box: Box) -> str:
    """The words in a box: its name and how many it stands for, what becomes of it, and its bytes, as far as there is room."""
    group, left, right = box.group, box.x + 8, box.x + box.width - 8
    base = box.y + (12 if box.kind == "row" else 15)
    nbytes = size(group.nbytes) if group.nbytes else ""
    many = times(box.many)
    name = _cut(name_of(group), right - left - len(nbytes) * WORD_PX - (len(many) + 2) * NAME_PX, NAME_PX)
    weight = "mono strong" if box.kind != "row" else "mono"
    after_name = left + (len(name) + 1) * NAME_PX
    parts = [
        _text(left, base, name, weight),
        _text(after_name, base, many, "soft strong"),
        _text(right, base, nbytes, "ink", end=True),
    ]
    what = operator_of(group.step)
    if has_second_line(box):
        parts.append(_text(left, base + 14, _cut(_second_line(box, what), right - left, WORD_PX), "soft"))
    else:
        free_from = after_name + (len(many) + 2) * WORD_PX
        free_to = right - 62
        fits = (said for said in (what, group.step.kwargs.get("generate_op"), what.partition(" ")[0]) if isinstance(said, str))
        parts.append(_text(free_to, base, _first_that_fits(fits, free_to - free_from), "soft", end=True))
    return "".join(parts)


def _second_line(box: Box, what: str) -> str:
    return f"{what}; inside as in {printable(box.as_above)}" if box.as_above else what


def _arrow(arrow: Arrow) -> str:
    """The line of an arrow with its head, with a dot where it begins at nothing drawn."""
    path = f"M{arrow.x_from:.1f} {arrow.y_from:.1f}V{arrow.y:.1f}H{arrow.x_to:.1f}V{arrow.y_to - 5:.1f}"
    head = f"M{arrow.x_to:.1f} {arrow.y_to:.1f}l-4 -8h8z"
    dot = f'<circle class="tip" cx="{arrow.x_from:.1f}" cy="{arrow.y_from:.1f}" r="3"/>' if arrow.loose else ""
    return (
        f'<g><title>{_safe(edge_text(arrow.edge))}</title><path class="arrow" d="{path}"/>{dot}<path class="tip" d="{head}"/></g>'
    )


def _label(arrow: Arrow, layout: Layout) -> str:
    """What an arrow moves, over its line, in the gap beside the lane that it leaves."""
    towards = 1 if arrow.x_to > arrow.x_from else -1
    x = arrow.x_from + towards * (layout.lane_width / 2 - 6)
    said = moved(arrow.edge)
    return _text(x, arrow.y - 5, said, "moved halo", end=towards > 0) if said else ""


def _text(x: float, y: float, text: str, classes: str, *, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}"{anchor}>{_safe(text)}</text>' if text else ""


def _cut(text: str, pixels: float, each: float) -> str:
    """A text that takes no more than so many pixels, at about `each` a character."""
    text, room = printable(text).replace("\n", " "), int(pixels / each)
    return text if len(text) <= room else f"{text[: room - 1]}…" if room > 3 else ""


def _first_that_fits(texts: Iterable[str], pixels: float) -> str:
    return next((text for text in texts if len(text) * WORD_PX <= pixels), "")


def _safe(text: str) -> str:
    return escape(printable(text), quote=True)
