"""Tied tensors that were given other memory: a full sync follows them, and both stay equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.quantised_engine import Serving
from tests.support.rank_engine import errors_of
from tests.unit.sync.test_moved_tensors import corrupted, give_memory, states
from tests.unit.sync.test_tied import EMBED, HEAD, Retied, Tied, both

pytestmark = pytest.mark.host_memory


@pytest.mark.parametrize("kind", [Tied, Retied])
@pytest.mark.parametrize("ranks", [1, 2])
def test_full_sync_follows_what_the_checkpoint_holds_twice(
    tmp_path: Path, kind: type[Tied], ranks: int
) -> None:
    serving = Serving(kind, tmp_path, ranks=ranks)
    for model in serving.models:
        give_memory(model.embed.weight)
    assert corrupted(serving) == [EMBED, HEAD]
    errors_of(serving.sync({**serving.current, **both(serving, 1)}, full=True), none=True)
    assert states(serving) == {("certain", ())}
    serving.assert_fresh()
    errors_of(serving.sync(both(serving, 2)), none=True)
    serving.assert_fresh()
