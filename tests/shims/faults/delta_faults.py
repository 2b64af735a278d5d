"""A plugin of either engine that makes things go wrong inside one rank, or shows its memory.

A file ``FAULT-RANK`` in the folder that ``DELTA_FAULTS`` names arms one fault of one rank; what the
rank is asked next takes the file away. Faults:

- ``fail_write``, ``fail_undo``: the next commit, or its undo, raises on this rank. A commit that
  fails has made one of its writes.
- ``stall_write``: the next commit hangs after one of its writes. A file ``stalled-RANK`` with the
  rank's process id says so.
- ``slow_write``: the next commit waits for a second before its writes; it leaves that file too.
- ``stall_answer``: the next commit hangs once every rank has committed, before this one says so; it
  leaves that file too.
- ``fail_rebuild``, ``stall_rebuild``: the engine's processing raises, or hangs, in the next rebuild
  of a module.
- ``other_bits``: it leaves other bits in a parameter than the engine's own code did.
- ``fail_stage``, ``stall_stage``, ``slow_stage``: the same of the next part's staging.
- ``repeat_stage``: the next part is staged again and again until there is a file ``enough-RANK``,
  which this takes away. A file ``staging-RANK`` says that it was staged once.
- ``raise_commit``: the next commit raises before it begins, where nothing should.
- ``flip_a_bit``: of one element of a live parameter, now, as a cosmic ray would. The file has the
  parameter's name and the element's offset.
- ``move_tensor``: a live parameter gets other memory with other values, now, as worker extensions
  give it. The file has the parameter's name.
- ``show_memory``: no fault. A file ``memory-RANK`` gets what the rank's process keeps, as JSON: see
  `_memory`.
- ``hash_model``: no fault. A file ``hashed-RANK`` gets a hash of every tensor that hangs on the
  model, also of those that no checksum of the engine's covers, as JSON by path; KV apart.

The file that ``DELTA_FAULTS_CLOCK`` names, if any, has the seconds by which the wall clock of every
process of the engine is wrong, as Python's code sees it. It can change.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def register() -> None:
    """Put the faults in; the engines call this in each of their processes."""
    from engine_ext.sync.receiver import Receiver

    original = Receiver.execute
    if hasattr(original, "faulty"):
        return
    if "DELTA_FAULTS_CLOCK" in os.environ:
        _set_clock(Path(os.environ["DELTA_FAULTS_CLOCK"]))

    def execute(receiver: Receiver, request: Any) -> Any:
        _arm(receiver)
        return original(receiver, request)

    execute.faulty = True  # type: ignore[attr-defined]
    Receiver.execute = execute  # type: ignore[method-assign, assignment]


def _set_clock(file: Path) -> None:
    """Let `time.time` and `time.time_ns` be wrong by what the file has, which is read at times."""
    real, real_ns = time.time, time.time_ns
    read_at, wrong_by = 0.0, 0.0

    def offset() -> float:
        nonlocal read_at, wrong_by
        if time.monotonic() > read_at + 0.1:
            read_at, wrong_by = time.monotonic(), float(file.read_text()) if file.exists() else 0.0
        return wrong_by

    time.time = lambda: real() + offset()
    time.time_ns = lambda: real_ns() + int(offset() * 1e9)


def _arm(receiver: Any) -> None:
    folder, rank = Path(os.environ["DELTA_FAULTS"]), receiver._ranks.rank
    applier = receiver._applier

    def armed(fault: str) -> str | None:
        file = folder / f"{fault}-{rank}"
        if not file.exists():
            return None
        text = file.read_text()
        file.unlink()
        return text

    def stall(seconds: float = 600) -> None:
        _leave(folder / f"stalled-{rank}", str(os.getpid()))
        time.sleep(seconds)

    if armed("fail_undo") is not None:
        _once(applier, "undo", _fail)
    if armed("fail_rebuild") is not None:
        _process_once(applier, lambda module: _fail())
    if armed("stall_rebuild") is not None:
        _process_once(applier, lambda module: stall())
    if armed("other_bits") is not None:
        _process_once(applier, _change)
    for method in ("write", "stage"):
        if armed(f"fail_{method}") is not None:
            _once(applier, method, _fail)
        if armed(f"stall_{method}") is not None:
            _once(applier, method, stall)
        if armed(f"slow_{method}") is not None:
            _late(applier, method, lambda: stall(1))
    if armed("repeat_stage") is not None:
        _repeat(receiver._staging, folder / f"staging-{rank}", folder / f"enough-{rank}")
    flip = armed("flip_a_bit")
    if flip is not None:
        name, offset = flip.split()
        _flip(applier, name, int(offset))
    move = armed("move_tensor")
    if move is not None:
        _move(applier, move)
    if armed("hash_model") is not None:
        _leave(folder / f"hashed-{rank}", json.dumps(_hashes(_live(applier))))
    if armed("show_memory") is not None:
        _leave(folder / f"memory-{rank}", json.dumps(_memory(receiver)))
    if armed("raise_commit") is not None:
        _raise_once(receiver)
    if armed("stall_answer") is not None:
        _then(receiver, stall)


def _leave(file: Path, text: str) -> None:
    """Write a file that is whole when it is there."""
    unfinished = file.with_suffix(".new")
    unfinished.write_text(text)
    unfinished.rename(file)


def _live(applier: Any) -> Any:
    """Return the live model, also where an unprocessed copy of it is written to."""
    return applier.post_load.model


def _hashes(model: Any) -> dict[str, str]:
    from engine_ext.model.fingerprint import hash_tensor
    from engine_ext.model.module_walk import reachable_tensors

    return {
        f"{path}.{attribute}": hash_tensor(tensor)
        for path, _, attribute, tensor in reachable_tensors(model)
        if not tensor.is_meta and attribute != "kv_cache"
    }


def _memory(receiver: Any) -> dict[str, Any]:
    """What this process keeps: its id, for its memory; spool files that it has mapped, threads,
    bytes of old values, staged parts, and the address of every tensor that hangs on the model."""
    from engine_ext.model.module_walk import reachable_tensors

    gc.collect()
    staging = receiver._staging
    maps = Path("/proc/self/maps").read_text()
    return {
        "pid": os.getpid(),
        "mapped": maps.count("delta-updates-spool-"),
        "threads": len(os.listdir("/proc/self/task")),
        "undo": sum(log.nbytes for log in receiver._undo),
        "staged": len(staging._parts) + sum(not future.done() for future in staging._running),
        "addresses": {
            f"{path}.{attribute}": tensor.data_ptr()
            for path, _, attribute, tensor in reachable_tensors(receiver._applier._places._model)
            if not tensor.is_meta
        },
    }


def _raise_once(receiver: Any) -> None:
    """Let the next commit of a receiver raise what is no error of the tree."""
    original = receiver.commit

    def commit(request: Any) -> None:
        receiver.commit = original
        raise RuntimeError("the commit went away")

    receiver.commit = commit


def _then(receiver: Any, last: Callable[[], None]) -> None:
    """Let this come after the next commit of a receiver."""
    original = receiver.commit

    def commit(request: Any) -> Any:
        receiver.commit = original
        reply = original(request)
        last()
        return reply

    receiver.commit = commit


def _fail() -> None:
    raise OSError("the memory went away")


def _flip(applier: Any, name: str, offset: int) -> None:
    from engine_ext.kernels.gather_scatter import bits_of

    bits_of(applier._places.index.by_name[name].flat())[offset] ^= 1


def _move(applier: Any, name: str) -> None:
    parameter = _live(applier).get_parameter(name)
    parameter.data = parameter.data.clone() + 1


def _process_once(applier: Any, then: Callable[[Any], None]) -> None:
    """Let this come after the engine's processing in the next rebuild."""
    rebuilds = {one: one.state for one in applier.post_load._by_path.values()}

    def process(module: Any, processing: Callable[[Any], None]) -> None:
        for one, state in rebuilds.items():
            one.state = state
        processing(module)
        then(module)

    for one, state in rebuilds.items():
        faulty = functools.partial(process, processing=state.process)
        one.state = dataclasses.replace(state, process=faulty)


