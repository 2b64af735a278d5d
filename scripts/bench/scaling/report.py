"""The tables of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from scripts.bench.scaling.constants import Constants
from scripts.bench.scaling.memory import memory
from scripts.bench.scaling.model import follow, predict
from scripts.bench.scaling.setups import Setup

DENSITIES: Final = (0.006, 0.02, 0.03)
ENGINES: Final = (1, 4, 16, 64)
FLEETS: Final = (8, 64, 1000)
_FLEET_GBIT: Final = 10.0
LINKS: Final = (1.0, 10.0, 100.0, 400.0)
_GB: Final = 1e9


def seconds(value: float) -> str:
    """Format a time in seconds with two or three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def gigabytes(value: float) -> str:
    """Format bytes in GB with two or three digits."""
    number = value / _GB
    return f"{number:.2f}" if number < 10 else f"{number:,.0f}"


def constants_table(costs: Constants) -> Table:
    """Return a table of all constants."""
    table = Table("constant", "value", box=box.MARKDOWN)
    for each in fields(costs):
        value = getattr(costs, each.name)
        if isinstance(value, dict):
            value = ", ".join(f"{name}: {cost:.3g}" for name, cost in value.items())
        elif not isinstance(value, str):
            value = f"{value:.3g}"
        table.add_row(f"`{each.name}`", value)
    return table


def stages_table(setups: Sequence[Setup], costs: Constants) -> Table:
    """Return a table of the seconds of each stage."""
    names = list(predict(setups[0], costs).stages)
    columns = ("model", "changed", "GB sent", "parts", *names, "sync", "bound")
    table = Table(*columns, box=box.MARKDOWN)
    for setup in setups:
        found = predict(setup, costs)
        cells = [seconds(found.stages[name]) for name in names]
        table.add_row(
            setup.model.name,
            f"{setup.density:.1%}",
            gigabytes(found.wire_bytes),
            str(setup.parts),
            *cells,
            seconds(found.seconds),
            found.bound,
        )
    return table


def links_table(setups: Sequence[Setup], costs: Constants) -> Table:
    """Return a table of whole syncs by model, number of engines and link."""
    table = Table("model", "engines", *(f"{link:g} Gbit/s" for link in LINKS), box=box.MARKDOWN)
    for setup in setups:
        for engines in ENGINES:
            cells = []
            for link in LINKS:
                found = predict(replace(setup, engines=engines, link_gbit=link), costs)
                cells.append(f"{seconds(found.seconds)} {found.bound}")
            table.add_row(setup.model.name, str(engines), *cells)
    return table


def fleet_table(setups: Sequence[Setup], costs: Constants) -> Table:
    """Return a table of what a trainer sends, and when all engines are at the version."""
    columns = ("model", "engines", "pushed: GB sent", "seconds", "log: GB sent", "published", "all")
    table = Table(*columns, box=box.MARKDOWN)
    for setup in setups:
        for engines in FLEETS:
            many = replace(setup, engines=engines)
            pushed, log = predict(many, costs), follow(many, costs)
            table.add_row(
                setup.model.name,
                f"{engines:,}",
                gigabytes(pushed.wire_bytes * engines),
                seconds(pushed.seconds),
                gigabytes(log.egress_bytes),
                seconds(log.published_s),
                seconds(log.published_s + log.followed_s),
            )
    return table


def memory_table(setups: Sequence[Setup], costs: Constants) -> Table:
    """Return a table of the memory of a sync, in GB."""
    columns = ["model", "changed", "trainer hosts", "snapshot", "changes", "parts", "spool"]
    columns += ["rank: staged", "undo", "decoded", "--delta-undo-bytes"]
    table = Table(*columns, box=box.MARKDOWN)
    for setup in setups:
        found = memory(setup, costs)
        values = [found.snapshot, found.changes, found.parts, found.spool, found.staged]
        values += [found.undo, found.decoded]
        limit = f"{math.ceil(found.undo_limit / (1 << 30))}g"
        name, density, hosts = setup.model.name, f"{setup.density:.1%}", str(setup.trainer_hosts)
        table.add_row(name, density, hosts, *map(gigabytes, values), limit)
    return table


def show(
    setups: Sequence[Setup], costs: Constants, console: Console, *, markdown: bool = False
) -> None:
    """Print all tables, given one set-up of each model."""
    for title, table in tables(setups, costs):
        console.print(f"\n{'### ' if markdown else ''}{title}\n")
        console.print(table)


def tables(setups: Sequence[Setup], costs: Constants) -> Iterator[tuple[str, Table]]:
    """Yield titles and tables."""
    every = [replace(setup, density=density) for setup in setups for density in DENSITIES]
    first, hosts = setups[0], (1, 8)
    yield f"Costs of one core of {costs.machine}", constants_table(costs)
    yield (
        f"Seconds of each stage, if it ran alone, and of the sync: {first.engines} engine(s), "
        f"{first.link_gbit:g} Gbit/s",
        stages_table(every, costs),
    )
    title = f"Seconds of the sync, and what bounds it: {first.density:.1%} changed"
    yield title, links_table(setups, costs)
    far = [replace(setup, link_gbit=_FLEET_GBIT) for setup in setups]
    yield (
        f"Fleets: pushed to each engine, or published once in a delta log that they follow; "
        f"{first.density:.1%} changed, {_FLEET_GBIT:g} Gbit/s",
        fleet_table(far, costs),
    )
    spread = [replace(setup, trainer_hosts=count) for setup in setups for count in hosts]
    yield (
        "Memory besides the trainer's and the engine's weights, in GB",
        memory_table(spread, costs),
    )
