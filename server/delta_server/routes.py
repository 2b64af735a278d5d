"""The endpoints; `attach` adds them to an engine's own FastAPI app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from delta_server.auth import check_access
from delta_server.dashboard import denied_response, from_browser, page_response
from delta_server.digests import describe_digests
from delta_server.engine import rank_states
from delta_server.generation_guard import READY_PATH, GenerationGuard
from delta_server.guards import MAX_JSON_BYTES, ApplyFromDisk, error_response
from delta_server.part_server import PartResponse, StillReading
from delta_server.request_options import (
    DiskRequest,
    GroupRequest,
    Options,
    PullRequest,
    RpcRequest,
    RunRequest,
    VersionRequest,
    parse_adapter,
    parse_body,
    parse_commit,
    parse_query,
)
from delta_server.request_record import RequestRecord
from delta_server.service import DeltaService, no_log
from delta_server.sources import deliver
from delta_server.sources.files import Files
from delta_server.sources.pulls import (
    PULLED,
    Pulled,
    check_pulled_request,
    commit_pulled,
    find_pulled,
    pull,
)
from delta_server.sources.push import SinglePart, advance, received
from delta_server.upload_limits import receive_body
from engine_ext.errors import (
    Conflict,
    DeltaError,
    MalformedPart,
    TooLarge,
    Unauthorized,
    UnsupportedMedia,
    as_delta_error,
)
from engine_ext.format import SIGNATURE_HEADER, optional_version
from engine_ext.remote_parts import ROUTE as PARTS

_T = TypeVar("_T")
_Work = Callable[[Request], Awaitable[dict[str, Any]]]
_Endpoint = Callable[[Request], Awaitable[JSONResponse]]


def attach(app: FastAPI, generation: Sequence[str] = ()) -> None:
    """Add the endpoints to an app. ``app.state.delta_service`` must be set before it serves.

    An app whose lifespan has begun takes no more middleware; the guard wraps its whole stack then.

    Args:
        app: the engine's app.
        generation: prefixes of further paths where it generates, see `GenerationGuard`.
    """
    app.add_api_route("/update_weights_delta", update_weights_delta, methods=["POST"])
    app.add_api_route("/update_weights_from_disk", update_weights_from_disk, methods=["POST"])
    app.add_api_route("/pull_weights", pull_weights, methods=["POST"])
    app.add_api_route("/update_weight_version", update_weight_version, methods=["POST"])
    app.add_api_route("/delta_status", delta_status, methods=["GET"])
    app.add_api_route(READY_PATH, delta_ready, methods=["GET"])
    app.add_api_route("/delta_digest", delta_digest, methods=["GET"])
    app.add_api_route("/delta_dashboard", delta_dashboard, methods=["GET"])
    app.add_api_route("/delta_rollback", delta_rollback, methods=["POST"])
    app.add_api_route("/delta_catch_up", delta_catch_up, methods=["POST"])
    app.add_api_route("/delta_pin", delta_pin, methods=["POST"])
    app.add_api_route("/delta_run", delta_run, methods=["POST"])
    app.add_api_route("/delta_commit", delta_commit, methods=["POST"])
    app.add_api_route(PARTS, delta_offer, methods=["GET"])
    app.add_api_route(f"{PARTS}/{{content}}", delta_parts, methods=["GET"])
    # vLLM's route of this name, if it has one, keeps the other methods.
    theirs = [r for r in app.router.routes if getattr(r, "path", None) == "/collective_rpc"]
    app.add_api_route("/collective_rpc", collective_rpc, methods=["POST"])
    app.router.routes[-1].app = ApplyFromDisk(app.router.routes[-1].app, theirs)  # type: ignore[attr-defined]
    stack = app.middleware_stack
    if stack is None:
        app.add_middleware(GenerationGuard, state=app.state, generation=generation)
    else:
        app.middleware_stack = GenerationGuard(stack, app.state, generation)


def _answering(work: _Work, *, says_success: bool = False) -> _Endpoint:
    """Make an endpoint of a function that returns a JSON object.

    Args:
        says_success: the answer says so, too, as those of the engines' own endpoints do.
    """
    more = {"success": True} if says_success else {}

    async def answer(request: Request) -> JSONResponse:
        try:
            return JSONResponse({**await work(request), **more})
        except Exception as error:
            failure = as_delta_error(error)
            keys = {"success": False, "message": failure.message} if says_success else {}
            return error_response(failure, **keys)

    # Not `functools.wraps`: FastAPI would read the answer's type from what is wrapped.
    answer.__name__, answer.__doc__ = work.__name__, work.__doc__
    return answer


_as_engines = partial(_answering, says_success=True)


@_answering
async def update_weights_delta(request: Request) -> dict[str, Any]:
    """Apply a part (the body is one container), or files from a shared folder (a JSON body)."""
    service = _service(request)
    record = RequestRecord(adapter=service.adapter)
    async with service.reporter.follow(record):
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedMedia(
                "Content-Encoding is not supported; use the encoding deltas_zstd"
            )
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type == "application/json":
            with service.inlet.upload_slots.one():
                disk_request = await _body(request, service, DiskRequest)
                return await _apply_files(service, disk_request, request, record)
        if content_type != "application/octet-stream":
            raise UnsupportedMedia(
                "Content-Type must be application/octet-stream or application/json, not "
                f"{content_type!r}"
            )
        with service.inlet.upload_slots.one():
            return await _apply_body(service, request, record)


@_as_engines
async def update_weights_from_disk(request: Request) -> dict[str, Any]:
    """Apply files from a shared folder, under the path that other trainers use."""
    answer = await _update_from_disk(request)
    return {**answer, "message": f"{answer['status']} version {answer['version']}"}


@_as_engines
async def update_weight_version(request: Request) -> dict[str, Any]:
    """Take a later version that holds the same weights: a step that has changed nothing."""
    service = _service(request)
    if service.adapter is not None:
        raise MalformedPart("the engine's weight version is that of the model")
    record = RequestRecord()
    async with service.reporter.follow(record):
        with service.inlet.upload_slots.one():
            wanted = await _body(request, service, VersionRequest)
            ends = wanted.abort_all_requests
            pause_mode = "abort" if ends else "keep"
            options = Options(pause_mode=pause_mode, flush_cache=False)  # it stays valid
            service.inlet.refuse_pushes()
            text = str(wanted.new_version)
            work = advance(service.inlet, text, options, record, ends_requests=ends)
            answer = await asyncio.shield(work)
    return {**answer, "message": f"the weight version is {text}", "new_version": text}


@_as_engines
async def pull_weights(request: Request) -> dict[str, Any]:
    """Stage the versions that a trainer has published, up to a target."""
    service = _service(request)
    if service.adapter is not None:
        raise MalformedPart("versions are pulled for the model's weights, not for adapters")
    record = RequestRecord()
    async with service.reporter.follow(record):
        with service.inlet.upload_slots.one():
            wanted = await _body(request, service, PullRequest)
            service.inlet.refuse_pushes()
            return {"message": await asyncio.shield(pull(service.inlet, wanted, record))}


@_answering
async def collective_rpc(request: Request) -> dict[str, Any]:
    """Apply files from a shared folder: the method `apply_delta_from_disk`, as vime calls it."""
    service = _service(request)
    record = RequestRecord(adapter=service.adapter)
    async with service.reporter.follow(record):
        with service.inlet.upload_slots.one():
            disk_request = (await _body(request, service, RpcRequest)).kwargs
            ranks = len(await rank_states(service.engine))  # not asked after a commit
            answer = await _apply_files(service, disk_request, request, record)
            return {"results": [answer] * ranks}


@_answering
async def delta_status(request: Request) -> dict[str, Any]:
    """Return versions, staged parts, certification and the last sync.

    With ``plan=true`` also every tensor; with ``history=true`` also the last syncs' results.
    """
    plan, history = _flag(request, "plan"), _flag(request, "history")
    found = await _service(request).status(plan=plan, history=history)
    answer: dict[str, Any] = msgspec.to_builtins(found)
    return answer


async def delta_ready(request: Request) -> JSONResponse:
    """Return whether clients can be sent to the engine: 200 or 503, for probes.

    `GenerationGuard` answers before the app. This is the route's place in the engine's schema.
    """
    raise NotImplementedError


@_answering
async def delta_digest(request: Request) -> dict[str, Any]:
    """Return the digests of the model and its tensors; with ``scan=true`` from live memory."""
    return await describe_digests(_service(request).engine, _flag(request, "scan"))


async def delta_dashboard(request: Request) -> Response:
    """Return a page for browsers that shows the status and the last syncs, and updates itself."""
    service: DeltaService = request.app.state.delta_service
    try:
        check_access(request, service.settings.allow_from)
    except DeltaError as error:
        browser = from_browser(request)
        if browser and isinstance(error, Unauthorized):
            return page_response(error.status)  # it asks for the token
        service.reporter.report_denied(error)
        return denied_response(error) if browser else error_response(error)
    return page_response()


@_answering
async def delta_rollback(request: Request) -> dict[str, Any]:
    """Restore the version before the last one."""
    service = _service(request)
    service.inlet.refuse_pushes()
    return await asyncio.shield(service.fleet.roll_back(parse_query(request.query_params)))


@_answering
async def delta_catch_up(request: Request) -> dict[str, Any]:
    """Replay the versions of the delta log that the engine lacks."""
    service = _service(request)
    options = parse_query(request.query_params)
    if service.adapter is not None:
        raise MalformedPart("a delta log has versions of the model's weights, not of adapters")
    if service.log_replay is None:
        raise no_log()
    if service.follower is not None:
        return await asyncio.shield(service.follower.catch_up(options))
    return await asyncio.shield(service.log_replay.run(options))


@_answering
async def delta_pin(request: Request) -> dict[str, Any]:
    """Hold an engine that follows its delta log at a version; without one, let it continue."""
    service = _service(request)
    if service.follower is None:
        raise Conflict("the engine does not follow a delta log; start it with --delta-follow")
    version = optional_version(request.query_params, "version")
    return await asyncio.shield(service.follower.pin(version))


@_answering
async def delta_run(request: Request) -> dict[str, Any]:
    """Let the sender of a run alone change the weights, or let anyone again."""
    service = _service(request)
    wanted = await _body(request, service, RunRequest)
    service.inlet.refuse_pushes()
    return await asyncio.shield(service.change_owner(wanted))


@_answering
async def delta_commit(request: Request) -> dict[str, Any]:
    """Commit a staged sync as one with other engines, step by step, or drop it."""
    service = _service(request)
    wanted = await _body(request, service, GroupRequest)
    options = parse_query(request.query_params)
    service.inlet.refuse_pushes()
    return await asyncio.shield(service.fleet.carry_out(wanted, options))


@_answering
async def delta_offer(request: Request) -> dict[str, Any]:
    """Return what the engine holds, and the versions of its log that lead there."""
    return await _service(request).offer()


async def delta_parts(request: Request) -> Response:
    """Return a part of the delta log by its hash, for another engine.

    With ``cached=true`` the store is not read for it. While that takes long, the answer is 202: who
    has asked asks again.
    """
    try:
        service = _service(request)
        content, reads = request.path_params["content"], not _flag(request, "cached")
        if service.part_reads is None:
            raise no_log()
        file = await service.part_reads.open(content, reads=reads)
    except StillReading:
        return Response(status_code=202)
    except Exception as error:
        return error_response(as_delta_error(error))
    return Response(status_code=404) if file is None else PartResponse(file)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false"):
        raise MalformedPart(f"{name} must be true or false, not {text!r}")
    return text == "true"


async def _apply_body(
    service: DeltaService, request: Request, record: RequestRecord
) -> dict[str, Any]:
    options = parse_query(request.query_params)
    record.commits = parse_commit(request.query_params)
    service.inlet.refuse_pushes()
    length = request.headers.get("content-length", "")
    size = int(length) if length.isascii() and length.isdigit() else None
    signature = request.headers.get(SIGNATURE_HEADER)
    arriving = received(service.inlet, request.stream(), size, signature, record)
    done = await deliver(SinglePart(service.inlet, arriving, options, record))
    # The sender computes the link's share of its own time from this.
    done["timings_ms"]["total_ms"] = round(record.seconds * 1e3, 3)
    return done


async def _update_from_disk(request: Request) -> dict[str, Any]:
    service = _service(request)
    record = RequestRecord(adapter=service.adapter)
    async with service.reporter.follow(record):
        with service.inlet.upload_slots.one():
            disk_request = await _body(request, service, DiskRequest)
            pulled: Pulled | None = None
            if disk_request.load_format is None:
                pulled = request.scope.get(PULLED)
                pulled = pulled or await find_pulled(service.inlet, disk_request.model_path)
            if pulled is not None:
                check_pulled_request(disk_request, request.query_params)
                service.inlet.refuse_pushes()
                options = disk_request.options(request.query_params)
                work = commit_pulled(service.inlet, pulled, options, record)
                return await asyncio.shield(work)
            if disk_request.load_format != "delta":
                raise MalformedPart(
                    f"load_format {disk_request.load_format!r} is not supported; use 'delta'"
                )
            return await _apply_files(service, disk_request, request, record)


async def _apply_files(
    service: DeltaService, disk_request: DiskRequest, request: Request, record: RequestRecord
) -> dict[str, Any]:
    adapter = parse_adapter(request.query_params, disk_request.adapter)
    if adapter is not None and service.adapter is None:
        service, record.adapter = service.for_adapter(adapter), adapter
    if not parse_commit(request.query_params, disk_request.commit):
        raise MalformedPart("commit=hold is for parts that are sent as bodies, not for files")
    service.inlet.refuse_pushes()
    options = disk_request.options(request.query_params)
    found = service.inlet.store_files.resolved(disk_request)
    # It reports what fails, also after the caller has left.
    return await asyncio.shield(deliver(Files(service.inlet, found, options, record)))


def _service(request: Request) -> DeltaService:
    """Return the service that the request means, if it has access."""
    service: DeltaService = request.app.state.delta_service
    try:
        check_access(request, service.settings.allow_from)
    except DeltaError as error:
        service.reporter.report_denied(error)
        raise
    adapter = parse_adapter(request.query_params)
    return service if adapter is None else service.for_adapter(adapter)


async def _body(request: Request, service: DeltaService, type: type[_T]) -> _T:
    body = bytearray()
    async for chunk in receive_body(request.stream(), service.inlet.minimum_rate):
        body += chunk
        if len(body) > MAX_JSON_BYTES:
            raise TooLarge(f"the JSON body is over {MAX_JSON_BYTES} bytes", limit=MAX_JSON_BYTES)
    return parse_body(bytes(body), type)
