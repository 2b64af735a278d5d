"""The HTTP side of delta updates, the same for every engine.

Endpoints (`routes`) and other sources take parts in (`intake`) and submit them to the
`coordinator`, which stages them on all ranks (`staging`) and commits (`commit`); replay of a delta
log (`log_replay`); an engine adapter implements `Engine`.

Imports: `engine_ext.format`, `engine_ext.log` and the ground floor; never the receiver, an
adapter, or `delta_sender`.
"""

from delta_server.commit import EngineCommitter, serialize_with_commits
from delta_server.engine import Engine
from delta_server.routes import attach
from delta_server.service import DeltaService
from delta_server.sources.pulls import is_pulled

__all__ = [
    "DeltaService",
    "Engine",
    "EngineCommitter",
    "attach",
    "is_pulled",
    "serialize_with_commits",
]
