"""The ``--delta-*`` flags, the same for every engine.

The engine's own parser parses them in the API server's process. The workers receive the result in
one environment variable, which reaches every process that an engine spawns without touching the
engine's own configuration.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from typing import Any, Literal

import msgspec

from engine_ext.object_store import is_store_url, store_url

ENVIRONMENT = "DELTA_UPDATES_SETTINGS"
API_KEY_ENVIRONMENT = "DELTA_API_KEY"

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the flags, in bytes and seconds; `add_arguments` describes them."""

    chunk_bytes: int = 512 << 20
    read_workers: int = 4
    roots: tuple[str, ...] = ()
    log: str | None = None
    follow: bool = False
    follow_interval: float = 5.0
    follow_hold: int = 0
    spool_dir: str | None = None
    max_body_bytes: int = 4 << 30
    max_uploads: int = 16
    min_upload_rate: int = 64 << 10
    stage_timeout: float = 60.0
    allow_from: tuple[str, ...] = ()
    base_version: int = 0
    apply: Literal["auto", "scatter", "masked"] = "auto"
    undo_bytes: int = 4 << 30
    shadow_bytes: int = 16 << 30
    keep_plain: bool = False
    scrub_interval: float | None = None
    max_pause: float | None = None
    part_port: int = 0
    cache_dir: str | None = None
    cache_bytes: int = 16 << 30
    streams: int = 8
    fetch_rate: int | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        """The `roots` that are folders; the others are URLs of object stores."""
        return tuple(root for root in self.roots if not is_store_url(root))

    def export(self) -> None:
        """Write the settings to the environment of every process that this one starts."""
        os.environ[ENVIRONMENT] = msgspec.json.encode(self).decode()


def bearer_headers(token: str | None = None) -> dict[str, str]:
    """Return the HTTP headers with this token, or else the environment's; none without any."""
    token = token or os.environ.get(API_KEY_ENVIRONMENT)
    return {"Authorization": f"Bearer {token}"} if token else {}


def from_environment() -> Settings | None:
    """Return the settings that a parent exported, or None; ValueError if they are damaged."""
    text = os.environ.get(ENVIRONMENT)
    return msgspec.json.decode(text, type=Settings) if text else None


def from_namespace(args: argparse.Namespace) -> Settings | None:
    """Return the settings in parsed arguments, or None without ``--enable-delta-updates``.

    ValueError is raised if another delta flag is given without it.
    """
    given = {
        field: value
        for field in Settings.__struct_fields__
        if (value := getattr(args, _dest(field), None)) is not None
    }
    if getattr(args, "enable_delta_updates", False):
        if "log" not in given and "follow" in given:
            raise ValueError("--delta-follow needs --delta-log")
        if "follow" not in given and (more := {"follow_interval", "follow_hold"} & given.keys()):
            flags = ", ".join("--" + _dest(field).replace("_", "-") for field in sorted(more))
            raise ValueError(f"{flags} needs --delta-follow")
        return msgspec.convert(given, Settings)
    if given:
        flags = ", ".join("--" + _dest(field).replace("_", "-") for field in given)
        raise ValueError(f"{flags} needs --enable-delta-updates")
    return None


def _dest(field: str) -> str:
    return "delta_root" if field == "roots" else f"delta_{field}"


def parse_size(text: str) -> int:
    """Return the bytes in ``1048576``, ``512M`` or ``4GiB``; ArgumentTypeError if not above 0."""
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


def _parse_port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"not a TCP port: {text!r}")
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


def _parse_location(text: str) -> str:
    if not is_store_url(text):
        return _parse_directory(text)
    try:
        return store_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not a network: {error}") from None


