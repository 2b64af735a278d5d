"""Call the delta endpoints of one engine, and turn its answers into results and errors."""

from __future__ import annotations

import contextlib
import json
import logging
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import httpx
import msgspec
from tenacity import RetryCallState, Retrying, retry_if_exception_type
from tenacity.stop import stop_after_attempt, stop_before_delay
from tenacity.wait import wait_random_exponential

from delta_sender.locations import engine_root
from delta_sender.options import SenderOptions
from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.publish.destination import Destination
from delta_sender.publish.fleet import ABORTED
from delta_sender.results import EngineBusy, EngineUnreachable, SyncError
from delta_sender.run import Run, clock, owner_in_words
from engine_ext.answers import answer_in_words, failure_in_words, json_object
from engine_ext.format import SIGNATURE_HEADER, sign
from engine_ext.ranks.status import OTHER_FORM, EngineStatus
from engine_ext.resources import RateLimit

logger = logging.getLogger(__name__)

STARTING: Final = (502, 503, 504)  # statuses of a server, or a proxy, whose engine starts
_CONNECT_S: Final = 10.0
_RELEASE_S: Final = 2.0
_TRIES: Final = 8
_PART: Final = "application/octet-stream"
# httpx copies the rest of a body whenever the socket has taken some of it.
_CHUNK: Final = 1 << 18


def _log_retry(state: RetryCallState) -> None:
    """Say that a request is sent again, and why."""
    failed = state.outcome.exception() if state.outcome else None
    sleep = 0.0 if state.next_action is None else state.next_action.sleep
    message = "no answer (try %d of %d), again in %.1f s: %s"
    waits = {"waits_for": "the engine to answer"}
    logger.warning(message, state.attempt_number, _TRIES, sleep, failed, extra=waits)


