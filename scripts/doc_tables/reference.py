"""Tables of flags, errors, metrics, routes and faults, as Markdown."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterable, Sequence
from typing import Final

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client.metrics import MetricWrapperBase

from delta_server import metrics
from delta_server.routes import attach
from engine_ext import settings
from engine_ext.errors import BY_NAME

_DEFAULT = re.compile(r" \((?:default: )(?P<default>[^()]*(?:\([^()]*\))?[^()]*)\)")
_SURVIVED: Final = {
    "old": "old version",
    "new": "new version",
    "either": "one of the two",
    "uncertain": "uncertain, until the sender's full sync",
}
_FOLLOWED: Final = {
    "old": "old version; the newest {}",
    "new": "new version",
}
_RESTARTED: Final = {
    "old": "after a restart: old version",
    "new": "after a restart: new version",
    "log": "after a restart: the newest in the log",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; pipes in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def summary(documented: object) -> str:
    """Return the first paragraph of a docstring on one line, without its full stop."""
    paragraph = (documented.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(paragraph.replace("``", "`").split()).removesuffix(".")


def flags() -> str:
    """Return the flags that an engine's command line gets, by group."""
    parser = argparse.ArgumentParser(add_help=False)
    settings.add_arguments(parser)
    groups = [group for group in parser._action_groups if group.title in settings.FLAGS]
    return "\n\n".join(f"**{group.title}**\n\n{_options(group._group_actions)}" for group in groups)


def tuning() -> str:
    """Return the keys of ``--delta-tuning``."""
    rows = (
        [f"`{key}={tuned.value}`", *_default_and_meaning(tuned.help)]
        for key, tuned in settings.TUNING.items()
    )
    return table(["key", "default", "meaning"], rows)


def sender_options() -> str:
    """Return the options of ``delta-send``."""
    from delta_sender.cli import make_parser

    return _options(make_parser()._actions)


def _options(actions: Iterable[argparse.Action]) -> str:
    rows = []
    for action in actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        text = (action.help or "").replace("%(default)s", str(action.default))
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
        value = str(action.metavar or choices)
        flag = (
            f"{action.option_strings[0]} {f'[{value}]' if action.nargs == '?' else value}".strip()
        )
        rows.append([f"`{flag}`", *_default_and_meaning(text)])
    return table(["flag", "default", "meaning"], rows)


def _default_and_meaning(text: str) -> tuple[str, str]:
    text = " ".join(text.split())
    found = _DEFAULT.search(text)
    meaning = _DEFAULT.sub("", text).replace("%%", "%").removesuffix(".")
    default = found["default"] if found else ""
    return default.replace("<", "&lt;"), meaning.replace("<", "&lt;")


def errors() -> str:
    """Return every error of the tree, by HTTP status."""
    classes = sorted(BY_NAME.values(), key=lambda cls: (cls.status, cls.__name__))
    rows = (
        [str(cls.status), f"`{cls.__name__}`", f"`{cls.engine_state}`", summary(cls)]
        for cls in classes
    )
    return table(["status", "`type`", "`engine_state`", "meaning"], rows)


def metric_table() -> str:
    """Return the Prometheus metrics by the names under which they are scraped."""
    rows = []
    for collector in vars(metrics).values():
        if isinstance(collector, MetricWrapperBase):
            [metric] = collector.describe()
            name = metric.name + ("_total" if metric.type == "counter" else "")
            labels = ", ".join(f"`{label}`" for label in collector._labelnames)
            rows.append([f"`{name}`", metric.type, labels, metric.documentation.removesuffix(".")])
    return table(["metric", "type", "labels", "meaning"], rows)


def routes() -> list[APIRoute]:
    """Return the routes that the server adds to an engine's app."""
    app = FastAPI(openapi_url=None)
    attach(app)
    return [route for route in app.routes if isinstance(route, APIRoute)]


def route_table() -> str:
    """Return method, path and summary of every route."""
    rows = (
        [f"`{method} {route.path}`", summary(route.endpoint)]
        for route in routes()
        for method in sorted(route.methods)
    )
    return table(["route", "what it does"], rows)


def fault_table() -> str:
    """Return the faults of tests/faults by the answer and the engine's version afterwards."""
    deaths = importlib.import_module("tests.faults.process_deaths")
    faults = importlib.import_module("tests.faults.survivable")
    rebuilding = importlib.import_module("tests.faults.rebuilding")
    hanging = importlib.import_module("tests.faults.hanging")
    in_flight = importlib.import_module("tests.faults.in_flight")
    store = importlib.import_module("tests.faults.store")
    survived = [
        *faults.FAULTS,
        *in_flight.IN_FLIGHT,
        *rebuilding.REBUILD_FAULTS,
        *hanging.HANGING,
        *deaths.RESPAWNS,
    ]
    rows = [(fault.what, fault.answer, _SURVIVED[fault.ends]) for fault in survived]
    rows += [
        (death.what, death.answer, _RESTARTED[death.ends])
        for death in (*deaths.DEATHS, *rebuilding.REBUILD_DEATHS)
    ]
    rows += [
        (fault.what, fault.answer, _FOLLOWED[fault.meanwhile].format(fault.until))
        for fault in store.STORE
    ]
    alike: dict[tuple[str, str], dict[str, None]] = {}
    for what, answer, holds in rows:
        alike.setdefault((answer, holds), {})[what] = None
    header = ["fault", "answer to the sender, or the follower's error", "the engine holds"]
    return table(header, (["<br>".join(found), *ends] for ends, found in alike.items()))
