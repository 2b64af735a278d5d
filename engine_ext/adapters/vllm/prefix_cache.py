"""vLLM's prefix cache when weights change while requests keep their KV.

An engine core finds cached blocks by hashes, each of a block's tokens and of the hash before it. So
it forgets the hashes of all blocks, and gives new ones to the requests that hold blocks: what they
fill from now on was computed from KV of old weights, and no other request must get it. Nothing is
copied, freed or recomputed; a block whose last request ends is free.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from typing import Any, Final

from engine_ext.errors import Conflict

_HELD_KV: Final = "Failed to reset KV cache even when all the running requests are preempted"


def drop(core: Any) -> None:
    """Drop all KV and image embeddings of a paused engine core; kept requests are recomputed.

    Not the caches of processed images. These do not depend on the weights, and a request that
    arrives meanwhile would fail: the front end expects its image in the engine's cache.

    Raises:
        Conflict: a request holds KV that vLLM does not take from it.
        RuntimeError: the cache could not be reset.
    """
    try:
        done = core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except RuntimeError as error:
        if _HELD_KV not in str(error):
            raise
        raise Conflict(
            "a request holds KV that vLLM does not drop, such as one that waits for more input (a "
            "realtime session); send the sync again when it has ended, or with flush_cache=salt"
        ) from error
    if not done:
        raise RuntimeError("vLLM did not reset its prefix cache")
    core.reset_encoder_cache()


def salt(core: Any) -> None:
    """Let no request get cached KV or image embeddings that others have; requests keep their own.

    The core's scheduler is paused, and no forward pass runs. A request that is preempted later
    computes all of its KV with the weights of then. One that is in the middle of an image computes
    the image's embeddings again.
    """
    from vllm.v1.request import RequestStatus

    for request in core.scheduler.requests.values():
        # The others wait with no KV, or will compute theirs again.
        if request.num_computed_tokens > 0 or request.status == RequestStatus.RUNNING:
            request.cache_salt = f"{request.cache_salt or ''}:{uuid.uuid4().hex}"
            request.block_hashes.clear()
            request.update_block_hashes()
    coordinator = core.scheduler.kv_cache_manager.coordinator
    managers = (coordinator, *coordinator.single_type_managers)
    for pool in {id(one.block_pool): one.block_pool for one in managers}.values():
        pool.evict_blocks({one.block_id for one in pool.blocks if one.block_hash is not None})
    core.scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()


def forget_pooled_rows(runner: Any) -> None:
    """Let preempted requests of a pooling model begin again without the rows that they have.

    vLLM's first model runner keeps the rows of earlier chunks, which are of old weights then, and
    would return them with the new ones. Call it once per runner.
    """
    update: Callable[[Any], Any] | None = getattr(runner, "_update_states", None)
    if update is None or not getattr(runner, "is_pooling_model", False):
        return

    @functools.wraps(update)
    def updated(output: Any) -> Any:
        for request in output.scheduled_cached_reqs.resumed_req_ids:
            states = getattr(runner.requests.get(request), "pooling_states", None)
            if states is not None:
                states.clean()
        return update(output)

    runner._update_states = updated
