"""The plot of `scripts.bench.codec`: bytes per changed element by density, with the floors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from scripts.bench.codec import Size

_COLOURS = {
    "indices": "#8c8c8c",
    "deltas": "#c58a1b",
    "deltas_zstd": "#2a9d6f",
    "gap8_exp": "#1f6fb4",
    "gap8_ulp": "#b5338a",
}
_FLOORS = {"gap8_exp": "--", "gap8_ulp": ":"}


def positions_floor(density: Any) -> Any:
    """Return the entropy of a changed element's position in bytes, if all change independently."""
    rest = 1 - density
    return -(np.log2(density) + rest / density * np.log2(rest)) / 8


def plot(synthetic: Sequence[Size], real: Sequence[Size], file: Path) -> None:
    """Draw the plot.

    Args:
        synthetic: of all encodings; drawn as lines. The floor of their positions is
            `positions_floor`.
        real: drawn as points.
        file: overwritten; its suffix decides the format.
    """
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for encoding, colour in _COLOURS.items():
        sizes = [size for size in synthetic if size.encoding == encoding]
        points = [size for size in real if size.encoding == encoding]
        densities = np.array([size.density for size in sizes])
        axes.plot(densities, [s.nbytes for s in sizes], "o-", c=colour, ms=4, label=encoding)
        axes.plot(
            [s.density for s in points], [s.nbytes for s in points], "D", c=colour, mfc="none"
        )
        if encoding in _FLOORS:
            values = np.mean([size.floor for size in sizes] - positions_floor(densities))
            grid = np.geomspace(densities.min(), densities.max(), 100)
            floor = values + positions_floor(grid)
            axes.plot(grid, floor, _FLOORS[encoding], c="black", lw=1, zorder=3)
    axes.plot([], [], "--", c="black", lw=1, label="entropy, new values")
    axes.plot([], [], ":", c="black", lw=1, label="entropy, differences")
    if real:
        axes.plot([], [], "D", c="black", mfc="none", label="real training steps, small model")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=1))
    axes.set(xlabel="changed elements", ylabel="bytes per changed element", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", ncols=3, loc="outside upper center")
    figure.savefig(file, dpi=120)
