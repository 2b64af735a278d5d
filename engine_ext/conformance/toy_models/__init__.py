"""Small models whose ``load_weights`` treat weights the ways that engine loaders do.

Each class is one habit. Its attributes say what the receiver must make of it: a tensor is updated
by any sync, unless it stands in `refused` (by none), in `dense_only`, or in `needs` (only by a
sync that holds these other tensors too).
"""

from __future__ import annotations

from engine_ext.conformance.toy_models.base import *  # noqa: F403
from engine_ext.conformance.toy_models.base import ToyModel
from engine_ext.conformance.toy_models.changing import *  # noqa: F403
from engine_ext.conformance.toy_models.looking import *  # noqa: F403
from engine_ext.conformance.toy_models.moving import *  # noqa: F403
from engine_ext.conformance.toy_models.other_means import *  # noqa: F403
from engine_ext.conformance.toy_models.writing_more import *  # noqa: F403


def every_model() -> list[type[ToyModel]]:
    """Every model of this package."""
    found: list[type[ToyModel]] = []

    def walk(cls: type[ToyModel]) -> None:
        for child in cls.__subclasses__():
            found.append(child)
            walk(child)

    walk(ToyModel)
    return [cls for cls in found if cls.__module__.startswith(__name__)]
