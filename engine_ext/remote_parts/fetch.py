"""Fetch a part over HTTP from the host that has it in its spool."""

from __future__ import annotations

import os
import time
from typing import BinaryIO, Final

import httpx
import tenacity

from engine_ext.errors import PartUnavailable
from engine_ext.ranks.operations import PartSource

_TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)
_ATTEMPTS: Final = 6
_LONGEST_WAIT_S: Final = 4.0
_LONGEST_READ_S: Final = 60.0  # until a part is here; its size adds to it, at the slowest rate
_SLOWEST_READ: Final = 1 << 20  # bytes per second
_AGAIN_S: Final = 0.1


class NotThere(Exception):
    """The other host does not have the part."""


def fetch_part(source: PartSource, file: BinaryIO) -> None:
    """Write a part into an empty file; an interrupted transfer continues where it stopped.

    Raises:
        PartUnavailable: the other host has removed it, or cannot be reached.
        OSError: the file cannot be written.
    """
    try:
        fetch_if_there(source, file, _ATTEMPTS)
    except NotThere as error:
        raise PartUnavailable(f"a part cannot be fetched from {source.url}: {error}") from error


def fetch_if_there(source: PartSource, file: BinaryIO, attempts: int) -> None:
    """Write a part into an empty file, as `fetch_part` does.

    Args:
        attempts: at connecting, and at the rest of an interrupted transfer.

    Raises:
        NotThere: the other host does not have it.
        PartUnavailable: it cannot be reached, or refuses.
        OSError: the file cannot be written.
    """
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(httpx.TransportError),
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=_LONGEST_WAIT_S),
        reraise=True,
    )
    end = time.monotonic() + _LONGEST_READ_S + source.size / _SLOWEST_READ
    # Environment variables for proxies are for other hosts than the engine's own.
    with httpx.Client(timeout=_TIMEOUT, trust_env=False) as client:
        try:
            while not retrying(_fetch_rest, client, source, file, end):
                if time.monotonic() > end:
                    raise _Refused("it has not read the part from the store in time")
                time.sleep(_AGAIN_S)
        except (httpx.HTTPError, httpx.InvalidURL, _Refused) as error:
            why = str(error) or type(error).__name__
            raise PartUnavailable(f"a part cannot be fetched from {source.url}: {why}") from error


class _Refused(Exception):
    """The other host has answered something else than the bytes asked for."""


def _fetch_rest(client: httpx.Client, source: PartSource, file: BinaryIO, end: float) -> bool:
    """Write the rest of a part until `end`; return False if the other host is still reading it."""
    begin = file.seek(0, os.SEEK_END)
    if begin >= source.size:
        return True
    headers = {"Range": f"bytes={begin}-"}
    if source.token:
        headers["Authorization"] = f"Bearer {source.token}"
    with client.stream("GET", source.url, headers=headers) as answer:
        if answer.status_code == httpx.codes.OK:  # all of it
            file.truncate(0)
            file.seek(0)
        elif answer.status_code == httpx.codes.ACCEPTED:
            return False
        elif answer.status_code == httpx.codes.NOT_FOUND:
            raise NotThere("HTTP status 404")
        elif answer.status_code != httpx.codes.PARTIAL_CONTENT:
            raise _Refused(f"HTTP status {answer.status_code}")
        for chunk in answer.iter_raw():
            file.write(chunk)
            if file.tell() > source.size:  # it could fill the disk
                raise _Refused(f"it sends more than the {source.size} bytes of the part")
            if time.monotonic() > end:  # others wait for the part
                raise _Refused(f"it sends less than {_SLOWEST_READ} bytes per second")
    if file.tell() < source.size:
        raise httpx.ReadError("the transfer ended early")
    return True
