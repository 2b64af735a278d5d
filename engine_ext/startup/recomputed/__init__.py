"""Rebuild modules whose tensors the engine computes from the checkpoint.

A module that post-load processing computes (quantised online, packed for a kernel) is kept as it
was before that processing (`UnprocessedModules`). Deltas are written to these weights. A sync
that changes them runs the engine's own processing on a copy, and what comes out is compared
with live memory. If the loader itself computes something from a tensor, the tensor is loaded again
instead.

Imports: `trace`, `permuted` and `derived` of this room, and the rooms below it.
"""

from engine_ext.startup.recomputed.compare import RebuildError, module_place
from engine_ext.startup.recomputed.loader_rebuild import rebuild_by_loading
from engine_ext.startup.recomputed.lockstep import LockstepRunner
from engine_ext.startup.recomputed.module_rebuild import ModuleRebuild
from engine_ext.startup.recomputed.probe import apply_to_rows, probe_linear
from engine_ext.startup.recomputed.prove import prove_rebuilds
from engine_ext.startup.recomputed.rebuild import Probe, Rebuild
from engine_ext.startup.recomputed.reload import load_and_process
from engine_ext.startup.recomputed.unprocessed_model import (
    make_unprocessed_model,
    share_in_place,
    share_views,
    with_modules,
)
from engine_ext.startup.recomputed.unprocessed_modules import UnprocessedModule, UnprocessedModules

__all__ = [
    "LockstepRunner",
    "ModuleRebuild",
    "Probe",
    "Rebuild",
    "RebuildError",
    "UnprocessedModule",
    "UnprocessedModules",
    "apply_to_rows",
    "load_and_process",
    "make_unprocessed_model",
    "module_place",
    "probe_linear",
    "prove_rebuilds",
    "rebuild_by_loading",
    "share_in_place",
    "share_views",
    "with_modules",
]
