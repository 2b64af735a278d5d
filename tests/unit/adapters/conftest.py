from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.endpoint_rig import Rig
from tests.unit.adapters.transfer_api import Api


@pytest.fixture
def api(disk_rig: Rig) -> Iterator[Api]:
    api = Api(disk_rig)
    yield api
    for group in api.worker.groups:
        group.close()
