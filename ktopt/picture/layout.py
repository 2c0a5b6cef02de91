"""Where everything stands in a drawing: devices are lanes side by side, and a token passes the model from top to bottom.

A group that is on one device with all below it is a box in that device's lane, with what is inside it as boxes and rows; one that
is on several is a frame over their lanes, whose parts follow one another downwards. No two parts of a frame share a height, so a
transfer is a line from the lane that it leaves to the lane that it enters, in the gap above or below the part that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ktopt.folded import Group
from ktopt.picture.edges import Edge
from ktopt.picture.picture import Picture, bytes_elsewhere

MARGIN = 24
LANE_GAP = 64
ROW = 17
HEADER = 22
SECOND_LINE = 15
INSET = 7
GAP = 9
ARROW = 22
FRAME_PAD, FRAME_STEP = 9, 6
WIDTHS = {1: 620, 2: 430, 3: 360, 4: 330}
NARROW = 270
"""Width of a lane, by their number, and beyond."""
ROOMY = 400
"""From this width on a lane has room for a name, an operator and bytes on one line."""
ORDER = (
    "embedding", "rotary", "input_layernorm", "attention", "post_attention_layernorm", "pre_feedforward_layernorm", "router",
    "experts", "mlp", "moe",
)  # fmt: skip
"""The order in which a token passes the parts of a layer, by name or role; others keep their place among those after."""
PASSES_IN_ORDER = ("model", "layer", "moe")


@dataclass
class Box:
    """A group's place. `kind`: "frame" over several lanes, "box" in one, or "row" of a box. `as_above` names the group drawn before
    whose inside looks the same and stands for this one's. `many` is how many it stands for, where its parent stands for fewer."""

    group: Group
    kind: Literal["frame", "box", "row"]
    lane: int
    x: float
    y: float
    width: float
    height: float = 0.0
    children: list[Box] = field(default_factory=list)
    as_above: str = ""
    many: int = 1

    @property
    def bottom(self) -> float:
        return self.y + self.height

    def walk(self) -> Iterator[Box]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass
class Arrow:
    """An edge as a line: down from (x_from, y_from) to `y`, across to x_to, down to y_to. `loose` where it comes from further down
    or from nothing drawn, so that it begins with a dot."""

    edge: Edge
    x_from: float
    y_from: float
    y: float
    x_to: float
    y_to: float
    loose: bool


@dataclass
class Layout:
    """A drawing's boxes, its arrows, and its size in pixels; `lanes` are the left edges of the devices' lanes."""

    root: Box
    arrows: list[Arrow]
    lanes: list[float]
    lane_width: float
    width: float
    height: float


def lay_out(picture: Picture, top: float) -> Layout:
    """The drawing of a picture, from `top` downwards."""
    return _Layout(picture).made(top)


