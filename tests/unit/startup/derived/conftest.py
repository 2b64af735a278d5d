"""The ways in which attention can leave what it derives."""

from __future__ import annotations

import pytest

from tests.unit.startup.derived.latent_attention import Attention, InPlace, SwapsMemory


@pytest.fixture(params=[Attention, InPlace, SwapsMemory])
def attention(request: pytest.FixtureRequest) -> type[Attention]:
    return request.param
