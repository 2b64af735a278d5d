"""Draw the pictures of docs/ as SVG, from the boxes, grids and arrows below.

    python -m scripts.draw_pictures

A picture has a title and a description for those who cannot see it, its text can be selected, and
its colours follow the reader's scheme. `on_page_content` is mkdocs' hook: it puts the SVG into the
page in place of the image, so that the text and the site's choice of light or dark reach it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"
LINE: Final = 18  # height of a line of text, in the picture's units
CELL: Final = 16  # an element of a tensor
_LIGHT: Final = (
    "--line:#5c6670;--text:#1b1f24;--box:#eef2fb;--group:#fafbfc;--page:#ffffff"
    ";--q:#dbe6fb;--k:#d9f0e1;--v:#f6e7cf;--mark:#c62f3f"
)
_DARK: Final = (
    "--line:#9aa5b1;--text:#e8ebef;--box:#2b3347;--group:#22262e;--page:#1a1d23"
    ";--q:#2f4370;--k:#2a5440;--v:#5c4726;--mark:#ff7b86"
)
_STYLE: Final = (
    f".picture{{{_LIGHT};font:14px sans-serif;max-width:100%;min-width:560px;height:auto}}"
    f"@media(prefers-color-scheme:dark){{.picture{{{_DARK}}}}}"
    f"[data-md-color-scheme=default] .picture{{{_LIGHT}}}"
    f"[data-md-color-scheme=slate] .picture{{{_DARK}}}"
    ".picture text{fill:var(--text)}.picture .b{font-weight:bold}"
    ".picture rect{fill:var(--box);stroke:var(--line)}.picture .g{fill:var(--group)}"
    ".picture .p{fill:var(--page);stroke:none}"
    ".picture .q{fill:var(--q)}.picture .k{fill:var(--k)}.picture .v{fill:var(--v)}"
    ".picture .m{fill:var(--mark)}"
    ".picture path{fill:none;stroke:var(--line);stroke-width:1.5}"
    ".picture marker path{fill:var(--line);stroke:none}.picture .d{stroke-dasharray:5 4}"
)


@dataclass(frozen=True)
class Box:
    """A rectangle with lines of text; one that begins with ``*`` is bold. `x` is its middle."""

    name: str
    x: int
    y: int
    width: int
    lines: tuple[str, ...]

    @property
    def height(self) -> int:
        return LINE * len(self.lines) + 16


@dataclass(frozen=True)
class Grid:
    """Elements of a tensor as cells; `x` is its middle.

    Attributes:
        kind: the class of its cells: ``q``, ``k`` or ``v``.
        changed: row and column of those that have changed.
        label: text at its left.
    """

    name: str
    x: int
    y: int
    rows: int
    columns: int
    kind: str
    changed: tuple[tuple[int, int], ...] = ()
    label: str = ""

    @property
    def width(self) -> int:
        return CELL * self.columns

    @property
    def height(self) -> int:
        return CELL * self.rows


@dataclass(frozen=True)
class Group:
    """A labelled rectangle behind boxes."""

    x: int
    y: int
    width: int
    height: int
    label: str


@dataclass(frozen=True)
class Arrow:
    """A straight arrow between boxes: down, up or to a side, wherever they face each other."""

    start: str
    end: str
    label: str = ""
    dashed: bool = False
    both: bool = False


@dataclass(frozen=True)
class Picture:
    name: str
    width: int
    height: int
    title: str
    description: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    groups: tuple[Group, ...] = ()
    grids: tuple[Grid, ...] = ()


TENSOR: Final = Picture(
    "tensor",
    760,
    404,
    "One tensor",
    "A checkpoint has q_proj of 8 rows, k_proj and v_proj of 4 rows each. With two ranks the "
    "engine holds them as one fused weight, qkv_proj: rank 0 has q rows 0 to 3, k rows 0 and "
    "1, v rows 0 and 1, and rank 1 has the others. Three elements change. q_proj[1, 2] goes "
    "from 0.5, 3f00, to 3f01, and is in row 1 of rank 0. v_proj[0, 3] goes from 0.25, 3e80, "
    "to 3e7f, and is in row 6 of rank 0. k_proj[3, 0] goes from -1, bf80, to bf81, and is in "
    "row 5 of rank 1. Three positions and three values are sent; all other elements keep "
    "their bytes.",
    (
        Box(
            "change0", 625, 44, 230, ("*q_proj[1, 2]: 3f00 to 3f01", "0.5 to 0.504, rank 0, row 1")
        ),
        Box(
            "change1",
            625,
            108,
            230,
            ("*v_proj[0, 3]: 3e80 to 3e7f", "0.25 to 0.249, rank 0, row 6"),
        ),
        Box(
            "change2", 625, 244, 230, ("*k_proj[3, 0]: bf80 to bf81", "-1 to -1.008, rank 1, row 5")
        ),
        Box("sent", 625, 328, 230, ("*sent: 3 positions, 3 values", "all other bytes stay")),
    ),
    (
        Arrow("q0", "rank0q"),
        Arrow("q1", "rank1q"),
        Arrow("k0", "rank0k"),
        Arrow("k1", "rank1k"),
        Arrow("v0", "rank0v"),
        Arrow("v1", "rank1v"),
        Arrow("change0", "rank0q", dashed=True),
        Arrow("change1", "rank0v", dashed=True),
        Arrow("change2", "rank1k", dashed=True),
    ),
    (
        Group(8, 8, 212, 388, "Checkpoint"),
        Group(290, 8, 160, 180, "Rank 0: qkv_proj"),
        Group(290, 216, 160, 180, "Rank 1: qkv_proj"),
        Group(500, 8, 252, 388, "Three elements change"),
    ),
    (
        Grid("q0", 170, 44, 4, 4, "q", ((1, 2),), "q_proj, rows 0-3"),
        Grid("q1", 170, 116, 4, 4, "q", (), "rows 4-7"),
        Grid("k0", 170, 200, 2, 4, "k", (), "k_proj, rows 0-1"),
        Grid("k1", 170, 240, 2, 4, "k", ((1, 0),), "rows 2-3"),
        Grid("v0", 170, 296, 2, 4, "v", ((0, 3),), "v_proj, rows 0-1"),
        Grid("v1", 170, 336, 2, 4, "v", (), "rows 2-3"),
        Grid("rank0q", 370, 44, 4, 4, "q", ((1, 2),)),
        Grid("rank0k", 370, 108, 2, 4, "k"),
        Grid("rank0v", 370, 140, 2, 4, "v", ((0, 3),)),
        Grid("rank1q", 370, 252, 4, 4, "q"),
        Grid("rank1k", 370, 316, 2, 4, "k", ((1, 0),)),
        Grid("rank1v", 370, 348, 2, 4, "v"),
    ),
)

SYNC: Final = Picture(
    "sync",
    700,
    232,
    "One sync",
    "The trainer's weights are compared with its snapshot and encoded into parts. They go by "
    "HTTP to the engine's HTTP process, which checks and spools them. Rank 0 and rank 1 each "
    "stage them, vote, and commit.",
    (
        Box("weights", 80, 58, 120, ("trainer's", "weights")),
        Box("diff", 80, 154, 120, ("diff against", "the snapshot")),
        Box("encode", 230, 106, 110, ("encode", "parts")),
        Box("http", 390, 106, 120, ("HTTP process:", "checks, spool")),
        Box("stage0", 520, 58, 100, ("rank 0:", "stage")),
        Box("stage1", 520, 154, 100, ("rank 1:", "stage")),
        Box("commit0", 640, 67, 80, ("commit",)),
        Box("commit1", 640, 163, 80, ("commit",)),
    ),
    (
        Arrow("weights", "diff"),
        Arrow("diff", "encode"),
        Arrow("encode", "http", "HTTP"),
        Arrow("http", "stage0"),
        Arrow("http", "stage1"),
        Arrow("stage0", "commit0"),
        Arrow("stage1", "commit1"),
        Arrow("commit0", "commit1", "vote", both=True),
    ),
    (Group(8, 8, 290, 216, "Trainer"), Group(318, 8, 374, 216, "Engine")),
)

FLOW: Final = Picture(
    "flow",
    700,
    608,
    "From trainer to weights",
    "In the trainer, delta_sender compares the weights after a step with the snapshot, which "
    "is what the engine holds, and encodes parts. It posts them to /update_weights_delta, and"
    " writes them into a delta log if there is one, from which an engine replays them at its "
    "start. The engine's HTTP process controls access, limits and intake. Each rank stages a "
    "part, and all ranks vote and commit. After the commit the snapshot moves on.",
    (
        Box("weights", 190, 50, 220, ("weights after a step",)),
        Box(
            "snapshot",
            530,
            111,
            270,
            ("snapshot:", "what the engine holds;", "follows after the commit"),
        ),
        Box(
            "diff",
            190,
            120,
            270,
            ("diff against the snapshot:", "positions, old, new bits, digest"),
        ),
        Box("encode", 190, 208, 220, ("encode parts",)),
        Box("log", 545, 276, 120, ("delta log",)),
        Box("http", 350, 366, 560, ("HTTP process: delta_server", "access, limits, intake")),
        Box(
            "stage0",
            180,
            448,
            230,
            ("*rank 0: engine_ext", "stage: expand, locate,", "read old values"),
        ),
        Box(
            "stage1",
            510,
            448,
            230,
            ("*rank 1: engine_ext", "stage: expand, locate,", "read old values"),
        ),
        Box("commit0", 180, 548, 230, ("commit: write, recompute",)),
        Box("commit1", 510, 548, 230, ("commit: write, recompute",)),
    ),
    (
        Arrow("weights", "diff"),
        Arrow("snapshot", "diff"),
        Arrow("diff", "encode"),
        Arrow("encode", "http", "POST /update_weights_delta"),
        Arrow("encode", "log", "--delta-log", dashed=True),
        Arrow("log", "http", "replayed at start", dashed=True),
        Arrow("http", "stage0"),
        Arrow("http", "stage1"),
        Arrow("stage0", "commit0"),
        Arrow("stage1", "commit1"),
        Arrow("commit0", "commit1", "vote", both=True),
    ),
    (
        Group(8, 8, 684, 248, "Trainer: delta_sender"),
        Group(8, 330, 684, 270, "Engine"),
    ),
)

START: Final = Picture(
    "start",
    700,
    876,
    "Start-up: find and prove the placement",
    "The flag --enable-delta-updates makes the adapter wrap the engine's load. While the "
    "engine loads its model, before post-load processing, the loader is run dry, what "
    "processing moves is learnt, and the modules that it computes are kept. The adapter "
    "describes what was loaded and makes the receiver. startup.order then traces the model, "
    "follows what processing has moved, finds what the loader computes, finds derived "
    "tensors, certifies the model against the checkpoint, and agrees on the plan. The applier"
    " is made, and the engine serves. Without a checkpoint the first full sync runs these "
    "steps.",
    (
        Box(
            "flag",
            350,
            12,
            430,
            ("*--enable-delta-updates", "adapters.vllm.plugin, adapters.sglang.plugin"),
        ),
        Box("attach", 350, 86, 430, ("wrap the engine's load", "adapters.*: attach_receiver")),
        Box("dry", 180, 192, 310, ("dry run of the loader", "startup.trace: LoadingTrace.trace")),
        Box(
            "learn",
            520,
            192,
            310,
            ("probe what processing moves", "startup.permuted: RepackLearner.learn"),
        ),
        Box(
            "keep",
            350,
            268,
            430,
            ("keep the modules that it computes", "startup.recomputed: UnprocessedModules.keep"),
        ),
        Box(
            "make",
            350,
            354,
            430,
            (
                "describe what was loaded, make the receiver",
                "adapters.*: build_receiver; sync.assemble: make_receiver",
            ),
        ),
        Box(
            "trace",
            180,
            460,
            310,
            ("*1 trace_model", "run the loader dry on the model", "as the loader knows it"),
        ),
        Box(
            "moved",
            520,
            460,
            310,
            ("follow what processing has moved", "startup.permuted: compose"),
        ),
        Box(
            "again",
            520,
            542,
            310,
            ("find what the loader computes", "startup.recomputed: rebuild_by_loading"),
        ),
        Box(
            "derived",
            520,
            624,
            310,
            ("find derived tensors", "startup.derived: find_derived, prove"),
        ),
        Box(
            "certify",
            180,
            624,
            310,
            ("*2 certify_model", "compare with the checkpoint,", "prove the rebuilds"),
        ),
        Box("plan", 180, 726, 310, ("*3 agree_on_plan", "who holds and counts what")),
        Box("applier", 180, 816, 310, ("sync.assemble: make_delta_applier", "*the engine serves")),
        Box(
            "first",
            520,
            816,
            310,
            (
                "no checkpoint: 1 to 3 run in the first sync",
                "sync.initial_sync: InitialSyncApplier",
            ),
        ),
    ),
    (
        Arrow("flag", "attach"),
        Arrow("attach", "dry"),
        Arrow("dry", "learn"),
        Arrow("learn", "keep"),
        Arrow("keep", "make"),
        Arrow("make", "trace"),
        Arrow("trace", "moved"),
        Arrow("moved", "again"),
        Arrow("again", "derived"),
        Arrow("derived", "certify"),
        Arrow("certify", "plan"),
        Arrow("plan", "applier"),
    ),
    (
        Group(8, 156, 684, 178, "While the model loads"),
        Group(8, 424, 684, 364, "startup.order: plan_model"),
    ),
)

PICTURES: Final = (TENSOR, SYNC, FLOW, START)


def svg(picture: Picture) -> str:
    """Return a picture's file: one element without empty lines, as a page can hold it."""
    boxes: dict[str, Box | Grid] = {box.name: box for box in picture.boxes}
    boxes |= {grid.name: grid for grid in picture.grids}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img"'
        f' width="{picture.width}" height="{picture.height}"'
        f' viewBox="0 0 {picture.width} {picture.height}"'
        f' aria-labelledby="{picture.name}-title {picture.name}-text">',
        f'<title id="{picture.name}-title">{escape(picture.title)}</title>',
        f'<desc id="{picture.name}-text">{escape(picture.description)}</desc>',
        f"<style>{_STYLE}</style>",
        f'<defs><marker id="{picture.name}-tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8"'
        ' markerHeight="8" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker></defs>',
        '<rect class="p" width="100%" height="100%"/>',
    ]
    for group in picture.groups:
        lines += [_rect(group.x, group.y, group.width, group.height, ' class="g"')]
        lines += [_text(group.x + 10, group.y + 20, group.label, "b")]
    for arrow in picture.arrows:
        lines += _arrow(picture.name, arrow, boxes[arrow.start], boxes[arrow.end])
    for grid in picture.grids:
        lines += _grid(grid)
    for box in picture.boxes:
        lines += [_rect(box.x - box.width // 2, box.y, box.width, box.height)]
        for number, line in enumerate(box.lines):
            y = box.y + LINE * (number + 1) + 3
            kind = "b" if line.startswith("*") else ""
            lines += [_text(box.x, y, line.removeprefix("*"), kind, middle=True)]
    return "\n".join([*lines, "</svg>", ""])


def on_page_content(html: str, **_: Any) -> str:
    """Put the SVG of each picture into the page."""

    def inline(image: re.Match[str]) -> str:
        drawing = FOLDER / unescape(image[1])
        return f'<span style="display:block;overflow-x:auto">{drawing.read_text().strip()}</span>'

    return re.sub(r'<img [^>]*src="(?:\.\./)*pictures/([\w-]+\.svg)"[^>]*>', inline, html)


def _rect(x: int, y: int, width: int, height: int, kind: str = "") -> str:
    return f'<rect{kind} x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'


def _text(x: float, y: float, text: str, kind: str = "", *, middle: bool = False) -> str:
    attributes = f' class="{kind}"' if kind else ""
    attributes += ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(text)}</text>'


def _grid(grid: Grid) -> list[str]:
    left = grid.x - grid.width // 2
    lines = [
        f'<rect class="{"m" if (row, column) in grid.changed else grid.kind}"'
        f' x="{left + CELL * column}" y="{grid.y + CELL * row}" width="{CELL}" height="{CELL}"/>'
        for row in range(grid.rows)
        for column in range(grid.columns)
    ]
    middle = grid.y + grid.height // 2 + 5
    end = f'<text text-anchor="end" x="{left - 8}" y="{middle}">{escape(grid.label)}</text>'
    return [*lines, end] if grid.label else lines


def _arrow(picture: str, arrow: Arrow, start: Box | Grid, end: Box | Grid) -> list[str]:
    """Return a line from edge to edge, and its label next to its middle."""
    y1: float
    y2: float
    left = max(box.x - box.width // 2 for box in (start, end))
    right = min(box.x + box.width // 2 for box in (start, end))
    top = max(start.y, end.y)
    bottom = min(box.y + box.height for box in (start, end))
    if right - left > LINE:
        x1 = x2 = (left + right) / 2
        y1, y2 = (
            (start.y + start.height, end.y) if start.y < end.y else (start.y, end.y + end.height)
        )
    else:
        side = 1 if start.x < end.x else -1
        x1, x2 = start.x + side * start.width / 2, end.x - side * end.width / 2
        y1, y2 = (box.y + box.height / 2 for box in (start, end))
        if bottom - top > LINE:
            y1 = y2 = (top + bottom) / 2
    attributes = ' class="d"' if arrow.dashed else ""
    attributes += f' marker-start="url(#{picture}-tip)"' if arrow.both else ""
    path = f'<path{attributes} d="M{x1:g} {y1:g}L{x2:g} {y2:g}" marker-end="url(#{picture}-tip)"/>'
    if not arrow.label:
        return [path]
    if y1 == y2:
        return [path, _text((x1 + x2) / 2, y1 - 6, arrow.label, middle=True)]
    return [path, _text((x1 + x2) / 2 + 8, (y1 + y2) / 2 + (5 if x1 == x2 else -4), arrow.label)]


def main() -> int:
    """Write the pictures; return the exit status."""
    FOLDER.mkdir(exist_ok=True)
    for picture in PICTURES:
        (FOLDER / f"{picture.name}.svg").write_text(svg(picture), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
