"""vLLM's own KV cache manager, salted while requests hold blocks."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from engine_ext.adapters.vllm import prefix_cache
from engine_ext.errors import Conflict
from tests.support.lazy_modules import LazyModule

VLLM = LazyModule("vllm")
HASHING = LazyModule("vllm.utils.hashing")
KV_CACHE = LazyModule("vllm.v1.kv_cache_interface")
KV_CACHE_MANAGER = LazyModule("vllm.v1.core.kv_cache_manager")
KV_CACHE_UTILS = LazyModule("vllm.v1.core.kv_cache_utils")
POOLING = LazyModule("vllm.v1.pool.metadata")
METHODS = "vllm.model_executor.layers.pooler.tokwise.methods"
POOLING_METHODS = LazyModule(METHODS)
REQUEST = LazyModule("vllm.v1.request")

BLOCK = 4
PROMPT = list(range(1, 14))  # three blocks and one token


class Core:
    """An engine core as `prefix_cache.salt` uses it; its scheduler runs what it is given."""

    def __init__(self, *, caching: bool = True) -> None:
        KV_CACHE_UTILS.init_none_hash(HASHING.sha256)
        spec = KV_CACHE.FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KV_CACHE.KVCacheConfig(
            num_blocks=32,
            kv_cache_tensors=[],
            kv_cache_groups=[KV_CACHE.KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=spec)],
        )
        self.manager = KV_CACHE_MANAGER.KVCacheManager(
            config, 256, BLOCK, BLOCK, enable_caching=caching
        )
        self.requests: dict[str, Any] = {}
        self.dropped = 0
        self.scheduler = SimpleNamespace(
            requests=self.requests,
            kv_cache_manager=self.manager,
            reset_encoder_cache=self._drop,
        )
        self.model_executor = SimpleNamespace(reset_encoder_cache=self._drop)

    def _drop(self) -> None:
        self.dropped += 1

    def add(self, name: str, tokens: list[int] = PROMPT, salt: str | None = None) -> Any:
        """Add a request that waits."""
        request = REQUEST.Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=VLLM.SamplingParams(max_tokens=64),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=KV_CACHE_UTILS.get_request_block_hasher(BLOCK, HASHING.sha256),
        )
        self.requests[name] = request
        return request

    def prefill(self, request: Any) -> int:
        """Run a request's prompt; return how many tokens came from the cache."""
        blocks, cached, *_ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - cached
        assert self.manager.allocate_slots(request, new, cached, blocks) is not None
        request.status = REQUEST.RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        return cached

    def decode(self, request: Any, tokens: list[int]) -> None:
        for token in tokens:
            request.append_output_token_ids(token)
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1

    def end(self, request: Any) -> None:
        self.manager.free(request)
        del self.requests[request.request_id]

    def blocks(self, request: Any) -> list[int]:
        [found] = self.manager.get_block_ids(request.request_id)
        return found


@pytest.fixture
def core() -> Core:
    return Core()


def test_new_requests_get_no_block_of_before(core: Core) -> None:
    ended, flying = core.add("ended"), core.add("flying")
    assert core.prefill(ended) == 0
    assert core.prefill(flying) == 3 * BLOCK
    core.end(ended)
    held = core.blocks(flying)
    prefix_cache.salt(core)
    assert core.dropped == 2
    assert core.blocks(flying) == held
    assert flying.num_computed_tokens == len(PROMPT)
    assert core.prefill(core.add("new")) == 0
    # The new request's own blocks are shared as ever.
    assert core.prefill(core.add("newer")) == 3 * BLOCK


def test_nothing_that_a_request_in_flight_adds_is_shared(core: Core) -> None:
    """Its later blocks were computed from KV of old weights, though after the change."""
    flying = core.add("flying")
    core.prefill(flying)
    prefix_cache.salt(core)
    core.decode(flying, list(range(50, 70)))
    whole = list(flying.all_token_ids)
    assert core.prefill(core.add("new")) == 0  # the same first blocks, of new weights
    assert core.prefill(core.add("longer", [*whole, 99])) == 3 * BLOCK
    core.end(flying)
    assert core.prefill(core.add("after", [*whole, 98])) > 3 * BLOCK  # those of "longer"


