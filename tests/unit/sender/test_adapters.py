"""A sender of an adapter's own tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_sender import DeltaSender, SyncError
from delta_sender.cli import make_parser
from delta_sender.publish.state_file import read_state
from tests.support.fake_engine import AdapterEngine, Engine, model_of, sender_of, train

URL = "http://engine/"


def sender(engine: Engine, base: Any, **options: Any) -> DeltaSender:
    return sender_of(engine, base, adapter="tiny", **options)


def test_every_request_names_the_adapter() -> None:
    model = model_of()
    engine = AdapterEngine.of(model)
    with sender(engine, model) as sending:
        for step in range(3):
            train(model, step)
            assert sending.sync(model.items()).status == "committed"
    assert engine.holds(model)
    asked = engine.requests + engine.questions
    assert {AdapterEngine.named(request) for request in asked} == {"tiny"}
    assert {request.url.params["flush_cache"] for request in engine.requests} == {"true"}


@pytest.mark.parametrize("has_status", [False, True])
def test_an_engine_that_knows_no_adapters_gets_no_part(has_status: bool) -> None:
    """It would take the parts for the model's."""
    model = model_of()
    engine = Engine.of(model)
    if not has_status:
        engine.status = lambda: httpx.Response(404)  # type: ignore[method-assign]
    with sender(engine, model) as sending:
        train(model)
        with pytest.raises(SyncError, match="takes no updates of adapters"):
            sending.sync(model.items())
    assert engine.requests == []


def test_the_state_of_an_adapter_is_not_that_of_the_model(tmp_path: Path) -> None:
    model, file = model_of(), tmp_path / "state.json"
    engine = AdapterEngine.of(model)
    with sender(engine, model, state=file) as sending:
        train(model)
        sending.sync(model.items())
    assert read_state(file).engines.keys() == {f"{URL.rstrip('/')}?adapter=tiny"}
    with sender(engine, model, state=file) as sending:
        assert sending.version == 1


def test_a_delta_log_has_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not of adapters"):
        DeltaSender(URL, model_of().items(), adapter="tiny", delta_log=tmp_path)


def test_the_command_takes_a_name() -> None:
    parsed = make_parser().parse_args(["--target", "next", "--adapter", "tiny"])
    assert parsed.adapter == "tiny"
