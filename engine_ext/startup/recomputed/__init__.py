"""Rebuild modules whose tensors the engine computes from the checkpoint.

A module that post-load processing computes (quantised online, packed for a kernel) is kept as it
was before that processing: its parameters there are the shadow, which deltas are written to. A sync
that changes the shadow runs the engine's own processing on a copy, and what comes out is compared
with live memory. What the loader itself computes from a tensor is loaded again instead.

Imports: `trace`, `permuted` and `derived` of this room, and the rooms below it.
"""

from engine_ext.startup.recomputed.compare import RebuildError, module_place
from engine_ext.startup.recomputed.in_step import InStep
from engine_ext.startup.recomputed.load_again import load_again
from engine_ext.startup.recomputed.loader_rebuild import rebuild_by_loading
from engine_ext.startup.recomputed.loading_states import LoadingState, LoadingStates
from engine_ext.startup.recomputed.module_rebuild import ModuleRebuild, Probe
from engine_ext.startup.recomputed.probe import apply_to_rows, probe_linear
from engine_ext.startup.recomputed.prove import Rebuild, prove_rebuilds
from engine_ext.startup.recomputed.twin import make_twin, share_in_place, share_views, with_modules

__all__ = [
    "InStep",
    "LoadingState",
    "LoadingStates",
    "ModuleRebuild",
    "Probe",
    "Rebuild",
    "RebuildError",
    "apply_to_rows",
    "load_again",
    "make_twin",
    "module_place",
    "probe_linear",
    "prove_rebuilds",
    "rebuild_by_loading",
    "share_in_place",
    "share_views",
    "with_modules",
]