def test_a_request_that_waits_shares_what_is_new(core: Core) -> None:
    core.prefill(core.add("flying"))
    waiting = core.add("waiting")
    prefix_cache.salt(core)
    assert core.prefill(core.add("new")) == 0
    assert core.prefill(waiting) == 3 * BLOCK


def test_a_preempted_request_computes_its_kv_again(core: Core) -> None:
    flying = core.add("flying")
    core.prefill(flying)
    prefix_cache.salt(core)
    core.decode(flying, [50, 51, 52, 53])
    core.manager.free(flying)
    flying.status, flying.num_computed_tokens = REQUEST.RequestStatus.PREEMPTED, 0
    assert core.prefill(flying) == 0


def test_salting_again_separates_again(core: Core) -> None:
    flying = core.add("flying", salt="mine")
    core.prefill(flying)
    for _ in range(3):
        prefix_cache.salt(core)
        assert core.prefill(core.add("new", salt="mine")) == 0
        core.end(core.requests["new"])
    core.end(flying)
    pool = core.manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_without_a_prefix_cache_nothing_breaks() -> None:
    core = Core(caching=False)
    flying = core.add("flying")
    core.prefill(flying)
    prefix_cache.salt(core)
    core.decode(flying, list(range(50, 60)))
    assert core.prefill(core.add("new")) == 0


HELD = "Failed to reset KV cache even when all the running requests are preempted and moved"


@pytest.mark.parametrize(
    ("outcome", "error"),
    [(True, None), (False, RuntimeError), (HELD, Conflict), ("another", RuntimeError)],
)
def test_flush_drops_only_caches_computed_from_weights(
    outcome: bool | str, error: type[Exception] | None
) -> None:
    """Processed images stay: the front end believes that the engine has those that it has sent."""
    asked: list[Any] = []

    def reset_prefix_cache(**options: Any) -> bool:
        asked.append(options)
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return outcome

    core = SimpleNamespace(
        reset_prefix_cache=reset_prefix_cache,
        reset_encoder_cache=lambda: asked.append("embeddings"),
    )
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        prefix_cache.drop(core)
    assert asked[0] == {"reset_running_requests": True, "reset_connector": True}
    assert asked[1:] == (["embeddings"] if error is None else [])


def test_preempted_prompt_gives_one_row_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own pooling of chunks; between two of them, a sync makes the request begin again."""
    scheduler = SimpleNamespace(enable_chunked_prefill=True, async_scheduling=False)
    config = SimpleNamespace(scheduler_config=scheduler)
    monkeypatch.setattr(f"{METHODS}.get_current_vllm_config", lambda: config)
    pool = POOLING_METHODS.AllPool()
    states = POOLING.PoolingStates()

    def chunk(tokens: int, weights: float, *, finished: bool) -> Any:
        cursor = SimpleNamespace(
            num_scheduled_tokens_cpu=torch.tensor([tokens]), get_finished_mask=lambda: [finished]
        )
        metadata: Any = SimpleNamespace(get_pooling_cursor=lambda: cursor, pooling_states=[states])
        return pool.forward(torch.full((tokens, 2), weights), metadata)

    class Runner:
        is_pooling_model = True
        requests: ClassVar = {"a": SimpleNamespace(pooling_states=states)}
        steps = 0

        def step(self, *resumed: str) -> None:
            cached = SimpleNamespace(resumed_req_ids={*resumed})
            self._update_states(SimpleNamespace(scheduled_cached_reqs=cached))

        def _update_states(self, output: Any) -> None:
            self.steps += 1

    runner = Runner()
    prefix_cache.forget_pooled_rows(runner)
    chunk(4, 1.0, finished=False)
    runner.step("a", "gone")
    chunk(4, 2.0, finished=False)
    runner.step()
    [rows] = chunk(2, 2.0, finished=True)
    assert rows[:, 0].tolist() == [2.0] * 6
    assert runner.steps == 2
