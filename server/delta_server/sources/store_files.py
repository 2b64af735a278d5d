"""Bring the files of a disk request, or of a pull, to this host, if they are in an object store.

A request names a URL; ``--delta-root`` sets which URLs it can name. Credentials
are those of the engine's environment, never of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from delta_server.request_options import DiskRequest
from delta_server.sources.disk_files import is_read, list_names, resolve_files
from delta_server.waiting import held_by_thread
from engine_ext.errors import (
    LogDamaged,
    MalformedPart,
    PartUnavailable,
    PathForbidden,
    SpoolFull,
    TooLarge,
)
from engine_ext.files import is_full
from engine_ext.format import SIGNATURE_SUFFIX, Limits
from engine_ext.log import (
    DONE,
    MAX_DONE_BYTES,
    FileFacts,
    ObjectFacts,
    Objects,
    fetch_object,
    parse_done,
)
from engine_ext.remote_parts import LocalFolder, PartCache
from engine_ext.resources import RateLimit
from engine_ext.settings import Settings
from engine_ext.store_urls import is_store_url, is_within, store_url
from engine_ext.version_folders import INDEX

_SUFFIX: Final = ".safetensors"
_MAX_FILES: Final = Limits().max_parts


@dataclass(frozen=True, slots=True)
class ResolvedFiles:
    """The files of a request on this host: `delta_server.sources.disk_files.resolve_files`.

    Attributes:
        roots: folders below which they are.
        url: what their folder is a copy of, if they were fetched.
        bring_index: see `StoreFiles.bring_index`; for folders next to that one.
    """

    paths: list[Path]
    roots: Sequence[str]
    url: str | None = None
    bring_index: Callable[[Path], object] | None = None


class StoreFiles:
    """Resolves disk requests of one engine, in folders and in object stores.

    Args:
        settings: the allowed folders and URLs.
        folders: those that `list_names` reads; more than requests can name.
        limit: of the bytes that are fetched; None for no limit.
        cache: keeps what has a hash, for other engines of this host; None without a store.
    """

    def __init__(
        self,
        settings: Settings,
        folders: Sequence[str],
        limit: RateLimit | None,
        cache: PartCache | None,
    ) -> None:
        self._settings, self._folders = settings, folders
        self._limit, self._cache = limit, cache
        self._stores: dict[str, Objects] = {}  # by root

    @contextlib.asynccontextmanager
    async def resolved(self, request: DiskRequest) -> AsyncIterator[ResolvedFiles]:
        """Have the files of a request.

        Raises:
            PathForbidden: they are not below a --delta-root.
            MalformedPart, TooLarge: see `resolve_files`; or the URL is not valid.
            PartUnavailable: the store cannot be read now, or an object was replaced meanwhile.
            SpoolFull: there is no room for them.
        """
        if not is_store_url(request.model_path):
            folders = self._settings.folders
            paths = await asyncio.to_thread(resolve_files, request, folders)
            yield ResolvedFiles(paths, folders)
            return
        async with held_by_thread(self.scratch) as scratch:
            folder, url = await asyncio.to_thread(self._fetch, request, scratch.path)
            local = msgspec.structs.replace(request, model_path=str(folder))
            roots = [str(scratch.path)]
            paths = await asyncio.to_thread(resolve_files, local, roots)
            yield ResolvedFiles(paths, roots, url, lambda beside: self._bring_beside(url, beside))

    def allowed(self, url: str) -> str:
        """Return a URL that requests can name, without a trailing slash.

        Raises:
            PathForbidden, MalformedPart, PartUnavailable: see `resolved`.
        """
        with _reported():
            store, prefix = self._open(url)
            return f"{store.url}/{prefix}".rstrip("/")

    def scratch(self) -> LocalFolder:
        """Return a new folder for what is fetched.

        Raises:
            PartUnavailable, SpoolFull: it cannot be made.
        """
        with _reported():
            return LocalFolder(self._cache)

    def list_names(self, folder: str) -> list[str]:
        """Return the names in a folder, or directly below a URL; none if the URL has nothing.

        Raises:
            PathForbidden, MalformedPart, PartUnavailable: see `resolved`.
        """
        if not is_store_url(folder):
            return list_names(Path(folder), self._folders)
        with _reported():
            store, prefix = self._open(folder)
            return [name for name in _listed(store, prefix) if "/" not in name]

    def marks(self, url: str) -> dict[str, str]:
        """Return a mark per file of a version below a URL, which changes with the file's content.

        Raises:
            PathForbidden, MalformedPart, PartUnavailable: see `resolved`.
        """
        with _reported():
            store, prefix = self._open(url)
            listed = _listed(store, prefix)
            return {name: f"{one.size}:{one.tag}" for name, one in listed.items() if is_read(name)}

    def bring_index(self, url: str, folder: Path) -> list[str]:
        """Make a folder with the index of a version that might hold nothing: it has no other files.

        Nothing is fetched, and no folder is made, for another version.

        Returns:
            The names directly below the URL.

        Raises:
            PathForbidden, MalformedPart, PartUnavailable, SpoolFull: see `resolved`.
        """
        with _reported():
            store, prefix = self._open(url)
            listed = _listed(store, prefix)
            names = [name for name in listed if "/" not in name]
            if INDEX in names and not any(name.endswith(_SUFFIX) for name in names):
                folder.mkdir()
                fetch_object(store, listed[INDEX], folder / INDEX, None, None)
            return names

    def _bring_beside(self, url: str, folder: Path) -> None:
        """Bring the index of the folder of this name next to another one."""
        parent = url.rpartition("/")[0]
        with contextlib.suppress(PathForbidden):  # files next to a root are forbidden
            self.bring_index(f"{parent}/{folder.name}", folder)

    def _fetch(self, request: DiskRequest, scratch: Path) -> tuple[Path, str]:
        """Fetch the files of a request; return the folder that has them, and its URL."""
        with _reported():
            store, prefix = self._open(request.model_path)
            listed = _listed(store, prefix)
            names = request.files
            if names is None:
                names = [name for name in listed if name.endswith(_SUFFIX) and "/" not in name]
                names += [name for name in (INDEX,) if name in listed]
            if len(names) > _MAX_FILES:
                raise TooLarge(f"{len(names)} files in one request", limit=_MAX_FILES)
            if len(set(names)) < len(names):
                raise MalformedPart("a file is named twice")
            url = f"{store.url}/{prefix}".rstrip("/")
            folder = scratch / url.rpartition("/")[2]
            folder.mkdir()
            facts = self._facts(store, listed)
            for name in names:
                if Path(name).name != name:
                    raise PathForbidden(f"{name!r} is not the name of an object below the URL")
                if name not in listed:
                    raise MalformedPart(f"cannot read {name}: there is no such object", file=name)
                for one in (name, name + SIGNATURE_SUFFIX):
                    if one in listed:
                        fetch_object(store, listed[one], folder / one, facts.get(one), self._cache)
            # Ranges are read one by one. Only of what has no hash nothing else would show a change.
            if names_without := [name for name in names if name not in facts]:
                again = _listed(store, prefix)
                for name in names_without:
                    if name not in again or again[name].tag != listed[name].tag:
                        raise PartUnavailable(f"{name} was replaced while it was read", file=name)
            return folder, url

    def _open(self, url: str) -> tuple[Objects, str]:
        """Return the store of an allowed root, and the prefix of a URL below it."""
        try:
            url = store_url(url)
        except ValueError as error:
            raise MalformedPart(str(error)) from error
        for root in self._settings.roots:
            if is_store_url(root) and is_within(url, root):
                if root not in self._stores:
                    streams = self._settings.streams
                    self._stores[root] = Objects(root, streams=streams, limit=self._limit)
                return self._stores[root], url[len(root) :].strip("/")
        raise PathForbidden("the URL is not below a --delta-root")

    def _facts(self, store: Objects, listed: Mapping[str, ObjectFacts]) -> Mapping[str, FileFacts]:
        """Return what ``DONE`` says about the files, if there is one."""
        if self._cache is None or DONE not in listed or not listed[DONE].size:
            return {}
        try:
            return parse_done(store.read(listed[DONE].name, MAX_DONE_BYTES)).files
        except LogDamaged as error:
            raise MalformedPart(error.message) from error


def _listed(store: Objects, prefix: str) -> dict[str, ObjectFacts]:
    """Return the objects below a prefix, by the rest of their names."""
    return {one.name.removeprefix(prefix).lstrip("/"): one for one in store.list(prefix)}


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Raise what a store or the folder of this host raises as a `DeltaError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise MalformedPart(f"cannot read {error.filename}: {error.strerror}") from error
    except OSError as error:
        if is_full(error):
            raise SpoolFull("there is no room for the files of the request") from error
        raise PartUnavailable(f"{error.filename}: {error.strerror}") from error
