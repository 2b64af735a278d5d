"""Parts that a trainer broadcasts: what is said when another one's bytes arrive."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_server.sources.transfer import WeightTransfer
from engine_ext.errors import MalformedPart
from tests.support.delta_bodies import OTHER_STEP, VERSION, delta_part
from tests.support.endpoint_rig import Rig

OTHERS = delta_part(OTHER_STEP, encoding="deltas_zstd")


@pytest.mark.parametrize(
    "arrives", [OTHERS + bytes(9), OTHERS[:-9], bytes(400)], ids=["shorter", "longer", "no part"]
)
def test_another_trainers_broadcast_is_named(rig: Rig, arrives: bytes) -> None:
    async def receive(path: Path, size: int) -> None:
        path.write_bytes(arrives)

    async def update() -> None:
        transfer = WeightTransfer(rig.service.inlet, receive)
        await transfer.start()
        await transfer.update({"broadcast_bytes": len(arrives)})

    with pytest.raises(MalformedPart, match="does another trainer send to this engine"):
        rig.run(update())
    rig.assert_untouched()


def test_event_loop_does_not_remove_broadcast(rig: Rig, removes_in_threads: list[str]) -> None:
    part = delta_part(OTHER_STEP)

    async def receive(path: Path, size: int) -> None:
        path.write_bytes(part)

    async def update() -> None:
        transfer = WeightTransfer(rig.service.inlet, receive)
        await transfer.start()
        await transfer.update({"broadcast_bytes": len(part)})
        await transfer.finish()

    rig.run(update())
    assert rig.status().version.number == VERSION + 1
