"""SGLang's caches when weights change while requests keep their KV.

SGLang finds cached KV by a request's tokens and its `extra_key`. A salt in that key separates the
requests that compute all of their KV after the change from those in flight: these keep their key,
and what they add to the cache is never found by the others. Old KV that nobody uses ages out. Image
embeddings are dropped, which SGLang's own flush does not do.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from engine_ext.errors import SaltUnavailable

# Interpolated position embeddings by the size of the image, and how often each was used: in the
# vision towers of Kimi and PaddleOCR.
_BY_SIZE = ("_interpolated_pos_emb_cache", "cache_position_embedding", "cache_position_count")


def check_salt() -> None:
    """Raise `SaltUnavailable` if this engine keeps old KV for requests to come, whatever its key.

    Streaming sessions keep KV for their next turn. Call it in any process of the engine.
    """
    from sglang.srt.runtime_context import get_serving

    if get_serving().enable_streaming_session:
        raise SaltUnavailable(
            "flush_cache=salt does not work with --enable-streaming-session: a session keeps KV of "
            "old weights for its next turn; use flush_cache=true"
        )


class Salts:
    """The salt of new requests in one scheduler's process; none at first."""

    def __init__(self) -> None:
        self._salt: str | None = None

    def follow(self, request_type: Any) -> None:
        """Give every request that is made from now on, and can use the cache, the salt of then."""
        init_now = request_type.__init__

        @functools.wraps(init_now)
        def init(request: Any, *args: Any, **kwargs: Any) -> None:
            init_now(request, *args, **kwargs)
            request.delta_extra_key = request.extra_key
            self._add(request)

        init.delta_updates = True  # type: ignore[attr-defined]
        request_type.__init__ = init

    def change(self, salt: str, scheduler: Any) -> None:
        """Use another salt, also for the requests that wait and hold no KV.

        Call it after `check_salt`, while the scheduler is paused.
        """
        self._salt = salt
        diffusion = getattr(scheduler, "dllm_manager", None)
        for request in (
            *scheduler.waiting_queue,
            *scheduler.grammar_manager.grammar_queue,
            *getattr(diffusion, "waiting_queue", ()),
        ):
            if not request.kv.holds_kv:
                self._add(request)

    def _add(self, request: Any) -> None:
        if self._salt is not None:
            request.extra_key = f"{self._salt}:{request.delta_extra_key or ''}"


SALTS = Salts()


def install() -> None:
    """Salt the requests of this process, and let its paused scheduler flush the cache.

    It is safe to call it more than once.
    """
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    if not hasattr(Req.__init__, "delta_updates"):
        SALTS.follow(Req)
        flush_beside_grammars(Scheduler)


def flush_beside_grammars(scheduler_type: Any) -> None:
    """Let a paused scheduler flush its cache while grammars of requests are compiled.

    SGLang refuses that, and a paused scheduler does not take the compiled ones. Those requests
    hold no KV.
    """
    flush_now = scheduler_type.flush_cache

    @functools.wraps(flush_now)
    def flush(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        manager = scheduler.grammar_manager
        if not scheduler._engine_paused or not manager.grammar_queue:
            return flush_now(scheduler, *args, **kwargs)
        compiled, manager.grammar_queue = manager.grammar_queue, []
        try:
            return flush_now(scheduler, *args, **kwargs)
        finally:
            manager.grammar_queue = compiled

    scheduler_type.flush_cache = flush


def drop_image_embeddings(model: torch.nn.Module) -> None:
    """Forget all image embeddings of this process; requests in flight compute theirs again.

    They can: a request keeps its processed images until it ends. Call it in the scheduler's thread,
    where no forward pass runs meanwhile.
    """
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
    for module in model.modules():
        for name in _BY_SIZE:
            getattr(module, name, {}).clear()
