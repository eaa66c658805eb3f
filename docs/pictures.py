"""Pictures of the documentation, as SVG: `python docs/pictures.py` writes docs/images.

`units.svg` is computed from the layouts of a real model. `step.svg` and `checkpoint.svg` are schemes: of the order of
calls, without a scale of time, and of the files of a save.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
from torch import nn

from shardeddp import ClassPolicy
from shardeddp.plan.layout import FlatLayout
from shardeddp.wrap.units import build_units

HERE = Path(__file__).resolve().parent
RANKS = ("#3f51b5", "#ef6c00", "#00897b", "#c2185b")
GREY, INK = "#9e9e9e", "#455a64"
GATHER, REDUCE, COMPUTE, RECOMPUTE = "#00897b", "#c2185b", "#3f51b5", "#7986cb"


class Block(nn.Module):
    """Block of the model in parameters-day.md."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual block."""
        return x + self.down(torch.relu(self.up(x)))


class Picture:
    """An SVG in the making.

    Args:
        width: In pixels.
        height: In pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, text: str = ""
    ) -> None:
        """A filled rectangle, with a white text in it."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" fill="{fill}"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, fill="white", anchor="middle")

    def text(
        self, x: float, y: float, text: str, fill: str = INK, anchor: str = "start", size: int = 12
    ) -> None:
        """One line of text."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}" font-size="{size}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """A line with a head at its end."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" '
            f'stroke-width="1.5" marker-end="url(#head)"{dashes}/>'
        )

    def write(self, name: str) -> None:
        """Write it into docs/images."""
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif">\n'
            f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="white"/>\n'
        )
        (HERE / "images").mkdir(exist_ok=True)
        text = head + "\n".join(self.parts) + "\n</svg>\n"
        (HERE / "images" / name).write_text(text, encoding="utf-8")


def draw_units() -> None:
    """Flat buffers of the units in parameters-day.md to scale, and the part of each that a rank stores."""
    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(3))
    model.head = nn.Linear(6, 1)
    layouts: list[tuple[str, FlatLayout]] = []
    for unit in build_units(model, ClassPolicy([Block])):
        names = [spec.fqn for spec in unit.parameters]
        shapes = [spec.parameter.shape for spec in unit.parameters]
        layout = FlatLayout.build(names, shapes, itemsize=4, num_slices=len(RANKS))
        layouts.append((unit.name or "(root)", layout))
    picture = Picture(860, 70 + 72 * len(layouts))
    picture.text(
        20,
        24,
        "Units of a small model on four ranks: each flat buffer is cut into equal shards",
        size=14,
    )
    for rank, color in enumerate(RANKS):
        picture.box(20 + 130 * rank, 36, 14, 14, color)
        picture.text(40 + 130 * rank, 48, f"stored by rank {rank}")
    longest = max(layout.padded_numel for _, layout in layouts)
    for index, (name, layout) in enumerate(layouts):
        _draw_unit(picture, 64 + 72 * index, name, layout, 690 / longest)
    picture.write("units.svg")


def _draw_unit(picture: Picture, top: float, name: str, layout: FlatLayout, scale: float) -> None:
    picture.text(20, top + 30, name)
    picture.text(20, top + 46, f"{layout.numel:,} elements", fill=GREY, size=11)
    for rank, color in enumerate(RANKS):
        shard = layout.slice_interval(rank)
        x, width = 150 + shard.start * scale, shard.numel * scale
        picture.box(x, top + 36, width - 1, 16, color, f"rank {rank}" if width > 50 else "")
    for slot in layout.slots:
        x, width = 150 + slot.offset * scale, slot.numel * scale
        picture.box(x, top + 14, max(1.0, width - 1), 18, GREY)
        if width > 60:
            short = slot.fqn.removeprefix(name + ".").removesuffix(".weight")
            picture.text(x + width / 2, top + 27, short, fill="white", anchor="middle", size=11)


def draw_step() -> None:
    """Which collective runs beside which compute, with one unit ahead."""
    picture = Picture(900, 190)
    picture.text(
        20,
        24,
        "One step with full_shard, one unit gathered ahead (a scheme, not to scale in time)",
        size=14,
    )
    picture.text(20, 74, "compute")
    picture.text(20, 114, "communication")
    step, left = 78, 118
    compute = [
        (1, "root", COMPUTE),
        (2, "block 0", COMPUTE),
        (3, "block 1", COMPUTE),
        (4, "block 2", COMPUTE),
    ]
    compute += [
        (5, "block 2", RECOMPUTE),
        (6, "block 1", RECOMPUTE),
        (7, "block 0", RECOMPUTE),
        (8, "root", RECOMPUTE),
    ]
    gathers = [
        (0, "root"),
        (1, "block 0"),
        (2, "block 1"),
        (3, "block 2"),
        (5, "block 1"),
        (6, "block 0"),
    ]
    reduces = [(6, "block 2"), (7, "block 1"), (8, "block 0"), (9, "root")]
    for at, text, color in compute:
        picture.box(left + at * step, 58, step - 3, 26, color, text)
    for at, text in gathers:
        picture.box(left + at * step, 94, step - 3, 20, GATHER, text)
    for at, text in reduces:
        picture.box(left + at * step, 118, step - 3, 20, REDUCE, text)
    legend = (
        (COMPUTE, "forward"),
        (RECOMPUTE, "backward"),
        (GATHER, "all-gather"),
        (REDUCE, "reduce-scatter"),
    )
    for index, (color, text) in enumerate(legend):
        picture.box(left + 150 * index, 156, 14, 14, color)
        picture.text(left + 20 + 150 * index, 168, text)
    picture.write("step.svg")


def draw_checkpoint() -> None:
    """The states of a save, and of what a kill leaves in each."""
    picture = Picture(860, 200)
    picture.text(20, 24, "A save of step 200 over last.ckpt, which is step 100", size=14)
    stages: Sequence[tuple[str, str, str, str]] = (
        ("1 copy", "shards of each rank", "to host memory", "step 100"),
        ("2 write", "each rank its own file", "under another name", "step 100"),
        ("3 flush, check", "files on the disk,", "manifest written last", "step 100"),
        ("4 rename", "all ranks agree,", "then one rename", "100 or 200, whole"),
        ("5 clean", "the old checkpoint", "is deleted", "step 200"),
    )
    for index, (name, first, second, loaded) in enumerate(stages):
        x = 20 + 168 * index
        picture.box(x, 44, 140, 28, COMPUTE, name)
        picture.text(x + 70, 92, first, anchor="middle")
        picture.text(x + 70, 108, second, anchor="middle")
        picture.box(x, 144, 140, 24, GATHER if loaded.endswith("100") else RANKS[1], loaded)
        if index:
            picture.arrow(x - 26, 58, x - 3, 58)
    picture.text(20, 136, 'if all ranks are killed here, ckpt_path="last" loads:')
    picture.text(
        20, 188, "With asynchronous=True training goes on after 1; without it, after 5.", fill=GREY
    )
    picture.write("checkpoint.svg")


if __name__ == "__main__":
    draw_units()
    draw_step()
    draw_checkpoint()
