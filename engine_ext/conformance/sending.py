"""Send the deltas of one sync to the receivers of all ranks, as the HTTP side does."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from engine_ext.conformance.subject import Delta
from engine_ext.conformance.syncs import bits
from engine_ext.conformance.verified_file import verified_file
from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype
from engine_ext.errors import DeltaError
from engine_ext.format import ParamDelta, PartId, encode_part
from engine_ext.ranks.operations import (
    AbortSync,
    BeginPart,
    CommitSync,
    Operation,
    PollPart,
    PrepareSync,
)

Call = Callable[[Operation[Any]], Sequence[Any]]
"""Let every rank carry out an operation; returns each one's reply, or the error that it raised."""

_PART_BYTES: Final = 1 << 28  # of values, in one part
_POLL_S: Final = 0.0005


class Refused(Exception):
    """A receiver's answer in place of a write."""


def send(
    deltas: Sequence[Delta],
    call: Call,
    *,
    version: int = 1,
    base_version: int = 0,
    encoding: str = "deltas",
) -> None:
    """Stage all parts of a sync on every rank, and commit it.

    Raises:
        Refused: some rank has answered with an error. Nothing is staged any more.
    """
    sync_id = f"conformance-{version}"
    with tempfile.TemporaryDirectory(prefix="delta-conformance-") as folder:
        groups = list(_groups([_param(delta) for delta in deltas]))
        try:
            last = None
            for number, params in enumerate(groups):
                body = encode_part(
                    params,
                    encoding=encoding,
                    current_version=version,
                    base_version=base_version,
                    sync_id=sync_id,
                    part=number,
                    num_parts=len(groups),
                )
                identity, content = verified_file(body)
                path = Path(folder, f"{number}.part")
                path.write_bytes(content)
                last = PartId(
                    version=version,
                    base_version=base_version,
                    identity=identity,
                    sync_id=sync_id,
                    part=number,
                    num_parts=len(groups),
                )
                _stage(call, last, path)
            assert last is not None
            while not all(one.done for one in _asked(call, PrepareSync(part=last))):
                pass
            _asked(call, CommitSync(version=version, sync_id=sync_id))
        except Refused:
            call(AbortSync(version=version, sync_id=sync_id))
            raise


def _stage(call: Call, part: PartId, path: Path) -> None:
    _asked(call, BeginPart(part=part, path=str(path), now=0.0))
    while not all(one.done for one in _asked(call, PollPart(part=part))):
        time.sleep(_POLL_S)
    _asked(call, PrepareSync(part=part, keep=True))


def _asked(call: Call, request: Operation[Any]) -> list[Any]:
    """Return every rank's reply; Refused is raised with the first error of a rank."""
    answers = list(call(request))
    for answer in answers:
        if isinstance(answer, DeltaError):
            raise Refused(f"{type(answer).__name__}: {answer}") from answer
    return answers


def _groups(params: Sequence[ParamDelta]) -> Iterator[list[ParamDelta]]:
    """Yield the params of each part, which are of one dtype; an empty one if nothing is sent."""
    if not params:
        yield []
    for dtype in sorted({param.dtype for param in params}):
        group, size = list[ParamDelta](), 0
        for param in params:
            if param.dtype != dtype:
                continue
            if group and size + param.values.nbytes > _PART_BYTES:
                yield group
                group, size = [], 0
            group.append(param)
            size += param.values.nbytes
        yield group


def _param(delta: Delta) -> ParamDelta:
    dtype = NAME_OF_TORCH[delta.dtype]
    values = bits(delta.values).numpy().view(bits_dtype(dtype))
    indices = None if delta.indices is None else delta.indices.numpy()
    return ParamDelta(delta.name, dtype, delta.shape, indices, values)
