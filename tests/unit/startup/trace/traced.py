"""Toy models, and their traces."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from engine_ext.conformance.toy_models import ToyModel, Weights, every_model
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.segments import Placement, TensorSpec
from engine_ext.startup import LoaderDryRun
from tests.support.served_models import base_checkpoint, load

COPY = torch.Tensor.copy_
MODELS = pytest.mark.parametrize("model", every_model(), ids=lambda m: m.__name__)


class Calls:
    """A loader that counts how often it is called, and with what."""

    def __init__(self, model: ToyModel) -> None:
        self._model = model
        self.names: list[list[str]] = []

    def __call__(self, weights: Weights) -> None:
        given = list(weights)
        self.names.append([name for name, _ in given])
        self._model.load_weights(iter(given))


def loaded(model: type[ToyModel]) -> ToyModel:
    return load(model, base_checkpoint(model))


def trace(live: ToyModel, specs: Iterable[TensorSpec] | None = None) -> Placement:
    chosen = live.specs() if specs is None else list(specs)
    return LoaderDryRun(live, live.load_weights, StorageIndex(live)).trace(chosen)


def identities(live: ToyModel) -> dict[str, tuple[int, int]]:
    tensors = [*live.named_parameters(remove_duplicate=False), *live.named_buffers()]
    tensors += [(n, v) for n, v in vars(live).items() if isinstance(v, torch.Tensor)]
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors}