def _change(module: Any) -> None:
    from engine_ext.placement import flat_bits

    for parameter in module.parameters():
        flat_bits(parameter)[0] ^= 1


def _late(applier: Any, method: str, first: Callable[[], None]) -> None:
    """Let this come before the next call of a method."""
    original = getattr(applier, method)

    def call(*arguments: Any) -> Any:
        setattr(applier, method, original)
        first()
        return original(*arguments)

    setattr(applier, method, call)


def _repeat(staging: Any, begun: Path, enough: Path) -> None:
    """Let the next part be read, decoded and staged until it is enough."""
    original = staging._stage

    def stage(*part: Any) -> Any:
        staging._stage = original
        staged = original(*part)
        _leave(begun, "")
        while not enough.exists():
            staged = original(*part)
        enough.unlink()
        return staged

    staging._stage = stage


def _once(applier: Any, method: str, then: Callable[[], None]) -> None:
    """Let the next call of a method make one write, if it is one that writes, and then this.

    Several parts might have got the method to stage them with before the first of them calls it.
    """
    from engine_ext.sync.totals import totals

    original = getattr(applier, method)
    left = [None]

    def call(staged: Any, *others: Any, **options: Any) -> Any:
        try:
            left.pop()
        except IndexError:
            return original(staged, *others, **options)
        setattr(applier, method, original)
        if method == "write":
            # A pipeline stage holds nothing of some parts.
            next(write for part in totals(staged).writes for write in part.all).put()
        then()
        return None

    setattr(applier, method, call)
