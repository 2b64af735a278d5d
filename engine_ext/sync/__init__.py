"""One rank: stage parts, commit them with the other ranks, undo, and check live memory.

`make_receiver` (`assemble`) makes the `receiver` of a loaded model, which `engine_ext.startup` has
planned. The receiver carries out the operations of `engine_ext.ranks.operations`: `sync_state`
decides which parts are admitted, `background_staging` stages them in threads, `delta_applier` turns
them into staged writes (`stager`, the tables, `staged`), whose sums the commit needs (`totals`,
`digest_table`, `writes`), and `transaction` commits them with a vote of all ranks (`consensus`), or
undoes them; `disposer` frees what is left. `post_load` follows what the engine computes from loaded
weights; `masked` writes through the engine's own loader. `initial_sync` serves an engine without a
checkpoint, `scrubber` compares live memory with the digest, and `adapter_receivers` serve LoRA
adapters.

Imports: every room of `engine_ext` below the adapters. Never an engine, never the HTTP side.
"""

from engine_ext.sync.adapter_receivers import AdapterReceivers, AdapterStore
from engine_ext.sync.assemble import make_receiver
from engine_ext.sync.background_staging import BackgroundStaging
from engine_ext.sync.delta_applier import DeltaApplier
from engine_ext.sync.masked import apply_masked
from engine_ext.sync.receiver import Receiver
from engine_ext.sync.staged import StagedPart, UndoLog

__all__ = [
    "AdapterReceivers",
    "AdapterStore",
    "BackgroundStaging",
    "DeltaApplier",
    "Receiver",
    "StagedPart",
    "UndoLog",
    "apply_masked",
    "make_receiver",
]
