"""The benchmark of a log's bytes writes what it counts."""

from __future__ import annotations

from scripts.bench import log_size


def test_every_way_is_measured() -> None:
    rows = log_size.run(200_000)
    assert {row["density"] for row in rows} == {0.006, 0.02, 0.03}
    sizes = {row["kept"]: row["bytes"] for row in rows if row["density"] == 0.02}
    assert sizes["log, differences"] < sizes["log, values"] < sizes["log, deltas_zstd"]
    assert sizes["checkpoint"] == 400_000
