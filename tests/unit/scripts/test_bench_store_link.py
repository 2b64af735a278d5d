"""The benchmark of fetching over a far link."""

from __future__ import annotations

import json
import os

import pytest

from engine_ext.log import Objects
from scripts.bench import store_link

pytestmark = pytest.mark.slow


def test_it_prints_the_share_of_the_link(
    store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    arguments = [store_url, "--megabytes", "2", "--megabytes-per-second", "50", "--json"]
    assert store_link.main([*arguments, "--repeats", "1", "--streams", "2"]) == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["streams"] == 2
    assert 0 < row["share"] < 1.05
    assert os.environ["AWS_ENDPOINT_URL"] == endpoint
    assert Objects(store_url).list() == []


def test_it_asks_for_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with pytest.raises(SystemExit):
        store_link.main(["s3://bucket/x"])
