"""The HTTP side of delta updates, the same for every engine.

The rooms, from the request down; each imports only from those below it:

====================  ==============================================================================
`routes`, `guards`    endpoints; ASGI apps in front of the engine's own
`service`             what the endpoints of one engine share
`sources`             the ways in: each yields verified parts and completes what they say
`coordinator`         who can change the weights, when, and whether
`staging`             brings verified parts to all ranks
`commit`              pauses, commits or rolls back on all ranks, publishes, resumes
`intake`              from bytes to a verified part, in a file of the `spool`
====================  ==============================================================================

An engine adapter implements `Engine`.

Imports: `engine_ext.format`, `engine_ext.log` and the ground floor; never the receiver, an
adapter, or `delta_sender`.
"""

from delta_server.commit import EngineCommitter, serialize_with_commits
from delta_server.engine import Engine
from delta_server.routes import attach
from delta_server.service import DeltaService
from delta_server.sources.pulls import PULLED, find_pulled

__all__ = [
    "PULLED",
    "DeltaService",
    "Engine",
    "EngineCommitter",
    "attach",
    "find_pulled",
    "serialize_with_commits",
]
