"""Deliver parts by the calls of vLLM's weight-transfer API: the class `TransferDestination`."""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import httpx
import torch

from delta_sender.integrations.transfer_group import Group, Rendezvous
from delta_sender.options import SenderOptions
from delta_sender.publish.http_client import EngineClient, refusal_of
from delta_sender.results import EngineBusy, SyncError
from delta_sender.run import Run
from engine_ext.answers import json_object
from engine_ext.format import SIGNATURE_SUFFIX, sign
from engine_ext.settings import bearer_headers

_WAIT_S: Final = 1.0  # for a busy engine, at most


@dataclass(frozen=True, kw_only=True)
class Channel:
    """How parts travel.

    Attributes:
        kind: ``inline``: in the requests, up to 32 MiB each; ``disk``: as files in `folder`;
            ``collective``: broadcast from the trainer to one worker of the engine.
        inline_bytes: Parts up to this size go inline, whatever the kind.
        folder: A folder below a ``--delta-root`` of the engine, under the same path here.
        address: This host's, as the engine reaches it; a free port is taken for each group.
        backend: Of the group, ``gloo`` or ``nccl``. With NCCL, a part is broadcast from the GPU
            that is current when the sender is made, and the first worker's needs room for it.
        timeout: Seconds that either side waits for the other: for a worker to join, for a part to
            arrive, and for the engine's answer to a call, whatever the kind.
    """

    kind: Literal["inline", "disk", "collective"] = "inline"
    inline_bytes: int = 1 << 20
    folder: str | os.PathLike[str] | None = None
    address: str = "127.0.0.1"
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.kind == "disk" and self.folder is None:
            raise ValueError("the channel disk needs a folder")


class SyncClient(Protocol):
    """vLLM's ``VLLMWeightSyncClient``; its methods raise if the engine refuses."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class TransferDestination(EngineClient):
    """An engine whose parts go through a `SyncClient`; plan and status are read by HTTP."""

    def __init__(
        self, url: str, options: SenderOptions, client: SyncClient, channel: Channel
    ) -> None:
        if options.commit == "all_or_none":
            raise ValueError(
                "the weight-transfer API commits a sync at once, whatever other engines do; use "
                "commit='each', or MultiSender without a client of that API"
            )
        super().__init__(url, replace(options, posts_in_flight=1))
        self._sync_client, self._channel = client, channel
        self._options = {"pause_mode": options.pause_mode, "flush_cache": options.flush_cache}
        self._group: Group | None = None
        self._run: Run | None = None  # that has claimed the engine
        # Parts are delivered by other threads, which have a current GPU of their own.
        is_nccl = channel.kind == "collective" and channel.backend == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else None
        if options.adapter is not None:
            raise ValueError("the weight-transfer API has no adapters; use DeltaSender")
        self._call(client.init_weight_transfer_engine, {})

    def claim(self, run: Run, *, takeover: bool) -> dict[str, Any]:
        """See `Destination.claim`."""
        self._run = run
        return super().claim(run, takeover=takeover)

    def close(self) -> None:
        """Leave the group, and close the HTTP client."""
        self._group = None
        super().close()

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        """Deliver one part: the first starts an update, the last finishes it.

        Raises:
            SyncError: The engine refused it, and has dropped what it was sent before; or no answer
                came.
        """
        if last:
            self.highest_posted = max(self.highest_posted, version)
        if part == 0:
            self._patient()(self._start, body, f"{version}-{part}")
        else:
            self._update(body, f"{version}-{part}")
        if not last:
            return {"status": "staged", "version": version}
        self._call(self._sync_client.finish_weight_update, str(version))
        answer: dict[str, Any] = {"status": "committed", "version": version}
        with contextlib.suppress(SyncError):  # what was committed stays so
            status = self.status()
            if status is not None and status.version.number == version:
                answer["digest"] = status.version.digest
        return answer

    def _start(self, body: bytes, name: str) -> None:
        """Begin an update, and send its first part."""
        self.check_open()
        if self._run is not None:
            # The call that starts has no run, and ends whatever update has begun: a run that is
            # fenced must not make it.
            super().claim(self._run, takeover=False)
        self._call(self._sync_client.start_weight_update)
        self._update(body, name)

    def _update(self, body: bytes, name: str) -> None:
        """Send one part over the channel."""
        self.check_open()
        client, channel = self._sync_client, self._channel
        options = self._options | ({} if self.reason is None else {"reason": self.reason})
        signed = {} if self._hmac_key is None else {"signature": sign(self._hmac_key, body)}
        if channel.kind == "inline" or len(body) <= channel.inline_bytes:
            part = base64.b64encode(body).decode()
            self._call(client.update_weights, {"part": part, **signed, **options})
        elif channel.kind == "disk":
            with self._file(body, name) as path:
                files = {"model_path": str(path.parent), "files": [path.name]}
                self._call(client.update_weights, {**files, **options})
        else:
            self._broadcast(body, {"broadcast_bytes": len(body), **signed, **options})

    @contextlib.contextmanager
    def _file(self, body: bytes, name: str) -> Iterator[Path]:
        """Write a part to the shared folder while the engine reads it."""
        with tempfile.TemporaryDirectory(prefix="delta-", dir=self._channel.folder) as folder:
            path = Path(folder, f"{name}.safetensors")
            path.write_bytes(body)
            if self._hmac_key is not None:
                beside = path.with_name(path.name + SIGNATURE_SUFFIX)
                beside.write_text(sign(self._hmac_key, body))
            # The engine might be another user's.
            for file in Path(folder).iterdir():
                file.chmod(0o644)
            Path(folder).chmod(0o755)
            yield path

    def _broadcast(self, body: bytes, info: dict[str, Any]) -> None:
        if self._group is None:
            self._group = self._join()
        group, self._group = self._group, None
        end = time.monotonic() + self._channel.timeout
        answer = _begin(self._sync_client.update_weights, info)
        try:
            group.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), answer, end)
        except Exception as error:
            raise _sync_error(error) from error
        self._group = group  # it is not used again after an error

    def _join(self) -> Group:
        """Return a group with the engine's worker."""
        channel = self._channel
        rendezvous = Rendezvous(channel.address, channel.backend, channel.timeout)
        end = time.monotonic() + channel.timeout
        answer = _begin(self._sync_client.init_weight_transfer_engine, rendezvous.info)
        try:
            return rendezvous.meet(answer, self._device, end)
        except Exception as error:
            if answer.done():
                answer.result()  # what the engine refuses says more than that it did not come
            raise _sync_error(error) from error

    def _call(self, method: Any, *arguments: Any) -> None:
        """Call the client, and wait for the answer as long as the channel allows.

        Raises:
            SyncError: The engine refused, could not be reached, or has not answered in time.
        """
        limit = self._channel.timeout
        try:
            _begin(method, *arguments).result(limit)
        except futures.TimeoutError as error:  # in Python 3.10 not the builtin one
            name = getattr(method, "__name__", "the call")
            raise SyncError(f"the engine has not answered {name} in {limit:g} s") from error


