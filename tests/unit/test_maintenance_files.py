"""Workflows, hooks, templates and the devcontainer name things that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def loaded(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def commands(job: dict[str, Any]) -> Iterator[str]:
    """Yield what a job runs, once for every value of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for step in job["steps"]:
        text = step.get("run", "")
        filled = [
            text.replace(f"${{{{ matrix.{key} }}}}", value)
            for key, values in matrix.items()
            for value in values
            if f"matrix.{key} " in text
        ]
        yield from filled or [text]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_that_exist(path: Path) -> None:
    workflow = loaded(path)
    # YAML 1.1 reads the key `on` as true.
    assert workflow.keys() - {"concurrency"} == {"name", True, "permissions", "jobs"}
    assert workflow["permissions"]["contents"] == "read"
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
        for command in commands(job):
            assert "${{" not in command
            for target in re.findall(r"\bmake ([\w-]+)", command):
                assert target in TARGETS
            for module in re.findall(r"python -m ([\w.]+)", command):
                assert (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_workflows_cover_lint_tests_docs_and_package() -> None:
    jobs = [job for path in WORKFLOWS for job in loaded(path)["jobs"].values()]
    run = {target for job in jobs for line in commands(job) for target in line.split()}
    assert {"lint", "test", "test-fast", "test-slow", "test-versions", "docs", "package"} <= run


def test_hooks_use_the_pinned_ruff_and_what_workflows_run() -> None:
    [repository] = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert repository["repo"] == "local"
    assert {id: hook["language"] for id, hook in hooks.items()} == {
        "ruff-check": "system",
        "ruff-format": "system",
        "codespell": "python",
    }
    for name in ("ruff-check", "ruff-format"):
        assert hooks[name]["entry"].startswith(".venv/bin/ruff ")
    [pin] = hooks["codespell"]["additional_dependencies"]
    assert re.fullmatch(r"codespell==[\d.]+", pin)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_have_what_github_needs(path: Path) -> None:
    form = loaded(path)
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown")
        assert field["attributes"]["label"]
        assert (field["type"] == "dropdown") == ("options" in field["attributes"])


def test_devcontainer_makes_the_environment() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["postCreateCommand"].split() == ["make", "setup"]
    assert "/python:3.11" in container["image"]


def test_code_owners_are_of_paths_that_exist() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert rows[0][0] == "*"  # the last row that matches counts
    for path, *teams in rows:
        assert teams and all(re.fullmatch(r"@[\w-]+/[\w-]+", team) for team in teams)
        assert path == "*" or (ROOT / path.strip("/")).exists(), path


def test_contributing_names_pages_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "docs/contributing.md" in text
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert target in TARGETS
