"""The ``--delta-*`` flags, the same for every engine.

The engine's own parser parses them in the API server's process. The workers receive the result in
one environment variable, which reaches every process that an engine spawns without touching the
engine's own configuration.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

ENVIRONMENT = "DELTA_UPDATES_SETTINGS"
API_KEY_ENVIRONMENT = "DELTA_API_KEY"

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the flags, in bytes and seconds.

    Attributes:
        chunk_bytes: largest total size of the full-shape tensors in one call of the engine's
            loader.
        read_workers: parts that a rank decodes at once, and files that it reads at once. A large
            part is decoded by three threads.
        roots: directories below which disk requests may read.
        log: the delta log whose versions are replayed at start-up, or None.
        spool_dir: directory of the request bodies that are being staged; None chooses one.
        max_body_bytes: size limit of a decompressed part.
        max_uploads: updates that one HTTP process accepts at once.
        min_upload_rate: minimum average rate of an upload, in bytes per second.
        stage_timeout: seconds after its last part until a staged sync expires, and how long an
            upload may stall.
        base_version: version of the freshly loaded weights.
        apply: ``scatter``, ``masked``, or ``auto``, which is ``scatter``.
        undo_bytes: host memory per rank for the old values of the last version.
    """

    chunk_bytes: int = 512 << 20
    read_workers: int = 4
    roots: tuple[str, ...] = ()
    log: str | None = None
    spool_dir: str | None = None
    max_body_bytes: int = 4 << 30
    max_uploads: int = 16
    min_upload_rate: int = 64 << 10
    stage_timeout: float = 60.0
    base_version: int = 0
    apply: Literal["auto", "scatter", "masked"] = "auto"
    undo_bytes: int = 4 << 30

    def export(self) -> None:
        """Write the settings to the environment of every process that this one starts."""
        os.environ[ENVIRONMENT] = msgspec.json.encode(self).decode()


def from_environment() -> Settings | None:
    """Return the settings that a parent process exported, or None if updates are not enabled.

    Raises:
        ValueError: the environment variable is damaged.
    """
    text = os.environ.get(ENVIRONMENT)
    return msgspec.json.decode(text, type=Settings) if text else None


def from_namespace(args: argparse.Namespace) -> Settings | None:
    """Return the settings in parsed arguments, or None without ``--enable-delta-updates``.

    Raises:
        ValueError: another delta flag is given without ``--enable-delta-updates``.
    """
    given = {
        field: value
        for field in Settings.__struct_fields__
        if (value := getattr(args, _dest(field), None)) is not None
    }
    if getattr(args, "enable_delta_updates", False):
        return msgspec.convert(given, Settings)
    if given:
        flags = ", ".join("--" + _dest(field).replace("_", "-") for field in given)
        raise ValueError(f"{flags} needs --enable-delta-updates")
    return None


def _dest(field: str) -> str:
    return "delta_root" if field == "roots" else f"delta_{field}"


def parse_size(text: str) -> int:
    """Return the bytes in ``1048576``, ``512M`` or ``4GiB``.

    Raises:
        argparse.ArgumentTypeError: it is not a size above 0.
    """
    match = re.fullmatch(r"([0-9]+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (examples: 1048576, 512M, 4GiB)")
    return int(match[1]) * _UNITS[match[2]]


def _parse_version(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"not a version: {text!r} (a decimal from 0 to 2^63-1)")
    return int(text)


def _parse_positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"not a positive number: {text!r}")
    return int(text)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"not a number of seconds above 0: {text!r}")
    return seconds


def _parse_directory(text: str) -> str:
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"not a directory: {text}")
    return os.path.realpath(text)


