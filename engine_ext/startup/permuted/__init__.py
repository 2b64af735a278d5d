"""Learn what the engine's post-load processing moves.

A parameter's elements are replaced by the digits of their index, the engine's processing runs on a
copy of the module, and the result is a permutation or no repack (`learner`, `infer`).

Imports: `engine_ext.placement` and the rooms below it.
"""

from engine_ext.startup.permuted.infer import compose
from engine_ext.startup.permuted.learner import BeforeProcessing, Processing, RepackLearner
from engine_ext.startup.permuted.module_copy import ModuleCopy, loaded_tensors

__all__ = [
    "BeforeProcessing",
    "ModuleCopy",
    "Processing",
    "RepackLearner",
    "compose",
    "loaded_tensors",
]
