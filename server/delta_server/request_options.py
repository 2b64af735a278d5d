"""Options of requests: query parameters and JSON bodies, validated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from engine_ext.errors import MalformedPart
from engine_ext.format import MAX_VERSION, RunSender, check_run, optional_version
from engine_ext.structs import prepare

_T = TypeVar("_T")
# In Python, a dollar alone would let a newline follow; the published schema has these, too.
_PEER = Annotated[str, msgspec.Meta(pattern=r"^https?://[\x21-\x7e]{1,500}$(?!\n)")]
PAUSE_MODES = ("keep", "wait", "abort")
Flush = bool | Literal["salt"]
_FLUSHES: Final[dict[str, Flush]] = {"true": True, "false": False, "salt": "salt"}
# Once all of it is staged; or it stays staged, and is committed by ``POST /delta_commit``.
COMMITS = ("complete", "hold")
_REASON: Final = re.compile(r"[\x20-\x7e]{1,200}")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The query parameters of an update, or the same keys of a disk request."""

    weight_version: int | None = None  # None: that in the part's metadata
    base_version: int | None = None
    pause_mode: str = "keep"  # what happens to requests in flight, one of `PAUSE_MODES`
    # Whether cached KV of the old weights is dropped; "salt": requests in flight keep theirs, and
    # no other request gets any of it.
    flush_cache: Flush = True
    reason: str | None = None  # why the sync is full, if it is


class DiskRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of a disk request; unknown keys are ignored.

    The keys of `Options`, ``adapter`` and ``commit`` can be here or in the query string.
    """

    model_path: str
    files: list[str] | None = None
    load_format: str | None = None
    weight_version: str | int | None = None
    base_version: str | int | None = None
    pause_mode: str | None = None
    flush_cache: Flush | None = None
    reason: str | None = None
    adapter: str | None = None
    commit: str | None = None

    def options(self, query: Mapping[str, str]) -> Options:
        """Return the options in this body and in the request's query string, merged.

        Raises:
            MalformedPart: a value is invalid, or the two disagree.
        """
        merged = {key: query[key] for key in Options.__struct_fields__ if key in query}
        for key in Options.__struct_fields__:
            value = getattr(self, key)
            if value is None:
                continue
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if merged.setdefault(key, text) != text:
                raise MalformedPart(f"{key} is {text!r} in the body, {merged[key]!r} in the query")
        return parse_query(merged)


def parse_query(query: Mapping[str, str]) -> Options:
    """Return the options in a query string; other parameters are ignored.

    Raises:
        MalformedPart: a value is invalid.
    """
    flush = query.get("flush_cache", "true").lower()
    if flush not in _FLUSHES:
        raise MalformedPart(f"flush_cache must be true, false or salt, not {flush!r}")
    pause_mode = query.get("pause_mode", "keep")
    if pause_mode not in PAUSE_MODES:
        known = ", ".join(PAUSE_MODES)
        raise MalformedPart(f"pause_mode must be one of {known}, not {pause_mode!r}")
    reason = query.get("reason")
    if reason is not None and _REASON.fullmatch(reason) is None:
        raise MalformedPart(f"reason is not 1 to 200 printable ASCII characters: {reason[:80]!r}")
    return Options(
        weight_version=optional_version(query, "weight_version"),
        base_version=optional_version(query, "base_version"),
        pause_mode=pause_mode,
        flush_cache=_FLUSHES[flush],
        reason=reason,
    )


def parse_commit(query: Mapping[str, str], body: str | None = None) -> bool:
    """Return whether a sync is committed as soon as all of it is staged.

    Args:
        body: what a JSON body says.

    Raises:
        MalformedPart: a value is not one of `COMMITS`.
    """
    found = {query.get("commit", "complete"), "complete" if body is None else body}
    for commit in found:
        if commit not in COMMITS:
            raise MalformedPart(f"commit must be one of {', '.join(COMMITS)}, not {commit!r}")
    return found == {"complete"}


def parse_adapter(query: Mapping[str, str], body: str | None = None) -> str | None:
    """Return the LoRA adapter that a query string or a JSON body names; None if neither does.

    Raises:
        MalformedPart: the name is empty, or the two disagree.
    """
    name = query.get("adapter", body)
    if name == "" or (body is not None and body != name):
        raise MalformedPart(f"adapter is {body!r} in the body, {name!r} in the query")
    return name


def parse_body(body: bytes, type: type[_T]) -> _T:
    """Return the request of this type in a JSON body.

    Raises:
        MalformedPart: the body is not JSON, or a value is invalid.
    """
    try:
        return msgspec.json.decode(body, type=type)
    except (ValueError, RecursionError) as error:
        raise MalformedPart(f"bad request body: {error}") from error


class VersionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of ``POST /update_weight_version``; unknown keys are ignored."""

    new_version: str | int
    abort_all_requests: bool = False


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of ``POST /delta_run``; unknown keys are ignored."""

    action: Literal["claim", "release"]
    run: str
    epoch: Annotated[int, msgspec.Meta(ge=1, le=MAX_VERSION)] = 1
    host: Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{1,255}$(?!\n)")] | None = None
    pid: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)] | None = None
    takeover: bool = False  # of a claim: also from another run, which is fenced

    def __post_init__(self) -> None:
        check_run(self.run)

    @property
    def sender(self) -> RunSender:
        """Whom the request is from."""
        return RunSender(run=self.run, epoch=self.epoch, host=self.host, pid=self.pid)


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of ``POST /delta_commit``; unknown keys are ignored."""

    action: Literal["prepare", "record", "commit", "abort", "ask"]
    group: Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{1,64}$(?!\n)")]
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)] | None = None
    sync_id: str | None = None
    lease: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 60.0  # seconds
    # Of a record: the roots of all engines that have prepared.
    peers: Annotated[list[_PEER], msgspec.Meta(max_length=4096)] = []
    force: bool = False  # of an abort: also if the engines are settling it among themselves


class PullRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of ``POST /pull_weights``; unknown keys are ignored."""

    local_checkpoint_dir: str
    source_dir: str
    target_version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]


class RpcRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of ``POST /collective_rpc``; only a disk request is accepted."""

    kwargs: DiskRequest


prepare(Options, GroupRequest, DiskRequest, VersionRequest, RunRequest, PullRequest, RpcRequest)
