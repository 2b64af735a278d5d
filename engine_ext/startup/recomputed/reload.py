"""Load a checkpoint into a running model, and repeat all that the engine did to it after loading.

The engine's own reload does not: vLLM's packs no experts again, and frees the scales that oneDNN's
handles point to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

import torch

from engine_ext.model import PLAIN
from engine_ext.startup.permuted import ModuleCopy, loaded_tensors
from engine_ext.startup.recomputed.rebuild import Context, Rebuild, tensor_differences
from engine_ext.startup.recomputed.unprocessed_model import with_modules, with_parts
from engine_ext.startup.recomputed.unprocessed_modules import UnprocessedModule
from engine_ext.startup.trace import LoadWeights


def load_and_process(
    model: torch.nn.Module,
    states: Iterable[UnprocessedModule],
    rebuilds: Iterable[Rebuild],
    loader: Callable[[torch.nn.Module], LoadWeights],
    context: Context,
    checkpoint: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Load a checkpoint into unprocessed weights and live memory, as a fresh engine would.

    Takes the memory of a copy of all modules whose elements are only moved. All ranks must call it.

    Args:
        states: all that were kept.
        rebuilds: of those that the checkpoint has tensors for.
        loader: returns the loader of an unprocessed copy of the model.

    Raises:
        Exception: the weights are mixed.
    """
    states = list(states)
    copies = {id(one.module): ModuleCopy(one.before, {}) for one in states if one.moves}
    copied = with_parts(
        [(one.module, copies[id(one.module)].root if one.moves else one.before) for one in states]
    )
    known = {id(part): {*vars(part)} for copy in copied.values() for part in copy.modules()}
    with torch.no_grad(), context():
        loader(with_modules(model, copied))(checkpoint)
        for state in states:
            _copy_marks(copied[id(state.module)], state.module, known)
        for state in states:
            if state.moves:
                _process_moved(state, copies.pop(id(state.module)))
    for rebuild in rebuilds:
        for difference in rebuild.rebuild({}).differences:
            difference.elements.put(difference.new)


def _copy_marks(
    copy: torch.nn.Module, live: torch.nn.Module, known: Mapping[int, AbstractSet[str]]
) -> None:
    """Give a live module the plain attributes that a loader has given its copy.

    One that is cached when a loader first needs it is such.
    """
    parts = dict(live.named_modules())
    for path, part in copy.named_modules():
        for name in vars(part).keys() - known.get(id(part), set()):
            if isinstance(vars(part)[name], PLAIN) and path in parts:
                parts[path].__dict__[name] = vars(part)[name]


def _process_moved(state: UnprocessedModule, copy: ModuleCopy) -> None:
    """Process a copy, and write its tensors to the live module."""
    state.process(copy.root)
    live = dict(loaded_tensors(state.module))
    for name, tensor in loaded_tensors(copy.root):
        for difference in tensor_differences(name, live[name], tensor):
            difference.elements.put(difference.new)
    copy.release()
