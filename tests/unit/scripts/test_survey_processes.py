"""The survey's processes: one per name, and none outlives the survey."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.survey.processes import LOG, run_each

pytestmark = pytest.mark.slow


def behave(name: str, folder: Path) -> None:
    """The work of one process, chosen by its name."""
    print(f"{name} says something", flush=True)
    if name == "dies":
        os._exit(7)
    if name == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "child").write_text(str(child.pid))
        time.sleep(600)
    (folder / "done").write_text(name)


def runs(pid: int) -> bool:
    """Whether a process is neither gone nor a zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(pid: int) -> bool:
    """Whether a process that was killed is gone, some time later."""
    end = time.monotonic() + 10
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not runs(pid)


def wait_for(path: Path) -> str:
    end = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return path.read_text()


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.full), 3])
def test_each_name_has_a_process_of_its_own(
    tmp_path: Path, jobs: int, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["one", "dies", "hangs", "two"]
    found = list(run_each(names, behave, tmp_path, jobs=jobs, timeout=6))
    assert {e.name: e.code for e in found} == {"one": 0, "dies": 7, "hangs": None, "two": 0}
    for name in names:
        assert (tmp_path / name / LOG).read_text() == f"{name} says something\n"
        assert (tmp_path / name / "done").exists() == (name in ("one", "two"))
    assert ended(int((tmp_path / "hangs" / "child").read_text()))
    assert "says something" not in capfd.readouterr().out


def test_what_runs_when_the_survey_stops_is_killed(tmp_path: Path) -> None:
    planned = run_each(["hangs", "one"], behave, tmp_path, jobs=2, timeout=60)
    assert next(planned).name == "one"
    child = int(wait_for(tmp_path / "hangs" / "child"))
    assert runs(child)
    planned.close()
    assert ended(child)