def _begin(method: Any, *arguments: Any) -> futures.Future[None]:
    """Begin a call in a thread, which nobody waits for; it ends with a `SyncError` if it fails."""
    answer: futures.Future[None] = futures.Future()

    def run() -> None:
        try:
            method(*arguments)
        except BaseException as error:
            answer.set_exception(_sync_error(error))
        else:
            answer.set_result(None)

    threading.Thread(target=run, name="delta-transfer", daemon=True).start()
    return answer


def _sync_error(error: BaseException) -> SyncError:
    """Return what a client raised as a `SyncError`, with the engine's answer if it has one."""
    if isinstance(error, SyncError):
        return error
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
        return _refusal(error.response)  # type: ignore[attr-defined]
    return SyncError(f"{type(error).__name__}: {error}")  # no answer, or of another library


def _refusal(response: Any) -> SyncError:
    if not isinstance(json_object(response.text).get("error"), dict):
        status = int(response.status_code)
        return SyncError(f"HTTP {status}: {response.text[:200]}", status)
    refusal = refusal_of(response)
    if isinstance(refusal, EngineBusy):  # a call to begin an update is small
        refusal.error["retry_after"] = min(refusal.error["retry_after"], _WAIT_S)
    return refusal


class HttpSyncClient:
    """A `SyncClient` that sends a bearer token, which vLLM's own client cannot.

    Its methods raise `httpx.HTTPError`.

    Args:
        base_url: The engine's root.
        api_key: Bearer token; None: that in ``DELTA_API_KEY``, if there is one.
        timeout: Seconds for one call.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._client = httpx.Client(headers=bearer_headers(api_key), timeout=timeout)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _post(self, path: str, body: dict[str, Any]) -> None:
        self._client.post(f"{self.base_url}/{path}", json=body).raise_for_status()
