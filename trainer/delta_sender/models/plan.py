"""Find out, without reading a tensor, how a model's tensors become those of its checkpoint.

The plan is a list of groups. A group is the fewest tensors of the model that tensors of the
checkpoint are made of: mostly one; the fused experts of a layer; a module and its adapters.
transformers itself converts each group, and what it makes of all names is found out on the meta
device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from delta_sender.diff.observations import cast
from delta_sender.diff.quantize import Quantizer
from delta_sender.models.adapters import AdaptedModule
from delta_sender.models.checkpoint_class import class_hint, quantised_form
from delta_sender.models.model_state import ModelState
from engine_ext.answers import prefix_hint, some_of

State = dict[str, torch.Tensor]
Convert = Callable[[State], State]


@dataclass
class Group:
    """Tensors of the model, and what they become.

    Attributes:
        keys: Names in the model without adapters.
        outputs: The checkpoint's names and shapes.
        renamed: If nothing but the name changes: the key of each output.
    """

    keys: tuple[str, ...]
    outputs: dict[str, torch.Size]
    renamed: dict[str, str] = field(default_factory=dict)


@dataclass
class Batch:
    """Groups that are read together, because they need the same adapted modules."""

    groups: list[Group]
    modules: list[AdaptedModule]


def conversion_of(model: nn.Module) -> Convert:
    """Return what turns tensors of the model into the checkpoint's."""
    if not hasattr(model, "save_pretrained"):
        return dict
    from transformers.core_model_loading import revert_weight_conversion

    def convert(state: State) -> State:
        return dict(revert_weight_conversion(model, state))

    return _without_dequantizing(model, convert)


