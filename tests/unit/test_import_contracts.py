"""The import contracts of pyproject.toml hold, and each of them fails when it is broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine_ext", "server/delta_server", "trainer/delta_sender", "scripts")

# A line that breaks a contract, the file of the copy that it goes to, and the contract's id.
BREAKS = [
    ("from engine_ext.sync import receiver", "engine_ext/placement/plan.py", "layers"),
    ("import engine_ext.conformance.judge", "engine_ext/sync/receiver.py", "layers"),
    ("import engine_ext.conformance.judge", "engine_ext/adapters/vllm/worker.py", "layers"),
    ("import engine_ext.conformance", "server/delta_server/service.py", "contract-only"),
    (
        "from engine_ext.startup.derived import find",
        "engine_ext/startup/trace/dry_run.py",
        "startup-layers",
    ),
    ("import engine_ext.settings", "engine_ext/errors.py", "layers"),
    ("from engine_ext.sync import scatter", "server/delta_server/service.py", "contract-only"),
    ("import delta_server.sources.push", "server/delta_server/staging.py", "server-layers"),
    ("import engine_ext.ranks.operations", "server/delta_server/sources/push.py", "sources-port"),
    ("import delta_sender.publish", "trainer/delta_sender/encode/sync_round.py", "sender-layers"),
    ("import engine_ext.model", "trainer/delta_sender/diff/snapshot.py", "contract-only"),
    ("import delta_server.service", "trainer/delta_sender/publish/sender.py", "apart"),
    ("import delta_sender", "server/delta_server/routes.py", "apart"),
    ("import delta_server", "engine_ext/format/part.py", "adapters-only"),
    ("import delta_server", "engine_ext/settings.py", "adapters-only"),
    ("import vllm", "engine_ext/startup/trace/dry_run.py", "engines"),
    ("import sglang", "server/delta_server/service.py", "engines"),
    ("from engine_ext.format.part import DecodedPart", "engine_ext/format/container.py", "acyclic"),
    ("import scripts.command_line", "trainer/delta_sender/cli.py", "scripts-on-top"),
    ("from scripts import doc_tables", "scripts/command_line.py", "scripts-layers"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and of the contracts."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


def lint(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter as ``make lint`` does."""
    paths = [folder, folder / "server", folder / "trainer"]
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-logo", "--no-cache", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_contracts_hold(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("line", "file", "contract"), BREAKS, ids=[f"{b[2]}-{Path(b[1]).stem}" for b in BREAKS]
)
def test_a_broken_contract_is_found(copy: Path, line: str, file: str, contract: str) -> None:
    path = copy / file
    before = path.read_text()
    path.write_text(f"{before}\n{line}\n")
    try:
        done = lint(copy, "--contract", contract)
    finally:
        path.write_text(before)
    assert done.returncode == 1, done.stdout
    assert " 1 broken" in done.stdout
