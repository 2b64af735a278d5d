"""Tables of flags, errors, metrics and routes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client.metrics import MetricWrapperBase

from delta_server import metrics
from delta_server.routes import attach
from engine_ext import settings
from engine_ext.errors import DeltaError
from scripts.doc_tables.markdown import plain, summary, table

_DEFAULT = re.compile(r" \((?:default: )(?P<default>[^()]*(?:\([^()]*\))?[^()]*)\)")


def flags() -> str:
    """Return the flags that an engine's command line gets."""
    parser = argparse.ArgumentParser(add_help=False)
    settings.add_arguments(parser)
    return _options(parser)


def sender_options() -> str:
    """Return the options of ``delta-send``."""
    from delta_sender.cli import make_parser

    return _options(make_parser())


def errors() -> str:
    """Return every error of the tree, by HTTP status."""
    rows = sorted((cls.status, cls.__name__, cls) for cls in error_classes())
    return table(
        ["status", "`type`", "`engine_state`", "meaning"],
        (
            [str(status), f"`{name}`", f"`{cls.engine_state}`", summary(cls)]
            for status, name, cls in rows
        ),
    )


def error_classes(root: type[DeltaError] = DeltaError) -> Iterator[type[DeltaError]]:
    """Yield every subclass of `root`."""
    for child in root.__subclasses__():
        yield child
        yield from error_classes(child)


def metric_table() -> str:
    """Return the Prometheus metrics by the names under which they are scraped."""
    found = [m for m in vars(metrics).values() if isinstance(m, MetricWrapperBase)]
    rows = []
    for collector in found:
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
    return table(
        ["route", "what it does"],
        (
            [f"`{method} {route.path}`", summary(route.endpoint)]
            for route in routes()
            for method in sorted(route.methods)
        ),
    )


def _options(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        text = " ".join((action.help or "").split())
        text = text.replace("%(default)s", str(action.default))
        found = _DEFAULT.search(text)
        default = found["default"] if found else ""
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
        flag = f"{action.option_strings[0]} {action.metavar or choices}".strip()
        meaning = _DEFAULT.sub("", text).replace("%%", "%").removesuffix(".")
        rows.append([f"`{flag}`", plain(default), plain(meaning)])
    return table(["flag", "default", "meaning"], rows)
