"""Rebuild modules whose tensors the engine computes from the checkpoint.

A module that post-load processing computes (quantised online, packed for a kernel) is kept as it
was before that processing: its parameters there are the shadow, which deltas are written to. A sync
that changes the shadow runs the engine's own processing on a copy, and what comes out is compared
with live memory. What the loader itself computes from a tensor is loaded again instead.

Imports: `engine_ext.tracing`, `engine_ext.repacks`, `engine_ext.derived` and the rooms below.
"""

from engine_ext.rebuild.compare import Place
from engine_ext.rebuild.elements import Replacement
from engine_ext.rebuild.loader_rebuild import rebuild_by_loading
from engine_ext.rebuild.loading_states import LoadingState, LoadingStates
from engine_ext.rebuild.module_rebuild import ModuleRebuild
from engine_ext.rebuild.prove import Rebuild, prove_rebuilds
from engine_ext.rebuild.twin import make_twin, share_views

__all__ = [
    "LoadingState",
    "LoadingStates",
    "ModuleRebuild",
    "Place",
    "Rebuild",
    "Replacement",
    "make_twin",
    "prove_rebuilds",
    "rebuild_by_loading",
    "share_views",
]
