"""promtool finds nothing wrong in the configuration, the alerts and the dashboard's queries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from tests.dashboard.examples import EXAMPLES, RULES, panel_expressions


def promtool(*arguments: object) -> str:
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def test_the_configuration() -> None:
    assert "1 rule files found" in promtool("check", "config", EXAMPLES / "prometheus.yml")


def test_the_alerts() -> None:
    rules = RULES.read_text().count("alert:")
    assert f"{rules} rules found" in promtool("check", "rules", "--lint-fatal", RULES)


def test_the_alerts_come_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", EXAMPLES / "delta-updates.rules.test.yml")


def test_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, (_, expression) in enumerate(panel_expressions())
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)