class _Layout:
    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.number = {device.name: i for i, device in enumerate(picture.lanes)} or {picture.plan.default_device: 0}
        self.lane_width = WIDTHS.get(len(self.number), NARROW)
        self.drawn_as: dict[int, Group] = {}
        self.root = self._with_parts(picture.root)
        self.used: dict[int, frozenset[int]] = {}
        self._find_lanes(self.root)
        self.depth = self._frames_deep(self.root)
        self.left = MARGIN + FRAME_PAD + FRAME_STEP * self.depth
        self.before, self.after = self._edges_by_box(picture.edges)
        self.arrows: list[Arrow] = []
        self.bottoms: dict[int, float] = {}
        self.drawn: dict[Any, str] = {}
        self.many = {id(child): child.count for g in self.root.walk() for child in g.children if child.count != g.count}

    def made(self, top: float) -> Layout:
        root = self.place(self.root, top, 0)
        lanes = [self.lane_x(i) for i in range(len(self.number))]
        width = lanes[-1] + self.lane_width + self.left
        return Layout(root, self.arrows, lanes, self.lane_width, width, root.bottom + MARGIN)

    def _with_parts(self, group: Group) -> Group:
        """The group to draw: experts that are split over devices have a part on each."""
        children = tuple(self._with_parts(child) for child in group.children)
        there = bytes_elsewhere(self.picture.plan, group)
        if there:
            step = group.step._replace(elsewhere={})
            kept = group.own_nbytes - sum(there.values())
            hot = {**step.kwargs, "generate_op": step.kwargs.get("hot_op")}
            parts = [replace(group, name="others", step=step, own_nbytes=kept, nbytes=kept, children=())]
            for device, count in there.items():
                placed = step._replace(generate_device=device, kwargs=hot, runs={})
                parts.append(replace(group, name="hot experts", step=placed, own_nbytes=count, nbytes=count, children=()))
            children += tuple(parts)
        made = self.drawn_as[id(group)] = replace(group, children=children)
        return made

    def lane_x(self, lane: int) -> float:
        return self.left + lane * (self.lane_width + LANE_GAP)

    def centre(self, lane: int) -> float:
        return self.lane_x(lane) + self.lane_width / 2

    def _find_lanes(self, group: Group) -> frozenset[int]:
        """The lanes of a group and all below it, kept by group."""
        step = group.step
        found: frozenset[int] = frozenset().union(*(self._find_lanes(child) for child in group.children))
        if (group.own_nbytes or step.operator != "default" or not found) and step.generate_device in self.number:
            found |= {self.number[step.generate_device]}
        self.used[id(group)] = found or frozenset({0})
        return self.used[id(group)]

    def is_frame(self, group: Group) -> bool:
        return len(self.used[id(group)]) > 1

    def _frames_deep(self, group: Group) -> int:
        return 1 + max(map(self._frames_deep, group.children), default=0) if self.is_frame(group) else 0

    def _edges_by_box(self, edges: Iterable[Edge]) -> tuple[dict[int, list[Edge]], dict[int, list[Edge]]]:
        """Edges that move something, by the group above or below whose box they are drawn."""
        above: dict[int, Group] = {id(child): group for group in self.root.walk() for child in group.children}
        before: dict[int, list[Edge]] = {}
        after: dict[int, list[Edge]] = {}
        for edge in edges:
            if edge.nbytes == 0 or edge.from_device not in self.number or edge.to_device not in self.number:
                continue
            end, kept = (edge.target, before) if edge.side == "input" else (edge.source, after)
            end = self.drawn_as[id(end)]
            if edge.source is edge.target or (edge.source.step.elsewhere and edge.side == "output"):
                device = edge.to_device if edge.side == "input" else edge.from_device
                end = next((part for part in end.children if part.step.generate_device == device), end)
            while id(end) in above and not self.is_frame(above[id(end)]):
                end = above[id(end)]
            kept.setdefault(id(end), []).append(edge)
        return before, after

    def place(self, group: Group, y: float, depth: int, as_above: str = "") -> Box:
        if self.is_frame(group):
            return self.frame(group, y, depth, as_above)
        lane = next(iter(self.used[id(group)]))
        box = self.box(group, lane, self.lane_x(lane), self.lane_width, y, as_above)
        self.bottoms[lane] = box.bottom
        return box

    def frame(self, group: Group, y: float, depth: int, as_above: str = "") -> Box:
        lanes = self.used[id(group)]
        pad = FRAME_PAD + FRAME_STEP * (self.depth - depth - 1)
        x, right = self.lane_x(min(lanes)) - pad, self.lane_x(max(lanes)) + self.lane_width + pad
        frame = Box(group, "frame", min(lanes), x, y, right - x, as_above=as_above or self._drawn_before(group))
        frame.many = self.many.get(id(group), 1)
        at = y + HEADER + 2
        for child in in_order(group):
            at = self._arrows_above(child, at)
            box = self.place(child, at, depth + 1, frame.as_above)
            frame.children.append(box)
            at = self._arrows_below(child, box.bottom) + GAP
        frame.height = at - y
        return frame

    def _arrows_above(self, group: Group, at: float) -> float:
        """Draw what enters a part; where its box begins."""
        edges = self.before.get(id(group), ())
        for number, edge in enumerate(edges):
            source, target = self.number[edge.from_device], self.number[edge.to_device]
            y, begins = at + ARROW * (number + 1) - 6, self.bottoms.get(source)
            end = at + ARROW * len(edges) + 6
            self.arrows.append(Arrow(edge, self.centre(source), begins or y, y, self.centre(target), end, begins is None))
        return at + (ARROW * len(edges) + 6 if edges else 0)

    def _arrows_below(self, group: Group, at: float) -> float:
        """Draw what leaves a part; how far down that goes."""
        edges = self.after.get(id(group), ())
        for number, edge in enumerate(edges):
            source, target = self.number[edge.from_device], self.number[edge.to_device]
            y, end = at + ARROW * (number + 1) - 4, at + ARROW * len(edges) + 10
            self.arrows.append(Arrow(edge, self.centre(source), at, y, self.centre(target), end, False))
            self.bottoms[target] = end
        return at + (ARROW * len(edges) + 10 if edges else 0)

    def box(self, group: Group, lane: int, x: float, width: float, y: float, as_above: str = "") -> Box:
        """A box in one lane, its children stacked in it."""
        made = Box(group, "box", lane, x, y, width, as_above=(as_above or self._drawn_before(group)) if group.children else "")
        made.many = self.many.get(id(group), 1)
        at = y + HEADER + (SECOND_LINE if has_second_line(made) else 0)
        for child in in_order(group) if not made.as_above else ():
            if child.children:
                inner = self.box(child, lane, x + INSET, width - 2 * INSET, at + 2)
                at = inner.bottom + 4
            else:
                inner = Box(child, "row", lane, x + INSET, at, width - 2 * INSET, ROW, many=self.many.get(id(child), 1))
                at += ROW
            made.children.append(inner)
        made.height = at - y + (4 if made.children else 0)
        return made

    def _drawn_before(self, group: Group) -> str:
        """The pattern of a layer that was drawn already and looks the same inside, but for devices and bytes."""
        if group.step.role != "layer" or self.picture.unfolded:
            return ""
        before = self.drawn.setdefault(_look(group), group.name)
        return before if before != group.name else ""


def has_second_line(box: Box) -> bool:
    """Whether a box has a line for its operator, or for where its inside is drawn."""
    told = box.group.step.operator != "default" or not box.group.children
    return box.kind == "box" and bool(box.as_above or (told and box.width < ROOMY))


def in_order(group: Group) -> list[Group]:
    """A group's children as a token passes them."""
    if group.step.role not in PASSES_IN_ORDER:
        return list(group.children)

    def place(child: Group) -> int:
        return next((i for i, word in enumerate(ORDER) if word in (child.name, child.step.role)), len(ORDER))

    return sorted(group.children, key=place)


def _look(group: Group) -> Any:
    return group.step.cls, group.step.operator, tuple((child.name, _look(child)) for child in group.children)
