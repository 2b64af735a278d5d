"""Run a function in several processes that form a gloo group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

Outcomes = list[Any]

# Forked from a process that has them: importing takes each rank longer than its test.
_IMPORTED_ONCE: Final = [
    "torch.distributed.fsdp",
    "peft",
    "numba",
    "tests.support.trainer_models",
    "tests.support.sharded_trainers",
]


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    folder: Path,
    *arguments: Any,
    limit: float = 120,
    timeout: float = 60,
) -> Outcomes:
    """Return, for every rank, what ``function(rank, *arguments)`` returned or its error's text.

    None for a rank that died. Fails if a process has not ended after `limit` seconds. A collective
    of the group fails after `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    processes = [
        context.Process(target=_run, args=(function, rank, ranks, str(folder), arguments, timeout))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    assert not hanging, f"{len(hanging)} ranks hang"
    paths = [folder / f"outcome-{rank}" for rank in range(ranks)]
    return [torch.load(path) if path.exists() else None for path in paths]


def _run(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    folder: str,
    arguments: tuple[Any, ...],
    timeout: float,
) -> None:
    # As torchrun sets them: accelerate looks at them, though the group is there already.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    outcome: Any
    try:
        outcome = function(rank, *arguments)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    torch.save(outcome, f"{folder}/outcome-{rank}.tmp")
    os.replace(f"{folder}/outcome-{rank}.tmp", f"{folder}/outcome-{rank}")
    os._exit(0)  # no farewell to ranks that might be gone
