"""The target and the draft model of speculative decoding, which are updated together.

The receiver sees both models as one (`TargetAndDraft`): a sync is one transaction of one version
over both. If the draft model has a checkpoint of its own, its tensors are sent with `PREFIX` before
their names. If it reads the target's checkpoint, as MTP layers do, they have their names there, and
both loaders get every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

PREFIX: Final = "draft."
# The places of both models in `TargetAndDraft`.
TARGET: Final = "target"
DRAFT: Final = "draft"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ModelRole:
    """A model that one rank loads.

    Attributes:
        path: its place in the receiver's model; empty if it is that model.
        prefix: what the names of its checkpoint's tensors have before them in a sync.
        own: whether it has a checkpoint that no other role has.
    """

    path: str
    prefix: str
    own: bool

    def by_path(self, found: Mapping[str, _T]) -> dict[str, _T]:
        """Return a mapping by the model's paths as one by the receiver's paths."""
        return {f"{self.path}.{name}".lstrip("."): one for name, one in found.items()}

    def inside(self, path: str) -> str:
        """Return a path of the receiver's model as it is in this one."""
        return path.removeprefix(f"{self.path}.")


class TargetAndDraft(torch.nn.Module):
    """Both models, as they are, with one loader.

    Args:
        prefix: what the names of the draft model's tensors begin with; empty if they are names of
            the target's checkpoint.

    Attributes:
        dropped: names of the tensors that the draft model's loader is not given.
    """

    def __init__(self, target: torch.nn.Module, draft: torch.nn.Module, prefix: str) -> None:
        super().__init__()
        self.target, self.draft = target, draft
        self.dropped: set[str] = set()
        self._prefix = prefix

    def split(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> list[tuple[Any, list[tuple[str, torch.Tensor]]]]:
        """Return each model with its tensors, if it has some; without a prefix both get all.

        Some loaders fail, or fill in defaults, if they get no tensor.
        """
        pairs, prefix = list(weights), self._prefix
        kept = ((n, t) for n, t in pairs if n not in self.dropped)
        of_draft = [(n.removeprefix(prefix), t) for n, t in kept if n.startswith(prefix)]
        of_target = [pair for pair in pairs if not (prefix and pair[0].startswith(prefix))]
        found = ((self.target, of_target), (self.draft, of_draft))
        return [(model, own) for model, own in found if own]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give each tensor to the loader of its model; to both loaders if there is no prefix."""
        for model, own in self.split(weights):
            model.load_weights(iter(own))

    def shared(self) -> list[str]:
        """Return the paths of the draft model's modules that are, or hold only, the target's."""
        modules = {id(module) for module in self.target.modules()}
        held = {id(parameter) for parameter in self.target.parameters()}

        def is_targets(module: torch.nn.Module) -> bool:
            own = {id(parameter) for parameter in module.parameters(recurse=False)}
            return id(module) in modules or (bool(own) and own <= held)

        found = self.draft.named_modules(prefix=DRAFT, remove_duplicate=False)
        return [path for path, module in found if is_targets(module)]


def read(
    roles: Sequence[ModelRole], checkpoints: Iterable[Iterable[tuple[str, torch.Tensor]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all checkpoints by the names that they have in a sync.

    Raises:
        RuntimeError: a name of the target's checkpoint looks like one of the draft model's.
    """
    prefixes = tuple(role.prefix for role in roles if role.prefix)
    for role, tensors in zip(roles, checkpoints, strict=True):
        for name, tensor in tensors if role.own else ():
            if not role.prefix and name.startswith(prefixes):
                raise RuntimeError(
                    f"delta updates: {name} of the target's checkpoint has the name of a tensor of "
                    "the draft model"
                )
            yield role.prefix + name, tensor


def outside(modules: Iterable[str], found: Mapping[str, _T]) -> dict[str, _T]:
    """Return the entries, by a tensor's path, that are in none of some modules."""
    inside = tuple(f"{path}." for path in modules)
    return {name: one for name, one in found.items() if not name.startswith(inside)}
