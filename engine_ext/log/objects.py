"""Read and write the objects below one prefix of a store.

Every failure is an `OSError`, as with files: FileNotFoundError, FileExistsError, PermissionError,
or with `errno.EIO`. Failures that can pass are tried again first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from engine_ext.resources import RateLimit

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore as AnyStore

RANGE_BYTES: Final = 4 << 20  # of one request of a large object
STREAMS: Final = 8  # requests at once for one object
_ATTEMPTS: Final = 6
_LONGEST_WAIT_S: Final = 4.0
_LISTED_AT_ONCE: Final = 1000
_MOST_MESSAGE: Final = 300
# The client's own, of one request. It also continues where a body has ended early.
_RETRIES: Final[Any] = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What a listing has about an object.

    Attributes:
        name: below the prefix.
        size: in bytes.
        written_at: Unix time by the store's clock.
        tag: changes with the content.
    """

    name: str
    size: int
    written_at: float
    tag: str


class Objects:
    """The objects below a URL. Thread-safe.

    Args:
        url: see `engine_ext.store_urls.store_url`.
        streams: ranges of one object that are read at once.
        limit: of the bytes that are read.
        store: the client's own object in place of one for `url`.
        sleep: waits some seconds before a repeat.

    Raises:
        OSError: the client's configuration is not valid.
    """

    def __init__(
        self,
        url: str,
        *,
        streams: int = STREAMS,
        limit: RateLimit | None = None,
        store: AnyStore | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self._streams, self._limit = url, streams, limit
        # Needed only where a URL is named.
        import obstore
        import tenacity
        from obstore.store import from_url

        self._client = obstore
        with self._as_os_error():
            self._store = store or from_url(url, retry_config=_RETRIES)
        self._retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=tenacity.stop_after_attempt(_ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=_LONGEST_WAIT_S),
            reraise=True,
            sleep=sleep,
        )

    def list(self, prefix: str = "") -> list[ObjectFacts]:
        """Return the objects below a prefix of whole names, by name."""

        def listed() -> list[ObjectFacts]:
            with self._as_os_error(prefix):
                chunks = self._client.list(self._store, prefix or None, chunk_size=_LISTED_AT_ONCE)
                return [_facts(found) for chunk in chunks for found in chunk]

        return sorted(self._retrying(listed), key=lambda found: found.name)

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a small object; OSError if it has more than `most` bytes."""

        def read() -> bytes:
            with self._as_os_error(name):
                found = self._client.get(self._store, name)
                if found.meta["size"] > most:
                    raise OSError(errno.EFBIG, f"it has over {most} bytes", f"{self.url}/{name}")
                return bytes(found.bytes())

        return self._retrying(read)

    def fetch(self, name: str, size: int, file: BinaryIO) -> None:
        """Write an object into an empty file, several ranges at a time.

        A range that fails is asked for again, and no other with it.

        Raises:
            OSError: the object cannot be read, has not `size` bytes, or the file is not written.
        """

        def fetch(begin: int) -> None:
            length = min(RANGE_BYTES, size - begin)
            if self._limit is not None:
                self._limit.wait(length)
            written = 0
            with memoryview(self._retrying(self._range, name, begin, length)) as data:
                while written < length:
                    written += os.pwrite(file.fileno(), data[written:], begin + written)

        with ThreadPoolExecutor(self._streams, "delta-fetch") as pool:
            try:
                for _ in pool.map(fetch, range(0, size, RANGE_BYTES)):
                    pass
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _range(self, name: str, begin: int, length: int) -> Bytes:
        with self._as_os_error(name):
            data = self._client.get_range(self._store, name, start=begin, length=length)
        if len(data) != length:
            found = f"{len(data)} of {length} bytes from {begin} on"
            raise OSError(errno.EIO, found, f"{self.url}/{name}")
        return data

    def put(self, name: str, data: bytes) -> None:
        """Write an object, whether or not it is there."""

        def put() -> None:
            with self._as_os_error(name):
                self._client.put(self._store, name, data)

        self._retrying(put)

    def create(self, name: str, data: bytes) -> None:
        """Write an object that must not be there; FileExistsError if it has other content.

        `data` is unique: the answer to a request that succeeded can be lost, so an object with
        just these bytes counts as this one.
        """

        def create() -> None:
            with self._as_os_error(name):
                self._client.put(self._store, name, data, mode="create")

        try:
            self._retrying(create)
        except FileExistsError as exists:
            try:
                found = self.read(name, len(data))
            except FileNotFoundError:  # whoever had created it has deleted it since
                raise exists from None
            except OSError as error:
                if error.errno == errno.EFBIG:  # it is longer, so it has other content
                    raise exists from None
                raise
            if found != data:
                raise

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, whether or not they are there."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._retrying(self._delete, name)

    def _delete(self, name: str) -> None:
        with self._as_os_error(name):
            self._client.delete(self._store, name)

    def require_creates(self) -> None:
        """Check that the store refuses to create an object that is there.

        Raises:
            OSError: it does not (`errno.ENOTSUP`), or cannot be written.
        """
        name = f"probe/{uuid.uuid4().hex}"
        self.create(name, b"first")
        try:
            with self._as_os_error(name):
                self._client.put(self._store, name, b"second", mode="create")
        except FileExistsError:
            return
        finally:
            self.delete([name])
        message = (
            "the store lets an object be created that is there already, so two senders could write "
            "one version; use a store with conditional writes (If-None-Match)"
        )
        raise OSError(errno.ENOTSUP, message, self.url)

    @contextlib.contextmanager
    def _as_os_error(self, name: str = "") -> Iterator[None]:
        """Raise what the client raises as an `OSError`."""
        exceptions = self._client.exceptions
        path = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except (exceptions.NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", path) from error
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise FileExistsError(errno.EEXIST, "there is such an object", path) from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise PermissionError(errno.EACCES, _brief(error), path) from error
        except (exceptions.BaseError, ValueError) as error:  # ValueError: a name that none can have
            raise OSError(errno.EIO, _brief(error), path) from error


def _facts(found: Any) -> ObjectFacts:
    written_at = found["last_modified"].timestamp()
    tag = str(found["e_tag"] or written_at)
    return ObjectFacts(found["path"], found["size"], written_at, tag)


def _brief(error: Exception) -> str:
    """Return the first line of the client's message; the rest is its own objects."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0][:_MOST_MESSAGE]


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EIO
