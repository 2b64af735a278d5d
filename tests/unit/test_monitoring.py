"""The Grafana dashboard and the alert rules use the metrics that the server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.metrics import MetricWrapperBase

from delta_server import metrics
from tests.support.cases import in_one_test

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((EXAMPLES / "delta-updates.rules.yml").read_text())[
    "groups"
][0]["rules"]
TESTS: dict[str, Any] = yaml.safe_load((EXAMPLES / "delta-updates.rules.test.yml").read_text())
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
ADDED = {"job", "instance", "le"}  # by Prometheus


@cache
def scraped() -> dict[str, set[str]]:
    """The labels of every time series, by its name."""
    found = {}
    for collector in vars(metrics).values():
        if isinstance(collector, MetricWrapperBase):
            [metric] = collector.describe()
            for suffix in SUFFIXES[metric.type]:
                found[metric.name + suffix] = {*collector._labelnames}
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Where an expression stands, and the expression."""
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"][1:]:
        yield variable["name"], variable["query"]["query"]
    yield from ((rule["alert"], rule["expr"]) for rule in RULES)
    for case in TESTS["tests"]:
        yield from ((case["name"], series["series"]) for series in case["input_series"])


@in_one_test(("where", "expression"), [*expressions()])
def test_metrics_and_labels_exist(where: str, expression: str) -> None:
    known = scraped()
    names = set(re.findall(r"delta_updates_\w+", expression))
    assert names
    assert names <= known.keys()
    labels = ADDED.union(*(known[name] for name in names))
    matched = re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression)
    grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    assert {*matched, *(label for some in grouped for label in some.split(", "))} <= labels


def test_every_metric_of_syncs_is_shown() -> None:
    shown = " ".join(expression for _, expression in expressions())
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in scraped()}
    absent = {stem for stem in stems if stem not in shown}
    assert absent == {
        "delta_updates_elements_total",
        "delta_updates_rebuilt_modules_total",
        "delta_updates_adapter_version",
    }


def test_every_alert_is_tested() -> None:
    tested = {t["alertname"] for case in TESTS["tests"] for t in case["alert_rule_test"]}
    assert tested == {rule["alert"] for rule in RULES}


def test_alerts_say_what_to_do() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_dashboard_can_be_imported() -> None:
    panels = DASHBOARD["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))  # no panel covers another
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "instance"}