def _without_dequantizing(model: nn.Module, convert: Convert) -> Convert:
    """Return a conversion that gives a model's weights as they are, if loading dequantised them.

    transformers cannot revert that, nor can what is combined with it: fused experts are converted
    as those of a checkpoint that is not quantised.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    used = getattr(model, "_weight_conversions", None) or []
    operations = [
        type(operation).__name__
        for conversion in used
        for operation in getattr(conversion, "operations", ())
    ]
    if not any("Dequantize" in name for name in operations):
        return convert
    usual = get_model_conversion_mapping(model, add_legacy=False)
    kept = [conversion for conversion in used if not isinstance(conversion, WeightConverter)]
    kept += [conversion for conversion in usual if isinstance(conversion, WeightConverter)]

    def convert_dequantized(state: State) -> State:
        model._weight_conversions = kept  # type: ignore[assignment]
        try:
            return convert(state)
        finally:
            model._weight_conversions = used  # type: ignore[assignment]

    return convert_dequantized


# The groups of a model, with its names and shapes then: converting tens of thousands of names takes
# seconds, which every sync would take again.
_KNOWN: Final[WeakKeyDictionary[nn.Module, tuple[object, list[Group]]]] = WeakKeyDictionary()


def _known_groups(state: ModelState, convert: Convert) -> list[Group]:
    names = [(key, tensor.shape) for key, tensor in state.tensors.items()]
    signature = (names, state.aliases)
    known = _KNOWN.get(state.model)
    if known is None or known[0] != signature:
        known = _KNOWN[state.model] = (signature, groups_of(state, convert))
    return copy.deepcopy(known[1])


def groups_of(state: ModelState, convert: Convert) -> list[Group]:
    """Divide the tensors of the model into groups that are converted alone.

    Raises:
        ValueError: Converting the groups one by one does not give what converting all at once does.
    """
    meta = {key: _meta(tensor) for key, tensor in state.tensors.items()}
    wanted = convert(dict(meta))
    key_of = {id(tensor): key for key, tensor in meta.items()}
    groups = [
        Group((key_of[id(tensor)],), {name: tensor.shape}, {name: key_of[id(tensor)]})
        for name, tensor in wanted.items()
        if id(tensor) in key_of
    ]
    passed = {key for group in groups for key in group.keys}
    made = {name: tensor.shape for name, tensor in wanted.items() if id(tensor) not in key_of}
    left = [key for key in meta if key not in passed and key not in state.aliases]
    for split in (_alone, _by_layer, _together):
        if not left:
            break
        tried, left = split(left), []
        for keys in tried:
            outputs = {n: t.shape for n, t in _try(convert, {k: meta[k] for k in keys}).items()}
            if outputs and outputs.items() <= made.items():
                groups.append(Group(tuple(keys), outputs))
                made = {name: shape for name, shape in made.items() if name not in outputs}
            else:
                left += keys
    if left or (made and not _of_aliases(made, state, convert, meta)):
        names = some_of(left or made)
        raise ValueError(f"transformers' weight conversion cannot be done by parts: {names}")
    return groups


def _of_aliases(
    made: Mapping[str, torch.Size], state: ModelState, convert: Convert, meta: State
) -> bool:
    """Whether the tensors come of further names of tied ones, which are left out."""
    given = {key: tensor for key, tensor in meta.items() if key in state.aliases}
    return made.keys() <= _try(convert, given).keys()


def _try(convert: Convert, given: State) -> State:
    try:
        return convert(given)
    except Exception:  # a part of what is converted together: whatever transformers raises
        return {}


def _alone(keys: Iterable[str]) -> list[list[str]]:
    return [[key] for key in keys]


def _by_layer(keys: Iterable[str]) -> list[list[str]]:
    layers: dict[str, list[str]] = {}
    for key in keys:
        layer = re.match(r".*?\.\d+\.", key)
        layers.setdefault(layer[0] if layer else "", []).append(key)
    return list(layers.values())


def _together(keys: Iterable[str]) -> list[list[str]]:
    return [list(keys)]


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def batches_of(groups: Iterable[Group], modules: Iterable[AdaptedModule]) -> list[Batch]:
    """Put groups together that need the same adapted module, so that it is merged once."""
    module_of = {key: module for module in modules for key in module.outputs}
    batches: dict[object, Batch] = {}
    for group in groups:
        needed = {id(m): m for m in (module_of.get(key) for key in group.keys) if m is not None}
        batch = batches.setdefault(tuple(needed) or group.keys, Batch([], list(needed.values())))
        batch.groups.append(group)
    return list(batches.values())


class Plan:
    """The tensors that are read of a model, and what becomes of them.

    Args:
        model: The model; see `model_state.unwrapped`.
        base: The checkpoint's tensors by name, if its names, shapes and dtypes are wanted.
        dtype: The dtype of all floating-point tensors, if there is no base.
        quantize: The form in which the base is quantised; see `Quantizer`.
        folder: Where the base is, if it is a folder.

    Attributes:
        state: The model's tensors.
        groups: What they become.
        convert: Turns tensors of the model into the checkpoint's.
        unchanged: Tensors of the base that the model's class leaves out when it loads.

    Raises:
        ValueError: The model cannot be read, or names or shapes are not the base's.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Mapping[str, torch.Tensor] | None,
        dtype: torch.dtype | None,
        quantize: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self._quantizer: Quantizer | None = None
        if quantize is not None:
            if base is None:
                raise ValueError("quantize= needs the quantised checkpoint as base")
            self._quantizer = Quantizer(quantize, {name: t.dtype for name, t in base.items()})
        self.state = ModelState(model)
        self.convert, self._base, self._dtype = conversion_of(model), base, dtype
        self._folder = folder
        groups = _known_groups(self.state, self.convert)
        self.groups = _without_aliases(groups, self.state.aliases, base)
        self.unchanged: dict[str, torch.Tensor] = {}
        if base is not None:
            self._compare(base)

    def _compare(self, base: Mapping[str, torch.Tensor]) -> None:
        made = {name: shape for group in self.groups for name, shape in group.outputs.items()}
        for name, shape in made.items():
            if name not in base:
                hint = self._class_hint() or prefix_hint(name, base)
                raise ValueError(f"{name}: in the model, but not in the base{hint}")
            if base[name].shape != shape:
                given, wanted = list(shape), list(base[name].shape)
                hint = self._class_hint()
                if given[1:] == wanted[1:] and given[0] == self.state.vocabulary:
                    hint = (
                        "; the vocabulary was resized: start the engine with what save_pretrained "
                        "writes of the resized model, and give that folder as base"
                    )
                raise ValueError(f"{name}: {given} in the model, but {wanted} in the base{hint}")
        scales = {self._scale_of[name] for name in made if name in self._scale_of}
        ignored = getattr(self.state.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        for name in sorted(base.keys() - made.keys() - scales):
            if not any(re.search(pattern, name) for pattern in ignored):
                raise ValueError(
                    f"{name}: in the base, but not in the model{self._base_hint(base)}"
                )
            self.unchanged[name] = base[name]

    @property
    def _scale_of(self) -> Mapping[str, str]:
        return {} if self._quantizer is None else self._quantizer.scale_of

    def _class_hint(self) -> str:
        return class_hint(self.state.model, self._folder)

    def _base_hint(self, base: Mapping[str, torch.Tensor]) -> str:
        form = quantised_form({name: tensor.dtype for name, tensor in base.items()})
        if self._quantizer is None and form is not None:
            return (
                f"; the base is quantised: named_tensors, checkpoint_names and sync_model take "
                f"quantize={form!r}"
            )
        return self._class_hint()

    def build(self, group: Group, tensors: Mapping[str, torch.Tensor]) -> State:
        """Return the tensors of a group in the checkpoint's names, shapes and dtypes.

        Args:
            tensors: Whole tensors, by key.

        Raises:
            ValueError: A weight to quantise is not finite.
        """
        if group.renamed:
            made = {name: tensors[key] for name, key in group.renamed.items()}
        else:
            made = self.convert({key: tensors[key] for key in group.keys})
        if {name: tensor.shape for name, tensor in made.items()} != group.outputs:
            raise ValueError(f"{group.keys[0]}: became other tensors than the plan has")
        found = {name: self._cast(name, tensor) for name, tensor in made.items()}
        return found if self._quantizer is None else dict(self._quantizer(found.items()))

    def untrained(self, group: Group) -> list[tuple[str, torch.Tensor]]:
        """Return tensors that are not given and not trained: the base's, or else the model's.

        Raises:
            ValueError: Neither has values.
        """
        if self._base is not None:
            scales = [self._scale_of[name] for name in group.outputs if name in self._scale_of]
            return [(name, self._base[name]) for name in (*group.outputs, *scales)]
        for key in group.keys:
            if self.state.tensors[key].device.type == "meta":
                raise ValueError(f"{key}: left out, without a base or a model that has its values")
        return list(self.build(group, self.state.tensors).items())

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in self._scale_of:
            return tensor  # it is quantised as the trainer has it, and not rounded before
        if self._base is not None:
            return cast(name, tensor, self._base[name].dtype)
        if self._dtype is not None and tensor.is_floating_point():
            return cast(name, tensor, self._dtype)
        return tensor


def _without_aliases(
    groups: list[Group], aliases: Mapping[str, str], base: Mapping[str, torch.Tensor] | None
) -> list[Group]:
    """Leave out further names of tied tensors, except those that the base has."""
    by_key = {group.keys[0]: group for group in groups if group.renamed}
    for alias, kept in aliases.items():
        group, first = by_key.get(alias), by_key.get(kept)
        if base is None or group is None or first is None:
            continue
        for name, shape in group.outputs.items():
            if name in base:
                first.outputs[name], first.renamed[name] = shape, kept
        for name in [name for name in first.outputs if name not in base]:
            if len(first.outputs) > 1:
                del first.outputs[name], first.renamed[name]
    return [group for group in groups if group.keys[0] not in aliases]
