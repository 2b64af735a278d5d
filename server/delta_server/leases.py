"""Leases that the ranks give to one HTTP process at a time."""

from __future__ import annotations

from collections.abc import Callable

from delta_server.commit import call_all_ranks
from delta_server.engine import Engine
from delta_server.process_identity import is_alive
from engine_ext.ranks.operations import LeaseGrant, Operation


async def acquire(engine: Engine, ask: Callable[[str | None], Operation[LeaseGrant]]) -> bool:
    """Return whether this process gets a lease, or has it already; a dead holder loses it.

    Args:
        ask: makes the request, given a process that is known to be dead, or None.
    """
    dead: str | None = None
    while True:
        [grant, *_] = await call_all_ranks(engine, ask(dead))
        if grant.granted:
            return True
        assert grant.holder is not None
        if is_alive(grant.holder):
            return False
        dead = grant.holder
