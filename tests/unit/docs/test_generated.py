"""The reference tables of the documentation say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_ext.conformance.cases import CASES
from scripts.doc_tables import __main__ as doc_tables
from scripts.doc_tables import reference


def test_the_tables_are_current() -> None:
    """Run ``python -m scripts.doc_tables`` if this fails."""
    stale = [
        page.name for page, text in doc_tables.generate(doc_tables.FAST) if page.read_text() != text
    ]
    assert stale == []


@pytest.mark.full
def test_the_conformance_table_is_current() -> None:
    stale = [
        page.name for page, text in doc_tables.generate(doc_tables.SLOW) if page.read_text() != text
    ]
    assert stale == []


def test_the_conformance_table_has_every_loader() -> None:
    text = (doc_tables.DOCS / "conformance.md").read_text()
    for case in CASES:
        assert f"| {case.name}: {case.what} | " in text


def test_a_stale_page_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doc_tables, "DOCS", tmp_path)
    page = tmp_path / "configuration.md"
    page.write_text("<!-- generated: flags -->\noutdated\n<!-- /generated -->\n\nText.\n")
    assert doc_tables.main(["--fast", "--check"]) == 1
    assert "configuration.md" in capsys.readouterr().out
    assert "outdated" in page.read_text()
    assert doc_tables.main(["--fast"]) == 0
    assert page.read_text().endswith("\n\n<!-- /generated -->\n\nText.\n")
    assert "`--enable-delta-updates`" in page.read_text()
    assert "outdated" not in page.read_text()
    assert doc_tables.main(["--fast", "--check"]) == 0


def test_an_unknown_table_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doc_tables, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text("<!-- generated: flag -->\n<!-- /generated -->\n")
    with pytest.raises(KeyError, match="flag"):
        list(doc_tables.generate(doc_tables.FAST))


def test_defaults_leave_the_meaning() -> None:
    rows = reference.tuning().splitlines()
    [row] = [row for row in rows if row.startswith("| `stage-timeout=SECONDS` |")]
    assert row.split(" | ")[1] == "60"
    assert "default" not in row
    [row] = [row for row in reference.flags().splitlines() if "--delta-base-version" in row]
    assert row.split(" | ")[1] == "0"
    assert any(row.startswith("| `--base-version N` | 0 |") for row in sender_rows())


def sender_rows() -> list[str]:
    return reference.sender_options().splitlines()
