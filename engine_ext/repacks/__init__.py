"""Learn what the engine's post-load processing moves.

A parameter's elements are replaced by the digits of their own index, the engine's processing runs
on a copy of the module, and what comes out is a permutation or no repack (`infer`, `index_probe`,
`module_copy`). `load_hook` does this while the engine loads.

Imports: `engine_ext.placement` and the rooms below it.
"""

from engine_ext.repacks.infer import compose
from engine_ext.repacks.load_hook import Processing, RepackLearner

__all__ = ["Processing", "RepackLearner", "compose"]
