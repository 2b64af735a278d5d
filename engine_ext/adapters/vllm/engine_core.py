"""One call of the front end to an engine core of vLLM: stop and write, or publish and resume.

The front end calls the methods by name, as it calls vLLM's own utilities. A core carries them out
in its loop, where no step runs, and answers the first one when it has come to rest.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any, Final

import msgspec

from engine_ext.adapters.vllm import prefix_cache
from engine_ext.errors import Conflict, as_delta_error
from engine_ext.ranks.operations import Stop

# The names of an engine core's methods.
CALL_STOPPED: Final = "delta_call_stopped"
PUBLISH: Final = "delta_publish"


def install() -> None:
    """Give the engine cores of this process the methods; safe to call more than once."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, CALL_STOPPED, call_stopped)
    setattr(EngineCore, PUBLISH, publish)


def call_stopped(
    core: Any, flush_cache: bool | str, operation: str, arguments: dict[str, Any]
) -> dict[str, Any] | Future[dict[str, Any]]:
    """Stop scheduling, and carry out an encoded operation on the core's workers.

    In between, the caches are treated as `flush_cache` says, see `delta_server.engine.Engine`. If
    stopping or that fails, the workers get the operation with the reason, to refuse it: those of
    other replicas might wait for their vote.

    Returns:
        ``stop``, as JSON of `Stop`, and ``answers``, the workers' answers in rank order; at once,
        or when the step that runs has ended.
    """
    begun = time.perf_counter()
    # Who asked might be gone when the core has stopped: then another call can have stopped it
    # again, and written, before this one's turn comes.
    core.delta_updates_turn = turn = object()

    def carry_out(stopping: Future[None]) -> dict[str, Any]:
        stopped, refusal = time.perf_counter(), None
        try:
            stopping.result()
            if core.delta_updates_turn is not turn or not core.is_scheduler_paused():
                raise Conflict("generation was resumed before it had stopped")
            _treat_caches(core, flush_cache)
        except Exception as error:
            refusal = as_delta_error(error).to_wire()
            arguments["refusal"] = refusal
        stop = Stop(
            stop_ms=(stopped - begun) * 1e3,
            caches_ms=(time.perf_counter() - stopped) * 1e3,
            refusal=refusal,
        )
        answers = core.collective_rpc("delta_updates", args=(operation, arguments))
        return {"stop": msgspec.to_builtins(stop), "answers": answers}

    stopping = _stopping(core)
    if stopping.done():
        return carry_out(stopping)
    answer = Future[dict[str, Any]]()

    def finish(stopping: Future[None]) -> None:
        try:
            answer.set_result(carry_out(stopping))
        except Exception as error:  # a worker is gone
            answer.set_exception(error)

    stopping.add_done_callback(finish)
    return answer


def publish(core: Any, version: str | None, resumes: bool) -> None:
    """Set the weight version, unless it is None, then resume scheduling if `resumes`."""
    if version is not None:
        core.set_weight_version(version)
    if resumes:
        core.resume_scheduler()


def _stopping(core: Any) -> Future[None]:
    """Pause a core's scheduler with its requests kept; return what is done when it has stopped."""
    stopped = Future[None]()
    try:
        # Without vLLM's own clearing of caches, see `prefix_cache.drop`.
        stopping: Future[None] | None = core.pause_scheduler("keep", False)
        if stopping is not None:
            return stopping
        stopped.set_result(None)
    except Exception as error:
        stopped.set_exception(error)
    return stopped


def _treat_caches(core: Any, flush_cache: bool | str) -> None:
    if flush_cache == "salt":
        prefix_cache.salt(core)
    elif flush_cache:
        prefix_cache.drop(core)
