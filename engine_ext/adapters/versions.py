"""The versions of an engine that an adapter supports, and the features that some of them lack."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
from dataclasses import dataclass
from typing import Final

ENVIRONMENT: Final = "DELTA_UPDATES_ENGINE_VERSION"

logger = logging.getLogger(__name__)

# A release, also one that was built or released again; not a development version or a candidate.
_RELEASE: Final = re.compile(r"(\d+(?:\.\d+)+)(?:\.post\d+)?(?:\+[\w.]+)?")


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of one engine that are supported.

    Attributes:
        engine: its name.
        supported: the versions, the oldest first; each stands for the releases that begin with it.
        not_run: those of `supported` that never ran as an engine; the tests check their Python
            sources only.
    """

    engine: str
    supported: tuple[str, ...]
    not_run: tuple[str, ...] = ()

    def require(self, installed: str) -> str:
        """Return which of the supported versions an engine is, by the version that it reports.

        A build that reports no release (of a changed checkout, for example) is taken for what
        `ENVIRONMENT` names.

        Raises:
            ValueError: the version is not supported. The engine must not start.
        """
        named = os.environ.get(ENVIRONMENT)
        if named:
            logger.warning("%s %s is taken for %s: %s", self.engine, installed, named, ENVIRONMENT)
        release = _RELEASE.fullmatch(named or installed)
        for version in self.supported:
            if release and f"{release[1]}.".startswith(f"{version}."):
                if version in self.not_run:
                    logger.warning(
                        "%s %s: delta updates were checked against its Python sources only, and "
                        "never run in it; start-up still proves every placement or refuses it",
                        *(self.engine, version),
                    )
                return version
        shown = f"{named} ({ENVIRONMENT})" if named else installed
        raise ValueError(
            f"--enable-delta-updates does not work with {self.engine} {shown}; the supported "
            f"versions are {', '.join(self.supported)}. Install one, for example with pip install "
            f"'{self.engine.lower()}=={self.supported[-1]}.*'. For a build of one of these that "
            f"reports another version, set {ENVIRONMENT} to the release that it was made from"
        )


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that not every supported version of an engine has.

    Attributes:
        what: its description.
        owner: the module, and after a colon the class if there is one, that has it.
        name: the attribute of `owner` that shows that it is there.
        since: the first supported version that has it.
        without: what delta updates do without it.
    """

    what: str
    owner: str
    name: str
    since: str
    without: str

    def offered(self) -> bool:
        """Return whether the installed engine has it."""
        module, _, path = self.owner.partition(":")
        names = path.split(".") if path else []
        return hasattr(functools.reduce(getattr, names, importlib.import_module(module)), self.name)
