"""What the tests of the appliers have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from engine_ext.conformance import toy_models
from engine_ext.format import ParamDelta
from tests.support.served_models import (
    APPLIES,
    Served,
    attempt,
    delta_between,
    dense_delta,
    load,
    memory,
    named_in,
    parts_of,
)


def sync_id(value: object) -> str:
    return value.__name__ if isinstance(value, type) else "+".join(value)  # type: ignore[arg-type]


APPLY = pytest.mark.parametrize("apply", APPLIES)


DENSE = pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])


EVERY_MODEL = pytest.mark.parametrize("model", toy_models.every_model(), ids=sync_id)


def each_sync(model: type[toy_models.ToyModel]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield each tensor of a model alone, and all of them; sparse, and dense."""
    for names in dict.fromkeys([*((name,) for name in model.shapes), tuple(model.shapes)]):
        yield from ((names, dense) for dense in (False, True))


def deltas_for(
    base: toy_models.Checkpoint, target: toy_models.Checkpoint, names: Sequence[str], dense: bool
) -> list[ParamDelta]:
    if dense:
        return [dense_delta(name, target[name]) for name in names]
    return [delta_between(name, base[name], target[name]) for name in names]


def assert_freshly_loaded(served: Served, target: toy_models.Checkpoint) -> None:
    assert memory(served.model) == memory(load(type(served.model), target))


def refused(served: Served, deltas: Sequence[ParamDelta], *, full: bool = False) -> set[str]:
    """Return the tensors that the refusal names."""
    refusal = attempt(served, parts_of(deltas), full=full)
    assert refusal is not None
    return named_in(refusal)
