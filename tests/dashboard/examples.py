"""The files of ``examples/monitoring``, as Prometheus gets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
RULES = EXAMPLES / "delta-updates.rules.yml"
# The values that Grafana puts in place of its variables.
_VARIABLES = {
    "$__rate_interval": "1m",
    "$__range": "1h",
    "$job": "policy",
    "$instance": ".*",
}


def panel_expressions() -> Iterator[tuple[str, str]]:
    """The title of every panel of the dashboard, with each of its expressions."""
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in _VARIABLES.items():
                expression = expression.replace(variable, value)
            yield panel["title"], expression
