"""Bring the files of a disk request to this host, if they are in an object store.

A request names a URL; which one it may name, the operator says with ``--delta-root``. Credentials
are those of the engine's environment, never of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from delta_server.disk_files import resolve_files
from delta_server.request_options import DiskRequest
from engine_ext.delta_log import DONE, FileFacts, fetch_object, read_done
from engine_ext.errors import (
    LogDamaged,
    MalformedPart,
    PartUnavailable,
    PathForbidden,
    SpoolFull,
    TooLarge,
)
from engine_ext.object_store import ObjectFacts, ObjectStore, is_store_url, is_within, store_url
from engine_ext.rate_limit import RateLimit
from engine_ext.remote_parts import LocalFolder, PartCache
from engine_ext.settings import Settings
from engine_ext.version_folders import INDEX
from engine_ext.wire import SIGNATURE_SUFFIX, Limits

_SUFFIX: Final = ".safetensors"
_MAX_FILES: Final = Limits().max_parts
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class StoreFiles:
    """Resolves disk requests of one engine, in folders and in object stores.

    Args:
        settings: the allowed folders and URLs.
        limit: of the bytes that are fetched; None for no limit.
        cache: keeps what has a hash, for other engines of this host; None without a store.
    """

    def __init__(
        self, settings: Settings, limit: RateLimit | None, cache: PartCache | None
    ) -> None:
        self._settings, self._limit, self._cache = settings, limit, cache

    @contextlib.asynccontextmanager
    async def resolved(
        self, request: DiskRequest
    ) -> AsyncIterator[tuple[list[Path], Sequence[str]]]:
        """Have the files of a request; yield their real paths, and folders that they are below.

        Raises:
            PathForbidden: they are not below a --delta-root.
            MalformedPart, TooLarge: see `resolve_files`; or the URL is not valid.
            PartUnavailable: the store cannot be read now.
            SpoolFull: there is no room for them.
        """
        if not is_store_url(request.model_path):
            folders = self._settings.folders
            yield resolve_files(request, folders), folders
            return
        with LocalFolder(self._cache) as scratch:
            try:
                folder = await asyncio.to_thread(self._fetch, request, scratch.path)
            except FileNotFoundError as error:
                why = f"cannot read {error.filename}: {error.strerror}"
                raise MalformedPart(why) from error
            except OSError as error:
                if error.errno in _NO_ROOM:
                    raise SpoolFull("there is no room for the files of the request") from error
                raise PartUnavailable(f"{error.filename}: {error.strerror}") from error
            local = msgspec.structs.replace(request, model_path=str(folder))
            roots = [str(scratch.path)]
            yield resolve_files(local, roots), roots

    def _fetch(self, request: DiskRequest, scratch: Path) -> Path:
        """Fetch the files of a request; return the folder that has them."""
        store, prefix = self._open(request.model_path)
        listed = {
            found.name.removeprefix(prefix).lstrip("/"): found for found in store.list(prefix)
        }
        names = request.files
        if names is None:
            names = [name for name in listed if name.endswith(_SUFFIX) and "/" not in name]
            names += [name for name in (INDEX,) if name in listed]
        if len(names) > _MAX_FILES:
            raise TooLarge(f"{len(names)} files in one request", limit=_MAX_FILES)
        folder = scratch / (prefix or store.url).rpartition("/")[2]
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
        return folder

    def _open(self, url: str) -> tuple[ObjectStore, str]:
        """Return the store of an allowed root, and the prefix of a URL below it."""
        try:
            url = store_url(url)
        except ValueError as error:
            raise MalformedPart(str(error)) from error
        for root in self._settings.roots:
            if is_store_url(root) and is_within(url, root):
                streams = self._settings.streams
                store = ObjectStore(root, streams=streams, limit=self._limit)
                return store, url[len(root) :].strip("/")
        raise PathForbidden("the URL is not below a --delta-root")

    def _facts(
        self, store: ObjectStore, listed: Mapping[str, ObjectFacts]
    ) -> Mapping[str, FileFacts]:
        """Return what ``DONE`` says about the files, if there is one."""
        if self._cache is None or DONE not in listed or not listed[DONE].size:
            return {}
        try:
            return read_done(store, listed[DONE].name).files
        except LogDamaged as error:
            raise MalformedPart(error.message) from error
