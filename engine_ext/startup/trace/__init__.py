"""Read the placement off the engine's own weight loader.

The loader runs on tensors without data while every write into the model is recorded (`dry_run`,
`recorder`), through temporaries, joins and permutations (`provenance`, `index_replay`,
`strided_boxes`, `permutations`) and the threads it starts (`thread_propagation`).

`dropped_aliases` finds the names of tied tensors that the loader takes and drops; `place_tied`
gives those that the checkpoint holds the place of the tensor that they are tied to.

Imports: `engine_ext.placement` and the rooms below it.
"""

from engine_ext.startup.trace.dropped_aliases import dropped_aliases, place_tied
from engine_ext.startup.trace.dry_run import (
    COPY_REPLACED,
    LoaderDryRun,
    LoadWeights,
    young_collections,
)
from engine_ext.startup.trace.loading_trace import LoadingTrace

__all__ = [
    "COPY_REPLACED",
    "LoadWeights",
    "LoaderDryRun",
    "LoadingTrace",
    "dropped_aliases",
    "place_tied",
    "young_collections",
]