class _StoreInEnvironment(argparse.Action):
    """Stores a secret in the environment, because engines log their parsed arguments."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        os.environ[API_KEY_ENVIRONMENT] = str(values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to an engine's own parser, as one group."""
    defaults = Settings()
    group = parser.add_argument_group(
        "DeltaUpdates",
        "Sparse weight updates by HTTP or from a shared folder, applied bit-exactly to the "
        "running model or refused with the engine unchanged.",
    )
    group.add_argument(
        "--enable-delta-updates",
        action="store_true",
        default=False,
        help="Accept sparse weight updates at POST /update_weights_delta.",
    )
    group.add_argument(
        "--delta-chunk-bytes",
        type=parse_size,
        default=argparse.SUPPRESS,
        metavar="BYTES",
        help="Most bytes of full-shape tensors in one call of the model's loader (masked apply) "
        f"(default: {defaults.chunk_bytes >> 20}M).",
    )
    group.add_argument(
        "--delta-read-workers",
        type=_parse_positive,
        default=argparse.SUPPRESS,
        metavar="N",
        help="Parts that a rank reads, verifies and decodes at once; a large one uses up to three "
        f"threads (default: {defaults.read_workers}).",
    )
    group.add_argument(
        "--delta-root",
        type=_parse_directory,
        action="append",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="A folder below which disk requests may read; repeatable. Without any, disk "
        "requests are refused.",
    )
    group.add_argument(
        "--delta-log",
        type=_parse_directory,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="A folder that a sender writes its versions into (its --delta-log). Versions newer "
        "than the loaded weights are replayed before the engine serves, each verified as if it "
        "came by HTTP, and later by POST /delta_catch_up. If one is damaged or missing, the engine "
        "stays on the last good version and reports it.",
    )
    group.add_argument(
        "--delta-spool-dir",
        type=_parse_directory,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="Folder for request bodies while they are staged (default: /dev/shm, or the temporary "
        "folder if that is too small).",
    )
    group.add_argument(
        "--delta-max-body-bytes",
        type=parse_size,
        default=argparse.SUPPRESS,
        metavar="BYTES",
        help="Largest part that is accepted, decompressed "
        f"(default: {defaults.max_body_bytes >> 30}G).",
    )
    group.add_argument(
        "--delta-max-uploads",
        type=_parse_positive,
        default=argparse.SUPPRESS,
        metavar="N",
        help="Updates that one HTTP process accepts at once; more are answered 429 "
        f"(default: {defaults.max_uploads}).",
    )
    group.add_argument(
        "--delta-min-upload-rate",
        type=parse_size,
        default=argparse.SUPPRESS,
        metavar="BYTES",
        help="Minimum bytes per second over a whole body "
        f"(default: {defaults.min_upload_rate >> 10}K).",
    )
    group.add_argument(
        "--delta-stage-timeout",
        type=_parse_seconds,
        default=argparse.SUPPRESS,
        metavar="SECONDS",
        help="Seconds after its last part for which an unfinished sync keeps other senders out, "
        f"and for which a body may stall (default: {defaults.stage_timeout:g}).",
    )
    group.add_argument(
        "--delta-base-version",
        type=_parse_version,
        default=argparse.SUPPRESS,
        metavar="N",
        help=f"Version of the loaded weights (default: {defaults.base_version}).",
    )
    group.add_argument(
        "--delta-apply",
        choices=("auto", "scatter", "masked"),
        default=argparse.SUPPRESS,
        help="How certified tensors are written: directly (scatter), or through the model's own "
        f"loader (masked). auto is scatter (default: {defaults.apply}).",
    )
    group.add_argument(
        "--delta-undo-bytes",
        type=parse_size,
        default=argparse.SUPPRESS,
        metavar="BYTES",
        help="Host memory per rank for the old values of the last version, which undo a failed "
        "write and allow a rollback. A sync that would need more must be full "
        f"(default: {defaults.undo_bytes >> 30}G).",
    )
    group.add_argument(
        "--delta-api-key",
        action=_StoreInEnvironment,
        default=argparse.SUPPRESS,
        metavar="TOKEN",
        help="Bearer token of the delta endpoints; without one they answer only to clients on this "
        f"host (default: {API_KEY_ENVIRONMENT}).",
    )
