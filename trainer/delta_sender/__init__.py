"""Reference sender: compare a trainer's weights with what engines have, and send the changes.

It needs the core of `engine_ext` (no engine), httpx, tenacity and rich. In a trainer::

    with DeltaSender("http://engine:8000", base=checkpoint_tensors) as sender:
        for batch in data:
            train(batch)
            print(sender.sync(model.state_dict().items()).wire_bytes)

For several engines, of either kind, at once: `MultiSender`. As a program it sends the difference
between two Hugging Face checkpoints; see ``--help``.

The one rule: the snapshot is what the engine holds. It moves only once the engine has answered
that it committed, and by exactly the bytes sent. Whatever fails, the next sync sends all of it.
Of several engines, each is known by what it acknowledged: what one missed is kept until it has it.

The engine's plan, read before the first sync and before every full one, says which tensors the
engine ignores and which its digest covers. Ignored ones are left out of every sync. The digests
let engine and sender find out that they do not hold the same bytes.

What lies where: `sender_snapshot` compares (`sender_device` what lies on an accelerator),
`sender_spill` bounds what of that stays in memory,
`sender_step` hands what is read to whoever sends it, `sender_choice` says how a param travels,
`sender_http` posts, `sender_link` makes one engine's parts (`sender_parts`), `sender_outbox` posts
them beside that, `sender_log` writes them into a delta log, `sender_warm` compiles what they use,
`sender_standing` and `sender_state` keep what engines hold, now and over a restart,
`sender_engines` and `sender_one` have the two classes, `sender_cli` the program.
"""

from __future__ import annotations

from delta_sender.multi_sender import MultiSender
from delta_sender.results import PartialSyncError, SyncError, SyncReport
from delta_sender.sender import DeltaSender
from delta_sender.snapshot import NamedTensors

__all__ = [
    "DeltaSender",
    "MultiSender",
    "NamedTensors",
    "PartialSyncError",
    "SyncError",
    "SyncReport",
]
