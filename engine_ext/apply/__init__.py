"""Stage and commit parts on one rank.

A part becomes staged writes (`stager`, `staged`), which `delta_applier` carries out: `scatter` into
live memory or `masked` through the engine's loader; `initial_sync` serves an engine without a
checkpoint. `transaction` commits, votes with the other ranks (`consensus`) and undoes.

Imports: `engine_ext.tracing`, `engine_ext.derived`, `engine_ext.placement` and the rooms below.
"""

from engine_ext.apply.applier import Applier
from engine_ext.apply.delta_applier import DeltaApplier, Writer
from engine_ext.apply.initial_sync import CheckpointReader, InitialSyncApplier, Reload, Traced
from engine_ext.apply.masked import MaskedWriter, apply_masked
from engine_ext.apply.moved_tensors import TraceAgain
from engine_ext.apply.rebuilds import Rebuilds
from engine_ext.apply.scatter import ScatterWriter
from engine_ext.apply.staged import StagedPart, UndoLog
from engine_ext.apply.transaction import Transaction

__all__ = [
    "Applier",
    "CheckpointReader",
    "DeltaApplier",
    "InitialSyncApplier",
    "MaskedWriter",
    "Rebuilds",
    "Reload",
    "ScatterWriter",
    "StagedPart",
    "TraceAgain",
    "Traced",
    "Transaction",
    "UndoLog",
    "Writer",
    "apply_masked",
]
