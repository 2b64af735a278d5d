"""The tutorial is short, its files compile, and its checkpoint is made."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from scripts.doc_tables.__main__ import DOCS

PAGE = DOCS / "tutorial.md"


def files() -> dict[str, str]:
    """Return the files that the tutorial asks to save, by name."""
    return dict(
        re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    )


def test_every_python_block_is_a_file() -> None:
    assert list(files()) == ["make_model.py", "train.py"]
    assert PAGE.read_text().count("```python") == 2
    compile(files()["train.py"], "train.py", "exec")


def test_the_checkpoint_is_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make_model.py").write_text(files()["make_model.py"])
    runpy.run_path("make_model.py")
    [shown] = re.findall(r"```text\n(.*in checkpoint/)\n```", PAGE.read_text())
    assert shown in capsys.readouterr().out
    assert json.loads((tmp_path / "checkpoint" / "config.json").read_text())["vocab_size"] == 27
