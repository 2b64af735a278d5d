"""`Receiver.handle` answers every request, and raises nothing."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.settings import Settings
from engine_ext.sync.receiver import Receiver
from tests.support.rank_engine import RecordingApplier, part_id
from tests.support.served_models import PROPERTY
from tests.unit.sync.recorded_ranks import Ranks, body


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("explode", {}),
        ("__init__", {}),
        ("begin", {}),
        ("begin", {"part": {}, "path": "x", "now": 0.0}),
        ("begin", {"part": None, "path": None, "now": None}),
        ("begin", {"part": {"version": "1"}, "path": "x", "now": 0.0}),
        ("poll", {"part": 0}),
        ("poll", {"part": []}),
        ("prepare", {}),
        ("commit", {}),
        ("commit", {"version": 1, "sync_id": None}),
        ("status", {"parts": {"version": 1, "identities": None}}),
        ("status", {"extra": 1}),
        ("status", None),
        ("status", []),
        (None, {}),
        ([], {}),
    ],
)
def test_handle_never_raises(tmp_path: Path, operation: Any, arguments: Any) -> None:
    ranks = Ranks(tmp_path, 1)
    answer = ranks.engine.receivers[0].handle(operation, arguments)
    assert set(answer) == {"error"}
    assert answer["error"]["engine_state"] == "unchanged"
    assert answer["error"]["message"]
    json.dumps(answer)
    ranks.engine.apply(part_id(body()), body())  # and it still works


@pytest.mark.slow
@PROPERTY
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["begin", "poll", "prepare", "commit", "abort", "put", "lease", "status"]
            ),
            st.dictionaries(
                st.sampled_from(
                    ["part", "path", "now", "keep", "version", "sync_id", "parts", "key", "holder"]
                ),
                st.none()
                | st.booleans()
                | st.integers(-1, 2)
                | st.just("/dev/null")
                | st.just(msgspec.to_builtins(part_id(body()))),
            ),
        ),
        max_size=8,
    )
)
def test_handle_never_raises_whatever_it_is_told(calls: list[tuple[str, dict[str, Any]]]) -> None:
    applier = RecordingApplier()
    alone = type("Alone", (), {"rank": 0, "all_gather": lambda self, value: [value]})()
    receiver = Receiver(applier, alone, Settings(read_workers=1))
    for operation, arguments in calls:
        answer = receiver.handle(operation, arguments)
        assert set(answer) in ({"ok"}, {"error"})
        json.dumps(answer)
    assert applier.committed == []


def test_no_full_garbage_collection_is_made_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while a part is staged, in the background, nor in the pause."""
    ranks, usual = Ranks(tmp_path, 1), gc.get_threshold()
    [applier], during = ranks.appliers, {}

    def noted(name: str) -> Callable[..., Any]:
        step = getattr(applier, name)

        def note(*arguments: Any, **options: Any) -> Any:
            during[name] = gc.get_threshold()
            return step(*arguments, **options)

        return note

    for name in ("stage", "write"):
        monkeypatch.setattr(applier, name, noted(name))
    ranks.engine.apply(part_id(body()), body())
    assert ranks.written == [1]
    assert during.keys() == {"stage", "write"}
    assert all(found[:2] == usual[:2] and found[2] > 1 << 20 for found in during.values())
    assert gc.get_threshold() == usual
