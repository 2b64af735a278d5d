"""A weight update by an engine's own transfer API: it starts, brings parts, and finishes.

The parts are staged as if they were posted; finishing commits them. Such an API has one trainer, so
one HTTP process keeps the state of the update: it must serve the engine alone.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from delta_server.request_options import DiskRequest, Flush, Options
from delta_server.request_record import RequestRecord
from delta_server.sources import Inlet, deliver
from delta_server.sources.files import Files
from delta_server.sources.push import SinglePart, received
from delta_server.waiting import held_by_thread
from engine_ext.errors import Conflict, MalformedPart, TooLarge
from engine_ext.format import PartId
from engine_ext.structs import prepare

MAX_INLINE_BYTES: Final = 32 << 20  # of a part; larger ones go by path or by a collective
MAX_REQUEST_BYTES: Final = MAX_INLINE_BYTES // 3 * 4 + (1 << 20)
_READ_BYTES: Final = 1 << 20


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of parts: exactly one of `part`, `model_path` and `broadcast_bytes` is given.

    `weight_version`, `base_version`, `pause_mode`, `flush_cache` and `reason` are as in a disk
    request.
    """

    part: str | None = None  # one part, in base64
    model_path: str | None = None  # a folder below a --delta-root
    files: list[str] | None = None  # names in it; None: all of its ``*.safetensors``
    broadcast_bytes: int | None = None  # size of a part that the trainer broadcasts meanwhile
    signature: str | None = None  # of `part`, or of the part that is broadcast
    weight_version: str | int | None = None
    base_version: str | int | None = None
    pause_mode: str | None = None
    flush_cache: Flush | None = None
    reason: str | None = None

    def disk_request(self) -> DiskRequest:
        """Return what is also a key of a disk request."""
        keys = {key: getattr(self, key) for key in Options.__struct_fields__}
        return DiskRequest(model_path=self.model_path or "", files=self.files, **keys)


prepare(UpdateInfo)


def parse_update_info(given: Any) -> UpdateInfo:
    """Return what an API's caller has given, validated.

    Raises:
        MalformedPart: it has unknown keys or other types, or brings no part or several.
    """
    try:
        info = msgspec.convert(given, UpdateInfo)
    except (msgspec.ValidationError, RecursionError) as error:
        raise MalformedPart(f"bad update_info: {error}") from error
    sources = (info.part, info.model_path, info.broadcast_bytes)
    if sum(source is not None for source in sources) != 1:
        raise MalformedPart("update_info needs one of part, model_path and broadcast_bytes")
    if info.broadcast_bytes is not None and info.broadcast_bytes < 1:
        raise MalformedPart(f"broadcast_bytes is {info.broadcast_bytes}")
    return info