class _StoreInEnvironment(argparse.Action):
    """Stores a secret in the environment, because engines log their parsed arguments."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        os.environ[API_KEY_ENVIRONMENT] = str(values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to an engine's own parser, as one group."""
    defaults = Settings()
    group = parser.add_argument_group(
        "DeltaUpdates",
        "Sparse weight updates by HTTP or from a shared folder, applied bit-exactly to the "
        "running model or refused with the engine unchanged.",
    )

    def add(usage: str, help: str, **options: Any) -> None:
        flag, _, value = usage.partition(" ")
        if value:
            options["metavar"] = value
        group.add_argument(flag, help=help, default=argparse.SUPPRESS, **options)

    group.add_argument(
        "--enable-delta-updates",
        action="store_true",
        default=False,
        help="Accept sparse weight updates at POST /update_weights_delta.",
    )
    add(
        "--delta-chunk-bytes BYTES",
        "Most bytes of full-shape tensors in one call of the model's loader (masked apply) "
        f"(default: {defaults.chunk_bytes >> 20}M).",
        type=parse_size,
    )
    add(
        "--delta-read-workers N",
        "Parts that a rank stages at once, and that are begun at once of a request that names "
        f"several files (default: {defaults.read_workers}).",
        type=_parse_positive,
    )
    add(
        "--delta-root DIR",
        "A folder, or a URL in an object store (s3://BUCKET/PREFIX), below which disk requests may "
        "read; repeatable. Without any, disk requests are refused.",
        type=_parse_location,
        action="append",
    )
    add(
        "--delta-log LOG",
        "A folder, or a URL in an object store (s3://BUCKET/PREFIX; also gs:// and az://), that a "
        "sender writes its versions into (its --delta-log). Versions newer "
        "than the loaded weights are replayed before the engine serves, each verified as if it "
        "came by HTTP, and later by POST /delta_catch_up. If one is damaged or missing, the engine "
        "stays on the last good version and reports it.",
        type=_parse_location,
    )
    add(
        "--delta-follow",
        "Follow the delta log: look for new versions, stage them beside generation and commit "
        "them; several that wait are applied as one. The engine takes versions from the log alone "
        "then: updates by requests are refused.",
        action="store_true",
    )
    add(
        "--delta-follow-interval SECONDS",
        "Seconds between two looks at the log, with a fifth of jitter; POST /delta_catch_up is one "
        f"at once (default: {defaults.follow_interval:g}).",
        type=_parse_seconds,
    )
    add(
        "--delta-follow-hold N",
        f"Stay so many versions behind the log's newest (default: {defaults.follow_hold}).",
        type=_parse_version,
    )
    add(
        "--delta-spool-dir DIR",
        "Folder for request bodies while they are staged (default: /dev/shm, or the temporary "
        "folder if that is too small).",
        type=_parse_directory,
    )
    add(
        "--delta-max-body-bytes BYTES",
        f"Largest part that is accepted, decompressed (default: {defaults.max_body_bytes >> 30}G).",
        type=parse_size,
    )
    add(
        "--delta-max-uploads N",
        "Updates that one HTTP process accepts at once; more are answered 429 "
        f"(default: {defaults.max_uploads}).",
        type=_parse_positive,
    )
    add(
        "--delta-min-upload-rate BYTES",
        f"Minimum bytes per second over a whole body (default: {defaults.min_upload_rate >> 10}K).",
        type=parse_size,
    )
    add(
        "--delta-stage-timeout SECONDS",
        "Seconds after its last part for which an unfinished sync keeps other senders out, "
        f"and for which a body may stall (default: {defaults.stage_timeout:g}).",
        type=_parse_seconds,
    )
    add(
        "--delta-base-version N",
        f"Version of the loaded weights (default: {defaults.base_version}).",
        type=_parse_version,
    )
    add(
        "--delta-apply",
        "How certified tensors are written: directly (scatter), or through the model's own "
        f"loader (masked). auto is scatter (default: {defaults.apply}).",
        choices=("auto", "scatter", "masked"),
    )
    add(
        "--delta-undo-bytes BYTES",
        "Host memory per rank for the old values of the last version, which undo a failed "
        "write and allow a rollback. A sync that would need more must be full "
        f"(default: {defaults.undo_bytes >> 30}G).",
        type=parse_size,
    )
    add(
        "--delta-shadow-bytes BYTES",
        "Host memory per rank for weights as they are before post-load processing, of the modules "
        "that the engine quantises or packs: a sync rebuilds these from it. A module that does not "
        f"fit is not updated (default: {defaults.shadow_bytes >> 30}G).",
        type=parse_size,
    )
    add(
        "--delta-keep-plain",
        "On CPU, keep linear weights in the checkpoint's layout, where vLLM would pack them for a "
        "faster kernel. A sync is then written in place and faster, generation slower.",
        action="store_true",
    )
    add(
        "--delta-scrub-interval SECONDS",
        "Compare every tensor in live memory with the tracked digest once per so many seconds, in "
        "the background and with at most a twentieth of one core per rank, which may take longer. "
        "What differs is counted, logged and in the status (default: off).",
        type=_parse_seconds,
    )
    add(
        "--delta-max-pause SECONDS",
        "Resume generation that a caller has paused for longer, such as a trainer that died before "
        "it resumed. It must be longer than any pause that a trainer needs: weights that something "
        "else than a delta is writing would be served half-written (default: off).",
        type=_parse_seconds,
    )
    add(
        "--delta-part-port PORT",
        "For an engine on several hosts: TCP port of the first host at which the others fetch "
        f"parts (default: {defaults.part_port}, any free one).",
        type=_parse_port,
    )
    add(
        "--delta-cache-dir DIR",
        "For an engine on several hosts, or a log in an object store: a folder that only this user "
        "can write into, where a host keeps the parts that it has fetched, once for all of its "
        "engines and ranks (default: one in the temporary folder).",
        type=_parse_directory,
    )
    add(
        "--delta-cache-bytes BYTES",
        f"Bytes of parts that are kept in this folder (default: {defaults.cache_bytes >> 30}G).",
        type=parse_size,
    )
    add(
        "--delta-streams N",
        "Requests at once for one part in an object store, each for a range of it "
        f"(default: {defaults.streams}).",
        type=_parse_positive,
    )
    add(
        "--delta-fetch-rate BYTES",
        "Most bytes per second that this engine fetches from an object store, for links that are "
        "shared (default: no limit).",
        type=parse_size,
    )
    add(
        "--delta-allow-from CIDR",
        "A network (10.0.4.0/24) whose clients may use the delta endpoints without a token, as "
        "those on this host may; repeatable. Whoever can send from there can replace the weights. "
        "Without effect if a token is set (default: none).",
        type=_parse_network,
        action="append",
    )
    add(
        "--delta-api-key TOKEN",
        "Bearer token of the delta endpoints; without one they answer only to clients on this "
        f"host (default: {API_KEY_ENVIRONMENT}).",
        action=_StoreInEnvironment,
    )
