"""Tensors that an engine computes from weights and keeps.

`find` finds them and refuses the weights that they are made of, `later` those that an engine makes
once it generates; `proof` shows that the engine's own
function reproduces one bit for bit; `recompute` then runs it in the commit.

Imports: `engine_ext.placement` and the rooms below it.
"""

from engine_ext.startup.derived.find import find_derived, refuse_derived
from engine_ext.startup.derived.later import LaterCopies
from engine_ext.startup.derived.proof import prove, varied
from engine_ext.startup.derived.recompute import Recomputation, Recomputed, add_recomputed

__all__ = [
    "LaterCopies",
    "Recomputation",
    "Recomputed",
    "add_recomputed",
    "find_derived",
    "prove",
    "refuse_derived",
    "varied",
]
