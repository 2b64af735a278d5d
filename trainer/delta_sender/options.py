"""Declare the keyword arguments of the senders: name, type, default, documentation and flag.

This is the only declaration. `DeltaSender` takes the keywords of `Options`, `MultiSender` those of
`MultiOptions`; their docstrings and signatures, and the arguments of the command line, are made
from it.
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, TypedDict, TypeVar, cast, get_type_hints

import httpx

from delta_sender.diff_device import SNAPSHOT_ON
from delta_sender.encoding_policy import CHOICES

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Option:
    """The default and the documentation of one keyword argument.

    Attributes:
        default: The value if the argument is not given.
        help: One clause for the docstring and for ``--help``.
        details: More, for the docstring only.
        flag: Keywords of `argparse.ArgumentParser.add_argument`, which replace `help` if they name
            it; None if the command has no such flag.
    """

    default: Any
    help: str
    details: str = ""
    flag: Mapping[str, Any] | None = field(default=None, kw_only=True)


def _seconds(text: str) -> float | None:
    seconds = float(text)
    return seconds if math.isfinite(seconds) else None


class Options(TypedDict, total=False):
    """Keyword arguments of `DeltaSender`."""

    base_version: Annotated[
        int, Option(0, "version the engines are at", flag={"type": int, "metavar": "N"})
    ]
    delta_log: Annotated[
        str | Path | None,
        Option(
            None,
            "a folder that gets every version, durably, before an engine commits it, for engines "
            "that are started with --delta-log",
            "Versions continue from the highest number in it. A version that no engine committed "
            "is marked as refused, and its number is not used again.",
            flag={"type": Path, "metavar": "DIR"},
        ),
    ]
    state: Annotated[
        str | Path | None,
        Option(
            None,
            "a file that remembers over a restart of the sender what each engine has acknowledged; "
            "if the base is what an engine is at, the version in the file counts",
            "One sender at a time may use it. If the base is neither what an engine acknowledged "
            "nor what it was being sent last, the next sync to it is a full one.",
            flag={"type": Path, "metavar": "FILE"},
        ),
    ]
    encoding: Annotated[
        str,
        Option(
            "deltas_zstd",
            "how changes travel; auto: by density and link speed",
            f"One of {', '.join(CHOICES)}. With ``gap8_ulp``, full syncs, dense params and params "
            "that the engine's digest does not cover travel as ``gap8_exp``; so does everything "
            "after an engine has refused differences and taken values, and one sync if its old "
            "values are not the snapshot's. ``auto`` picks, for each param, the fastest of "
            "``gap8_ulp``, ``gap8_exp`` and ``deltas``, sparse or dense; see `SyncReport.picked`.",
            flag={"choices": CHOICES},
        ),
    ]
    bucket_bytes: Annotated[
        int,
        Option(
            256 << 20,
            "most bytes of positions and values in one part, before compression",
            "A param is never split; a larger one travels alone.",
            flag={"type": int, "metavar": "N"},
        ),
    ]
    digest: Annotated[
        bool,
        Option(
            True,
            "keep the digest of the model, and send digests along if the engine has a plan",
            flag={"help": "send no digests along"},
        ),
    ]
    api_key: Annotated[
        str | None,
        Option(
            None,
            "bearer token",
            flag={"metavar": "KEY", "help": "bearer token (default: that in DELTA_API_KEY)"},
        ),
    ]
    hmac_key: Annotated[
        str | None, Option(None, "sign the parts with it, for engines with ``DELTA_HMAC_KEY``")
    ]
    pause_mode: Annotated[
        str,
        Option(
            "keep",
            "requests in flight continue with the new weights (keep), finish first (wait), or end "
            "(abort)",
            flag={"choices": ("keep", "wait", "abort")},
        ),
    ]
    flush_cache: Annotated[
        bool,
        Option(
            True,
            "drop KV entries that the old weights have computed",
            flag={"help": "keep KV entries of the old weights"},
        ),
    ]
    timeout: Annotated[
        float,
        Option(
            600.0,
            "seconds for one request, and for waiting until another sync is out of the way",
            "Connecting is given 10 seconds at most.",
        ),
    ]
    client: Annotated[
        httpx.Client | None, Option(None, "HTTP client to use; it is not closed with the sender")
    ]
    snapshot_on: Annotated[
        str,
        Option(
            "auto",
            f"what CUDA tensors are compared with; one of {', '.join(SNAPSHOT_ON)}",
            "``device``: a copy of the snapshot on their device, which takes the model's size "
            "there. ``host``: the snapshot in pinned host memory, uploaded in chunks. ``auto``: on "
            "the device if that takes at most half of the memory that is free there at the first "
            "sync.",
        ),
    ]
    changes_in_memory: Annotated[
        int | None,
        Option(
            None,
            "most bytes of one sync's changes that are kept in memory until they are committed",
            "The rest is written to a temporary file below ``TMPDIR``. None: a quarter of the "
            "snapshot's size.",
        ),
    ]


class MultiOptions(Options, total=False):
    """Keyword arguments of `MultiSender`."""

    lag_limit: Annotated[
        float | None,
        Option(
            60.0,
            "seconds after the first engine's commit at which a sync returns without the engines "
            "that are not done",
            "None waits for every engine.",
            flag={
                "type": _seconds,
                "metavar": "SECONDS",
                "help": "go on without engines that need SECONDS longer than the first; inf waits "
                "for every engine",
            },
        ),
    ]


@functools.cache
def declared(options: type) -> dict[str, Option]:
    """Return the options that a TypedDict of this module declares, by name."""
    hints = get_type_hints(options, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


_DEFAULTS: Final = {name: option.default for name, option in declared(MultiOptions).items()}


def with_defaults(given: Mapping[str, Any], options: type = MultiOptions) -> MultiOptions:
    """Return every option: as given, or its default.

    Args:
        given: Options by name.
        options: The TypedDict that declares which names are allowed.

    Raises:
        TypeError: A name is not declared.
    """
    if unknown := given.keys() - declared(options).keys():
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
    return cast(MultiOptions, {**_DEFAULTS, **given})


def takes_options(options: type) -> Callable[[_Class], _Class]:
    """Complete the docstring and signature of a class whose ``__init__`` takes ``**options``.

    Args:
        options: The TypedDict that declares them.
    """
    hints = get_type_hints(options)

    def complete(sender: _Class) -> _Class:
        lines = ["", "    Keyword Args:"]
        parameters = [
            parameter
            for parameter in list(inspect.signature(sender).parameters.values())
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        for name, option in declared(options).items():
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=option.default,
                    annotation=hints[name],
                )
            )
            text = f"{name}: {option.help[0].upper()}{option.help[1:]} (default: {option.default})."
            lines += textwrap.wrap(
                f"{text} {option.details}", 100, initial_indent=" " * 8, subsequent_indent=" " * 12
            )
        sender.__doc__ = (sender.__doc__ or "").rstrip() + "\n" + "\n".join(lines) + "\n"
        sender.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return sender

    return complete