class WeightTransfer:
    """The weight updates of one engine, one at a time.

    Every method raises `DeltaError`. An update ends with the first error: what it had staged is
    dropped, and the weights are unchanged, unless the error's class says something else.

    Args:
        receive: lets the engine write a part of so many bytes, which the trainer broadcasts, into a
            new file.
    """

    def __init__(
        self,
        inlet: Inlet,
        receive: Callable[[Path, int], Awaitable[None]],
    ) -> None:
        self._inlet, self._receive = inlet, receive
        self._lock = asyncio.Lock()
        self._is_open = False
        self._staged: PartId | None = None  # the last part that must be committed
        self._version: int | None = None  # that the update leads to
        self._options = Options()

    async def start(self) -> None:
        """Begin an update. One that was not finished ends: its trainer has started again."""
        self._inlet.refuse_pushes()
        async with self._lock:
            await self._end()
            self._is_open = True

    async def update(self, given: Any) -> dict[str, Any]:
        """Stage the parts that an ``update_info`` brings; return the last one's answer as JSON."""
        async with self._lock, self._ending_on_error():
            record = RequestRecord(commits=False)
            async with self._inlet.coordinator.reporter.follow(record):
                self._check_open()
                info = parse_update_info(given)
                options = info.disk_request().options({})
                with self._inlet.upload_slots.one():
                    answer = await self._stage(info, options, record)
            self._options, self._version = options, answer["version"]
            if answer["status"] != "already_applied":
                self._staged = record.parts[-1]
            return answer

    async def finish(self, version: str | None = None) -> dict[str, Any] | None:
        """Commit what is staged; return the answer as JSON, or None if there was nothing to commit.

        Args:
            version: what the caller takes the new weights' version for.

        Raises:
            Conflict: no update has begun, parts are missing, or the update does not lead to
                `version`; the engine is unchanged.
        """
        async with self._lock, self._ending_on_error():
            self._check_open()
            leads_to = self._version
            if leads_to is None:
                leads_to = (await self._inlet.coordinator.held()).version
            if version is not None and version != str(leads_to):
                raise Conflict(
                    f"the update leads to version {leads_to}, not {version[:40]!r}",
                    expected=str(leads_to),
                )
            answer = None
            if self._staged is not None:
                record = RequestRecord()
                answer = await self._inlet.coordinator.commit_staged(
                    self._staged, self._options, record
                )
                self._staged = None
            await self._end()
            return answer

    async def _stage(
        self, info: UpdateInfo, options: Options, record: RequestRecord
    ) -> dict[str, Any]:
        inlet = self._inlet
        if info.model_path is not None:
            found = inlet.store_files.resolved(info.disk_request())
            return await deliver(Files(inlet, found, options, record))
        async with contextlib.AsyncExitStack() as stack:
            if info.part is not None:
                body = await asyncio.to_thread(_decoded, info.part)
                chunks, size = _pieces(body), len(body)
            else:
                assert info.broadcast_bytes is not None
                size = info.broadcast_bytes
                stack.enter_context(_naming_the_collective())
                path = await stack.enter_async_context(self._broadcast(size))
                chunks = _read(path)
            arriving = received(inlet, chunks, size, info.signature, record)
            return await deliver(SinglePart(inlet, arriving, options, record))

    @contextlib.asynccontextmanager
    async def _broadcast(self, size: int) -> AsyncIterator[Path]:
        """Let the engine receive a broadcast; the file with its bytes is removed afterwards."""
        limit = self._inlet.settings.max_body_bytes
        if size > limit:
            raise TooLarge.of_part(f"the part has {size} bytes", limit)
        make = partial(self._inlet.intake.scratch, "delta-broadcast-", size)
        async with held_by_thread(make) as folder:
            path = Path(folder) / "broadcast"
            await self._receive(path, size)
            yield path

    def _check_open(self) -> None:
        if not self._is_open:
            raise Conflict("no weight update has begun, or it has ended with an error: start one")

    @contextlib.asynccontextmanager
    async def _ending_on_error(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                await self._end()
            raise

    async def _end(self) -> None:
        staged, self._staged = self._staged, None
        self._is_open, self._version = False, None
        if staged is not None:
            await self._inlet.coordinator.drop_staged(staged)


@contextlib.contextmanager
def _naming_the_collective() -> Iterator[None]:
    """Say of bytes that are no part that they might be another trainer's.

    Who joins the group last is its member, and a request takes what comes next over it.
    """
    try:
        yield
    except MalformedPart as error:
        message = (
            "what came over the collective is not the part that this request announces; does "
            f"another trainer send to this engine? ({error.message})"
        )
        raise type(error)(message, **error.operands) from error


def _decoded(text: str) -> bytes:
    try:
        body = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedPart(f"the part is not base64: {error}") from error
    if len(body) > MAX_INLINE_BYTES:
        raise TooLarge(f"the inline part has {len(body)} bytes", limit=MAX_INLINE_BYTES)
    return body


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _READ_BYTES):
        yield body[start : start + _READ_BYTES]


async def _read(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := await asyncio.to_thread(file.read, _READ_BYTES):
            yield chunk
