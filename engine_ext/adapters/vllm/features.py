"""The supported versions of vLLM, and features that some of them lack.

Code that needs one of these features asks for it here, and not for a version.
"""

from __future__ import annotations

from typing import Any, Final

from engine_ext.adapters.versions import Feature, Versions

VERSIONS: Final = Versions("vLLM", ("0.31", "0.32", "0.33"), not_run=("0.33",))

REPLIES_OF_ALL: Final = Feature(
    what="replies of all data parallel replicas",
    owner="vllm.v1.engine.core_client:AsyncMPClient",
    name="call_utility_all_async",
    since="0.32",
    without="`--data-parallel-size` above 1 is refused: the first replica alone would answer",
)
CONSENSUS: Final = Feature(
    what="pause state and weight version that all replicas agree on",
    owner="vllm.v1.engine.core_client:AsyncMPClient",
    name="call_utility_consensus_async",
    since="0.32",
    without="the same",
)
RESET_WEIGHTS: Final = Feature(
    what="setting all weights to zero (`/weight_checker`, action `reset`)",
    owner="vllm.v1.worker.gpu_worker:Worker",
    name="reset_weights",
    since="0.32",
    without="no such change has to be noticed",
)
CHECKSUMS: Final = Feature(
    what="checksums of all weights (`/weight_checker`, action `checksum`)",
    owner="vllm.v1.worker.gpu_worker:Worker",
    name="compute_weight_checksums",
    since="0.32",
    without="the engine has none; `GET /delta_digest?scan=true` compares the weights",
)
FEATURES: Final = (REPLIES_OF_ALL, CONSENSUS, RESET_WEIGHTS, CHECKSUMS)

_TRANSFERS: Final = ("update_weights", "finish_weight_update")


def require_supported_version() -> None:
    """Refuse to start with another version of vLLM; ValueError."""
    import vllm

    VERSIONS.require(vllm.__version__)


def replicas_answer_together() -> bool:
    """Return whether the answers of all data parallel replicas can be read."""
    return REPLIES_OF_ALL.offered() and CONSENSUS.offered()


def may_span_hosts(parallel: Any) -> bool:
    """Return whether workers can be on other hosts than the server, by its `ParallelConfig`.

    Ray's placement is known only when they run.
    """
    return bool(parallel.nnodes > 1 or parallel.use_ray)


def weight_changes(*, own_transfer: bool = False) -> tuple[str, ...]:
    """Return the names of the worker's own methods that change weights.

    Args:
        own_transfer: whether the weight-transfer backend is this package's, which changes none.
    """
    transfers = () if own_transfer else _TRANSFERS
    resets = (RESET_WEIGHTS.name,) if RESET_WEIGHTS.offered() else ()
    return ("reload_weights", *transfers, *resets)