class EngineClient(Destination):
    """The delta endpoints of one engine; `client` is the HTTP client."""

    # No decorator: its statistics would be those of all threads, which clear them for each other.
    retrying: ClassVar = Retrying(
        retry=retry_if_exception_type(EngineUnreachable),
        wait=wait_random_exponential(multiplier=0.5, max=4.0),
        stop=stop_after_attempt(_TRIES),
        before_sleep=_log_retry,
        reraise=True,
    )

    def __init__(self, url: str, options: SenderOptions) -> None:
        self.name = self._url = engine_root(url)
        self._timeout = options.timeout
        self._adapter = options.adapter
        self._named = {} if self._adapter is None else {"adapter": self._adapter}
        self._query = {
            "pause_mode": options.pause_mode,
            "flush_cache": str(options.flush_cache).lower(),
            **self._named,
        }
        key = options.api_key
        self._authorization = {"Authorization": f"Bearer {key}"} if key else {}
        self._headers = {"Content-Type": _PART, **self._authorization}
        self._holds = options.commit == "all_or_none"
        self._hmac_key = options.hmac_key
        self.reason: str | None = None  # of the parts that follow, see `announce`
        self._is_stopped = False
        self.gives_up = False  # no request is sent again, or begun, but for an abort
        self.speed = LinkSpeed()
        self._limit = options.bandwidth_limit
        self.highest_posted = 0
        self.at_once = self._most_at_once = options.posts_in_flight
        self._delivers: int | None = None  # the version whose parts are being posted
        self._owns_client = options.client is None
        # A connection to a host that is gone never opens; it is not given the time of a request.
        timeout = httpx.Timeout(options.timeout, connect=min(options.timeout, _CONNECT_S))
        self.client = options.client or open_client(timeout)

    def close(self) -> None:
        """Close the HTTP client, unless it was given."""
        if self._owns_client:
            self.client.close()

    def stop(self) -> None:
        """See `Destination.stop`; a request that has begun ends."""
        self._is_stopped = True

    def check_open(self) -> None:
        """Raise `SyncError` after `stop`."""
        if self._is_stopped:
            raise SyncError("the sender is closed")

    def announce(self, reason: str | None) -> None:
        """See `Destination.announce`."""
        self.reason = None if reason is None else _header_safe(reason)

    def claim(self, run: Run, *, takeover: bool) -> dict[str, Any]:
        """Make a run the engine's owner; {} if the engine knows no runs.

        Waits while a sender without a run has parts staged.

        Raises:
            RunConflict: Another run owns it, or has fenced this one.
            SyncError: It refused or could not be reached.
        """
        body = {"action": "claim", **run.request, "takeover": takeover}
        try:
            return self._patient()(self._request, "POST", "/delta_run", self._named, fields=body)
        except SyncError as failed:
            if failed.status == 404 and not failed.error:
                return {}
            raise

    def release(self, run: Run) -> None:
        """Drop what is staged of a run, and give the engine up; takes 2 seconds, raises nothing."""
        with contextlib.suppress(Exception):
            self.client.post(
                f"{self._url}/delta_run",
                params=self._named,
                headers=self._authorization,
                json={"action": "release", **run.request},
                timeout=_RELEASE_S,
            )

    def plan(self) -> Any:
        """Return for each rank a list of rows, one per checkpoint tensor; None without a plan."""
        status = self.status(plan="true")
        return None if status is None else status.plan or None

    def status(self, **query: str) -> EngineStatus | None:
        """Return the engine's ``/delta_status``; None if it has none.

        Raises:
            SyncError: It failed, the engine does not know that an adapter can be meant, or its
                status is of another version of these endpoints.
        """
        status: EngineStatus | None = None
        try:
            answer = self._request("GET", "/delta_status", {**query, **self._named})
            status = msgspec.convert(answer, EngineStatus)
        except SyncError as failed:
            if failed.status != 404:
                raise
        except msgspec.ValidationError as error:
            raise SyncError(f"{self._url}: {OTHER_FORM}: {error}", 200) from error
        if self._adapter is not None and (status is None or status.adapter != self._adapter):
            raise SyncError(f"{self._url} takes no updates of adapters", 200)
        return status

    def catch_up(self) -> int | None:
        """Let the engine replay the delta log that it was started with; return its version then.

        Raises:
            SyncError: It has no log, or does not reach the newest version.
        """
        version = self._request("POST", "/delta_catch_up", self._query).get("version")
        return version if isinstance(version, int) else None

    def take_step(self, action: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Destination.take_step`; waits while the engine is busy."""
        patient, body = self._patient(), {"action": action, **fields}
        try:
            return patient(self._request, "POST", "/delta_commit", self._query, fields=body)
        except SyncError as failed:
            if failed.status == 404 and not failed.error:
                text = f"{self._url} does not commit together with others; update the engine"
                raise SyncError(text, 404) from failed
            raise

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        """Post one part until it is taken or refused, and return the engine's answer.

        Raises:
            SyncError: The engine refused it or could not be reached; see `SyncError.unanswered`.
        """
        if version != self._delivers:  # which part is posted first is not certain
            self._delivers, self.at_once = version, self._most_at_once
        if last:
            self.highest_posted = max(self.highest_posted, version)
        signed = {} if self._hmac_key is None else {SIGNATURE_HEADER: sign(self._hmac_key, body)}
        unanswered: list[SyncError] = []
        try:
            query = self._query | ({} if self.reason is None else {"reason": self.reason})
            query |= {"commit": "hold"} if self._holds else {}
            answer = self._patient()(
                self._request, "POST", "/update_weights_delta", query, body, signed, unanswered
            )
        except SyncError as failed:
            failed.unanswered = bool(unanswered)
            raise
        # The part can belong to an earlier sync whose answer was lost.
        expected = ("committed" if last and not self._holds else "staged", "already_applied")
        if answer.get("status") not in expected or (last and answer.get("version") != version):
            raise SyncError(f"part {part} of version {version} was answered {answer}", 200)
        return answer

    def _request(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Send a request, again if no answer comes; see `_send`."""
        return self.retrying(self._send, *arguments, **named)

    def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        unanswered: list[SyncError] | None = None,
        fields: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Send a request once, and return its answer.

        Args:
            unanswered: Gets the failure, if no answer comes.
            fields: A body in JSON, in place of `body`.
        """
        self.check_open()
        if self.gives_up and (fields is None or fields.get("action") != "abort"):
            text = "the others have ended this sync, and the engine had not prepared it"
            raise SyncError(text, 409, dict(ABORTED) if fields is None else {})
        if fields is not None:
            body, headers = json.dumps(fields).encode(), {"Content-Type": "application/json"}
        url, headers = self._url + path, {**self._headers, **(headers or {})}
        content = None
        if body is not None:
            is_part = headers["Content-Type"] == _PART
            content = _Chunks(body, self._limit if is_part else None)
            headers["Content-Length"] = str(len(body))
        with self.speed.crossing() as start:
            try:
                answer = self.client.request(
                    method, url, params=query, headers=headers, content=content
                )
            except httpx.TransportError as error:
                kind = SyncError if is_lasting(error) else EngineUnreachable
                why = failure_in_words(error, url, proxies=self._owns_client)
                lost = kind(f"{url}: {why}")
                if unanswered is not None and kind is EngineUnreachable:
                    unanswered.append(lost)
                raise lost from error
            if answer.status_code != 200:
                refusal = refusal_of(answer, proxies=self._owns_client)
                if refusal.error.get("type") == "TooManyUploads":
                    self.at_once = max(1, self.at_once - 1)
                if unanswered is not None and isinstance(refusal, EngineUnreachable):
                    unanswered.append(refusal)
                raise refusal
            said = json_object(answer.text)
            ended = time.perf_counter()
            self.speed.note(len(body or b""), ended - start, said, ended)
        return said

    def _patient(self) -> Retrying:
        """Return what calls a function that sends, again while the engine is busy."""
        is_busy, stop = retry_if_exception_type(EngineBusy), stop_before_delay(self._timeout)
        return Retrying(
            retry=is_busy, wait=_retry_after_s, stop=stop, before_sleep=self._waits, reraise=True
        )

    def _waits(self, state: RetryCallState) -> None:
        """Say what a post waits for, and until when."""
        failed = state.outcome.exception() if state.outcome else None
        if not isinstance(failed, EngineBusy):
            return
        error, left = failed.error, self._timeout - (state.seconds_since_start or 0.0)
        if error.get("type") == "TooManyUploads":
            what = "takes no more uploads at once"
            waits_for = "room for an upload"
        else:
            waits_for = "another sync to end"
            version, until = error.get("staged_version"), error.get("until")
            of = owner_in_words(error.get("owner"))
            what = f"is busy with a sync to version {version} of {of}"
            if isinstance(until, (int, float)):
                what += f", whose parts are dropped at {clock(until)} unless more of them come"
        message = "%s %s: trying again in %.0f s, for %.0f s at most"
        waits = {"waits_for": waits_for}  # for a progress bar
        seconds, left = error["retry_after"], max(0.0, left)
        logger.warning(message, self.name, what, seconds, left, extra=waits)


def open_client(timeout: float | httpx.Timeout) -> httpx.Client:
    """Return a client that uses the environment's proxies.

    Args:
        timeout: In seconds.

    Raises:
        EngineUnreachable: It could not reach anything: a package for one of the proxies is missing.
    """
    try:
        return httpx.Client(timeout=timeout)
    except ImportError as error:
        raise EngineUnreachable(failure_in_words(error, "")) from error


class _Chunks:
    """A body in chunks; each iteration starts from the beginning."""

    def __init__(self, body: bytes, limit: RateLimit | float | None) -> None:
        self._body, self._limit = body, limit

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._body), _CHUNK):
            chunk = self._body[start : start + _CHUNK]
            if isinstance(self._limit, RateLimit):
                self._limit.wait(len(chunk))
            yield chunk


def is_lasting(error: httpx.TransportError) -> bool:
    """Whether a request would fail again: https to a server that speaks http, or another's name."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
            return True
        cause = cause.__cause__ or cause.__context__
    return isinstance(error, (httpx.LocalProtocolError, httpx.UnsupportedProtocol))


def refusal_of(response: Any, *, proxies: bool = True) -> SyncError:
    """Return the exception for a status other than 200; its class says whether a retry can help.

    Args:
        response: An answer, as httpx or requests have it.
        proxies: See `answer_in_words`.
    """
    status, error = response.status_code, json_object(response.text).get("error")
    url = str(response.url).partition("?")[0]
    server = response.headers.get("Server")
    message = answer_in_words(status, response.text, server, url, proxies=proxies)
    if not isinstance(error, dict):
        kind = EngineUnreachable if status in STARTING else SyncError
        return kind(message, status)
    if error.get("type") not in ("SyncInProgress", "TooManyUploads"):
        return SyncError.of(message, status, error)
    header = response.headers.get("Retry-After", "")
    seconds = max(0.1, float(header)) if header.isdecimal() else 1.0
    return EngineBusy(message, status, {**error, "retry_after": seconds})


def _retry_after_s(state: RetryCallState) -> float:
    failed = state.outcome.exception() if state.outcome else None
    return float(failed.error["retry_after"]) if isinstance(failed, EngineBusy) else 0.0


def _header_safe(reason: str) -> str:
    """Return a reason as 200 printable ASCII characters at most."""
    text = " ".join(reason.split()).encode("ascii", "replace").decode()
    return text[:200]
