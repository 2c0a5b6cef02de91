"""What `ktopt graph` says of a plan, that each format can be read back, and that nothing in a drawing lies over another thing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import networkx
import pytest
from picture_fixtures import HOSTILE, HOT, QWEN, hostile_picture, picture

from ktopt.picture.colours import DARK_INK, DARK_SOFT, LIGHT_INK, LIGHT_SOFT, colours
from ktopt.picture.data import to_graphml, to_json
from ktopt.picture.dot import to_dot
from ktopt.picture.html import to_html
from ktopt.picture.layout import Box, lay_out
from ktopt.picture.picture import Picture, picture_of, with_context
from ktopt.picture.svg import to_svg
from ktopt.plan_diff import device_bytes

RULES = Path(__file__).resolve().parent.parent / "rules"
GPUS = """\
version: 1
place:
  "cuda:0": "layer in 0..19 | @model.embed_tokens | @model.rotary_emb"
  "cuda:1": "layer in 20..39"
  "cuda:2": "@**"
rules:
  - {id: experts, match: "@model.layers.{5..9,30..34}.mlp.experts", replace: KTransformersExperts, kwargs: {generate_device: cpu}}
"""
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def deepseek() -> Picture:
    return picture(RULES / "deepseek-v3" / "24gb.yaml", "deepseek-v3", hardware="1x24GB+512GB")


@pytest.fixture(scope="module")
def qwen() -> Picture:
    return picture(QWEN, "qwen3-30b-a3b")


@pytest.fixture(scope="module")
def gpus() -> Picture:
    return picture(GPUS, "qwen3-30b-a3b")


@pytest.fixture(scope="module")
def pictures(deepseek: Picture, qwen: Picture, gpus: Picture) -> list[Picture]:
    return [deepseek, qwen, gpus, picture(RULES / "smollm2" / "cpu.yaml", "smollm2-135m"), picture(HOT, "qwen3-30b-a3b")]


@pytest.fixture(scope="module")
def hostile() -> Picture:
    return hostile_picture()


class TestThePicture:
    def test_experts_in_main_memory_are_two_edges_with_the_bytes_of_a_token(self, qwen: Picture) -> None:
        there, back = qwen.edges
        assert (there.source.pattern, there.target.pattern) == ("model.layers.{0..47}.mlp", "model.layers.{0..47}.mlp.experts")
        assert (there.from_device, there.to_device, there.side, there.count) == ("cuda:0", "cpu", "input", 48)
        hidden, chosen = 2048 * 2, 8 * (4 + 8)
        assert there.nbytes == 48 * (hidden + chosen)
        assert there.what == "hidden states, the router's choice"
        assert (back.from_device, back.to_device, back.side, back.nbytes) == ("cpu", "cuda:0", "output", 48 * hidden)
        assert qwen.transfer_bytes == 48 * (2 * hidden + chosen)

    def test_a_result_that_experts_bring_back_themselves_is_an_edge_too(self, qwen: Picture) -> None:
        each = picture(QWEN.replace("KExpertsCPU}", 'KExpertsCPU, out_device: "cuda:0"}'), "qwen3-30b-a3b")
        assert not any(t.side == "output" for t in each.plan.transfers)
        assert [edge.by_operator for edge in each.edges] == [False, True]
        assert each.edges[1].nbytes == qwen.edges[1].nbytes

    def test_experts_that_are_split_are_on_both_devices(self) -> None:
        each = picture(HOT, "qwen3-30b-a3b")
        split, whole = (g for g in each.root.walk() if g.step.role == "experts")
        assert (split.pattern, whole.pattern) == ("model.layers.{0..2}.mlp.experts", "model.layers.{3..47}.mlp.experts")
        own = [edge for edge in each.edges if edge.by_operator and edge.source is split]
        assert [(e.side, e.from_device, e.to_device, e.count, e.nbytes) for e in own] == [
            ("input", "cpu", "cuda:0", 3, 3 * 2048 * 4), ("output", "cpu", "cuda:0", 3, 3 * 2048 * 4),
        ]  # fmt: skip
        parts = {b.group.name: b for b in lay_out(each, 100).root.walk() if b.group.name in ("others", "hot experts")}
        assert [each.devices[box.lane].name for box in parts.values()] == ["cpu", "cuda:0"]
        hot = sum(s.elsewhere["cuda:0"] for s in each.plan.steps if s.elsewhere)
        assert (parts["others"].group.nbytes, parts["hot experts"].group.nbytes) == (split.own_nbytes - hot, hot)
        node = next(n for n in json.loads(to_json(each))["nodes"] if n["id"] == split.pattern)
        assert node["elsewhere"] == {"cuda:0": hot}

    def test_devices_hold_what_the_plan_says_by_kind(self, pictures: list[Picture]) -> None:
        for each in pictures:
            assert {d.name: d.held_bytes for d in each.devices if d.held_bytes} == device_bytes(each.plan)
        gpu, main = pictures[0].devices
        assert [gpu.name, main.name] == ["cuda:0", "cpu"]
        assert (gpu.memory_bytes, main.memory_bytes) == (24 << 30, 512 << 30)
        experts = sum(s.weight_bytes for s in pictures[0].plan.steps if s.path.endswith(".experts"))
        assert main.nbytes["experts"] == experts
        assert gpu.nbytes.get("experts") is None
        assert gpu.nbytes["attention"] > 0

    def test_a_context_adds_what_it_takes_to_what_devices_hold(self, qwen: Picture) -> None:
        each = with_context(qwen, 4096, {"cuda:0": (400, 20), "cpu": (0, 7), "disk": (5, 0)})
        gpu, main, disk = each.devices
        assert (gpu.nbytes["cache"], gpu.nbytes["transient"], gpu.held_bytes - gpu.weight_bytes) == (400, 20, 420)
        assert main.held_bytes == qwen.devices[1].held_bytes + 7
        assert (disk.name, dict(disk.nbytes)) == ("disk", {"cache": 5})
        assert ">disk<" not in to_svg(each)
        data = json.loads(next(scripts(to_html(each))))
        assert [device["bytes"][-2:] for device in data["devices"]] == [[400, 20], [0, 7], [5, 0]]
        assert data["weights"] == qwen.plan.weight_bytes

    def test_unfolded_with_all_it_has_every_module(self) -> None:
        rules = RULES / "smollm2" / "cpu.yaml"
        each = picture(rules, "smollm2-135m", everything=True, unfold=True)
        assert [group.paths for group in each.root.walk()] == [(step.path,) for step in each.plan.steps]
        assert len(list(picture(rules, "smollm2-135m").root.walk())) < 30


STRING = r'"(?:[^"\\]|\\.)*"'


class TestFormats:
    def test_dot_is_one_statement_a_line_with_every_group_and_transfer(self, pictures: list[Picture], hostile: Picture) -> None:
        for each in [*pictures, hostile]:
            first, *lines, last = to_dot(each).splitlines()
            assert re.fullmatch(rf"digraph {STRING} {{", first)
            assert last == "}"
            for line in lines:
                bare = re.sub(STRING, '""', line)
                assert re.fullmatch(
                    r'  (?:""(?: -> "")?(?: \[[\w=", .#]*\])?|rankdir=LR|label=""; .*|node \[.*\]|edge \[.*\]);', bare
                ), line
            assert sum("constraint=false" in line for line in lines) == len(each.edges)
            assert sum(line.startswith('  "') and " -> " not in re.sub(STRING, "", line) for line in lines) == len(
                list(each.root.walk())
            )

    @pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz isn't installed")
    def test_graphviz_reads_what_dot_says(self, qwen: Picture, hostile: Picture) -> None:
        for each in (qwen, hostile):
            drawn = subprocess.run(["dot", "-Tplain"], input=to_dot(each), capture_output=True, text=True, check=True).stdout
            assert sum(line.startswith("node ") for line in drawn.splitlines()) == len(list(each.root.walk()))

    def test_dot_says_what_moves(self, qwen: Picture) -> None:
        assert 'label="cuda:0 to cpu\\n4.2 kB ×48"' in to_dot(qwen)
        assert (
            '"model.layers.{0..47}.mlp.experts" [label="experts ×48\\nKTransformersExperts (KExpertsCPU)\\ncpu\\n58.0 GB"'
            in to_dot(qwen)
        )

    def test_graphml_is_read_back_by_networkx(self, pictures: list[Picture], hostile: Picture) -> None:
        for each in [*pictures, hostile]:
            read = networkx.parse_graphml(to_graphml(each), force_multigraph=True)
            assert len(read) == len(list(each.root.walk()))
            moves = [data for _, _, data in read.edges(data=True) if data["kind"] == "transfer"]
            assert len(moves) == len(each.edges)
        read = networkx.parse_graphml(to_graphml(pictures[1]), force_multigraph=True)
        experts = read.nodes["model.layers.{0..47}.mlp.experts"]
        assert {key: experts[key] for key in ("operator", "device", "count", "role", "rule", "rule_at")} == {
            "operator": "KTransformersExperts", "device": "cpu", "count": 48, "role": "experts", "rule": "experts",
            "rule_at": "rules.yaml:6",
        }  # fmt: skip
        assert experts["bytes"] == experts["bytes_with_children"] == pictures[1].devices[1].held_bytes
        assert experts["class"].endswith("Qwen3MoeExperts")

    def test_json_has_groups_with_their_modules_and_edges_between_them(self, pictures: list[Picture]) -> None:
        for each in pictures:
            data = json.loads(to_json(each))
            nodes = {node["id"]: node for node in data["nodes"]}
            assert len(nodes) == len(data["nodes"])
            assert all(edge["source"] in nodes and edge["target"] in nodes for edge in data["edges"])
            assert all(len(node["modules"]) == node["count"] for node in nodes.values())
            assert sum(node["bytes"] for node in nodes.values()) == each.plan.weight_bytes
            assert sum(edge["count"] for edge in data["edges"] if edge["kind"] == "transfer") >= len(each.plan.transfers)


def rectangles(box: Box) -> tuple[float, float, float, float]:
    return box.x, box.y, box.x + box.width, box.bottom


class TestTheDrawing:
    def test_boxes_lie_within_their_parents_and_beside_each_other(self, pictures: list[Picture]) -> None:
        for each in pictures:
            layout = lay_out(each, 100)
            for box in layout.root.walk():
                x, y, right, bottom = rectangles(box)
                for child in box.children:
                    a, b, c, d = rectangles(child)
                    assert x <= a < c <= right, child.group.pattern
                    assert y < b < d <= bottom, child.group.pattern
                for one, other in combinations(box.children, 2):
                    assert one.bottom <= other.y or other.bottom <= one.y, (one.group.pattern, other.group.pattern)
            assert layout.root.x > 0
            assert layout.root.x + layout.root.width < layout.width
            assert layout.root.bottom < layout.height

    def test_arrows_cross_no_box_and_go_down(self, pictures: list[Picture]) -> None:
        for each in pictures:
            layout = lay_out(each, 100)
            boxes = [rectangles(box) for box in layout.root.walk() if box.kind == "box"]
            for arrow in layout.arrows:
                assert arrow.y_from <= arrow.y < arrow.y_to
                for x, y, right, bottom in boxes:
                    across = sorted((arrow.x_from, arrow.x_to))
                    assert not (y < arrow.y < bottom and across[0] < right and x < across[1])
                    assert not (x < arrow.x_to < right and y < arrow.y_to - 1 and arrow.y < bottom)
                    assert not (x < arrow.x_from < right and y < arrow.y and arrow.y_from < bottom)

    def test_every_box_is_in_the_lane_of_its_device(self, gpus: Picture) -> None:
        layout, names = lay_out(gpus, 100), [device.name for device in gpus.devices]
        assert names == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
        boxes = [box for box in layout.root.walk() if box.kind == "box" and box.group.own_nbytes]
        assert boxes
        for box in boxes:
            assert names[box.lane] == box.group.step.generate_device
            assert layout.lanes[box.lane] <= box.x
            assert box.x + box.width <= layout.lanes[box.lane] + layout.lane_width

    def test_layers_that_look_alike_are_drawn_once(self, gpus: Picture) -> None:
        layers = [box for box in lay_out(gpus, 100).root.walk() if box.group.step.role == "layer"]
        assert [(box.group.name, box.as_above) for box in layers] == [
            ("{0..4,10..19}", ""), ("{5..9}", ""), ("{20..29,35..39}", "{0..4,10..19}"), ("{30..34}", "{5..9}"),
            ("{40..47}", "{0..4,10..19}"),
        ]  # fmt: skip

    def test_svg_is_xml_with_a_title_and_a_tooltip_on_every_box(self, pictures: list[Picture], hostile: Picture) -> None:
        for each in [*pictures, hostile]:
            root = ElementTree.fromstring(to_svg(each))
            assert root.find(f"{SVG}title") is not None
            assert "Modules of" in (root.findtext(f"{SVG}desc") or "")
            tags = {element.tag.removeprefix(SVG) for element in root.iter()}
            assert tags <= {"svg", "title", "desc", "style", "rect", "text", "g", "path", "circle"}
            assert not [name for element in root.iter() for name in element.attrib if name.startswith("on") or "href" in name]
            modules = list(root.iter(f"{SVG}g"))
            assert all(module.find(f"{SVG}title") is not None for module in modules)
            assert "prefers-color-scheme:dark" in (root.findtext(f"{SVG}style") or "")

    def test_words_fit_where_they_stand(self, pictures: list[Picture]) -> None:
        for each in pictures:
            root = ElementTree.fromstring(to_svg(each))
            width = float(root.attrib["width"])
            for text in root.iter(f"{SVG}text"):
                x, wide = float(text.attrib["x"]), len(text.text or "") * 5
                left = x - wide if text.attrib.get("text-anchor") == "end" else x
                assert left >= 0
                assert left + wide <= width


def test_text_stands_out_on_every_devices_colour() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    made = colours([*(f"cuda:{i}" for i in range(9)), "cpu"])
    assert len({made[f"cuda:{i}"] for i in range(8)} | {made["cpu"]}) == 9
    assert made["cuda:8"] == made["cuda:0"]
    for colour in made.values():
        assert min(contrast(ink, colour.fill) for ink in (LIGHT_INK, LIGHT_SOFT)) >= 4.5
        assert min(contrast(ink, colour.dark_fill) for ink in (DARK_INK, DARK_SOFT)) >= 4.5
        assert contrast(colour.line, colour.fill) >= 1.8
        assert contrast(colour.dark_line, colour.dark_fill) >= 1.8


def scripts(html: str) -> Iterator[str]:
    return iter(re.findall(r"<script[^>]*>(.*?)</script", html, flags=re.DOTALL | re.IGNORECASE))


def test_a_page_holds_its_plan_as_inert_data(hostile: Picture, qwen: Picture) -> None:
    html, plain = to_html(hostile), to_html(qwen)
    assert len(list(scripts(html))) == len(list(scripts(plain)))
    data = json.loads(next(scripts(html)))
    assert data["rule_file"] == HOSTILE
    assert data["facts"]
    assert "<img" not in html
    assert list(scripts(html))[1:] == list(scripts(plain))[1:]
    assert re.findall(r'(?:src|href)="([^"]*)"', html) == re.findall(r'(?:src|href)="([^"]*)"', plain)


def test_a_plan_of_a_module_without_a_config_has_a_picture_without_sizes(qwen: Picture) -> None:
    each = picture_of(qwen.plan, None)
    assert each.transfer_bytes is None
    assert {edge.nbytes for edge in each.edges} == {None}
    assert "? ×48" in to_dot(each)
    assert 'bytes_per_token": null' in to_json(each)
    assert "isn't known" in to_svg(each).replace("&#x27;", "'")
