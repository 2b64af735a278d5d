"""The ``--delta-*`` flags, the same for every engine.

The flags in groups are what users choose; ``--delta-tuning KEY=VALUE`` has the rest. The
engine's own parser parses them in the API server's process. The workers receive the result in
one environment variable, which reaches every process that an engine spawns without touching the
engine's own configuration.
"""

from __future__ import annotations

import argparse
import ipaddress
import itertools
import os
import re
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from engine_ext.commands import positive_seconds
from engine_ext.store_urls import is_store_url, store_url
from engine_ext.structs import prepare

ENVIRONMENT = "DELTA_UPDATES_SETTINGS"
API_KEY_ENVIRONMENT = "DELTA_API_KEY"
HMAC_KEY_ENVIRONMENT = "DELTA_HMAC_KEY"  # key that parts are signed with

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the flags and of the tuning, in bytes and seconds; `FLAGS`, `TUNING`."""

    chunk_bytes: int = 512 << 20
    read_workers: int = 4
    roots: tuple[str, ...] = ()
    log: str | None = None
    follow: bool = False
    follow_group: str | None = None
    peers: tuple[str, ...] = ()
    own_url: str | None = None
    follow_interval: float = 5.0
    follow_hold: int = 0
    spool_dir: str | None = None
    max_body_bytes: int = 4 << 30
    max_uploads: int = 16
    min_upload_rate: int = 64 << 10
    stage_timeout: float = 60.0
    allow_from: tuple[str, ...] = ()
    base_version: int = 0
    min_version: int | None = None
    apply: Literal["scatter", "masked"] = "scatter"
    undo_bytes: int = 4 << 30
    shadow_bytes: int = 16 << 30
    device_bytes: int = 256 << 20
    keep_plain: bool = False
    audit_file: str | None = None
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


prepare(Settings)


def api_key(given: str | None = None) -> str | None:
    """Return the given bearer token, or else the environment's; None if neither is there.

    White space at both ends is dropped: files and secrets often end with a line break.

    Raises:
        ValueError: It has characters that no HTTP header carries. The message does not show it.
    """
    token = (given or "").strip() or os.environ.get(API_KEY_ENVIRONMENT)
    token = None if token is None else token.strip()
    if token and not (token.isascii() and token.isprintable()):
        raise ValueError(
            f"the bearer token ({API_KEY_ENVIRONMENT}, or what was given in its place) has "
            "characters other than printable ASCII, which no HTTP header carries"
        )
    return token


def bearer_headers(token: str | None = None) -> dict[str, str]:
    """Return the HTTP headers with this token, or else the environment's; none without any.

    Raises:
        ValueError: See `api_key`.
    """
    token = api_key(token)
    return {"Authorization": f"Bearer {token}"} if token else {}


def from_environment() -> Settings | None:
    """Return the settings that a parent exported, or None; ValueError if they are damaged."""
    text = os.environ.get(ENVIRONMENT)
    return msgspec.json.decode(text, type=Settings) if text else None


def from_namespace(args: argparse.Namespace) -> Settings | None:
    """Return the settings in parsed arguments, or None without ``--enable-delta-updates``.

    The last value of a key of the tuning counts. ValueError is raised if another delta flag is
    given without it, or if no client could send the token.
    """
    given: dict[str, tuple[str, Any]] = {}
    for flags in FLAGS.values():
        given |= {one.field: (one.name, getattr(args, _dest(one.name), None)) for one in flags}
    for key, value in itertools.chain(*(getattr(args, "delta_tuning", None) or ())):
        given[key.replace("-", "_")] = (f"--delta-tuning {key}", value)
    given = {field: pair for field, pair in given.items() if pair[1] is not None}
    if not getattr(args, "enable_delta_updates", False):
        if given:
            flags_given = ", ".join(flag for flag, _ in given.values())
            raise ValueError(f"{flags_given} needs --enable-delta-updates")
        return None
    api_key()  # of the engine and of its peers
    if "log" not in given and "follow" in given:
        raise ValueError("--delta-follow needs --delta-log")
    needs = {"follow_group", "follow_interval", "follow_hold"}
    if "follow" not in given and (more := needs & given.keys()):
        flags_given = ", ".join(given[field][0] for field in sorted(more))
        raise ValueError(f"{flags_given} needs --delta-follow")
    return msgspec.convert({field: value for field, (_, value) in given.items()}, Settings)


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


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


def _parse_directory(text: str) -> str:
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"not a directory: {text}")
    return os.path.realpath(text)


def _parse_file(text: str) -> str:
    folder, name = os.path.split(text)
    if not name or os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"not a file: {text}")
    return os.path.join(_parse_directory(folder or "."), name)


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


def _parse_group(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise argparse.ArgumentTypeError(
            f"not the name of a group: {text!r} (1 to 64 letters, digits, - and _)"
        )
    return text


def is_engine_root(text: str) -> bool:
    """Return whether a text is the root of an engine's server: a host, no credentials, no path."""
    try:
        found = urlsplit(text)
        is_root = not (found.path.strip("/") or found.query or found.fragment)
        good = found.scheme in ("http", "https") and found.hostname and found.port != 0
    except ValueError:
        return False
    return bool(good) and is_root and "@" not in found.netloc and text.isprintable()


def _parse_peer(text: str) -> str:
    if not is_engine_root(text):
        raise argparse.ArgumentTypeError(f"not the root of an engine's server: {text!r}")
    return text.rstrip("/")


class _StoreInEnvironment(argparse.Action):
    """Stores a secret in the environment, because engines log their parsed arguments."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        os.environ[API_KEY_ENVIRONMENT] = str(values)


def _parse_apply(text: str) -> str:
    if text not in ("scatter", "masked"):
        raise argparse.ArgumentTypeError(f"not scatter or masked: {text!r}")
    return text


class Flag(NamedTuple):
    """One flag: field of `Settings`, name, name of its value ("" for a switch), parser, help."""

    field: str
    name: str
    value: str
    parse: Callable[[str], Any] | None
    help: str
    repeatable: bool = False


class Tuned(NamedTuple):
    """One key of ``--delta-tuning``: name of its value, parser, help."""

    value: str
    parse: Callable[[str], Any]
    help: str


_DEFAULTS: Final = Settings()

FLAGS: Final[dict[str, list[Flag]]] = {
    "DeltaUpdates": [
        Flag(
            "base_version",
            "--delta-base-version",
            "N",
            _parse_version,
            f"Version of the loaded weights (default: {_DEFAULTS.base_version}).",
        ),
        Flag(
            "min_version",
            "--delta-min-version",
            "N",
            _parse_version,
            "GET /delta_ready answers 503 before the weights have this version (default: none).",
        ),
        Flag(
            "keep_plain",
            "--delta-keep-plain",
            "",
            None,
            "On CPU, keep linear weights in the checkpoint's layout, where vLLM would pack them "
            "for a faster kernel. A sync is then written in place and faster, generation slower.",
        ),
    ],
    "DeltaUpdates: sources": [
        Flag(
            "roots",
            "--delta-root",
            "DIR",
            _parse_location,
            "A folder, or a URL in an object store (s3://BUCKET/PREFIX), that disk requests can "
            "read from; repeatable. Without any, disk requests are refused.",
            repeatable=True,
        ),
        Flag(
            "log",
            "--delta-log",
            "LOG",
            _parse_location,
            "A folder, or a URL in an object store (s3://BUCKET/PREFIX; also gs:// and az://), "
            "with a sender's versions. Those newer than the loaded weights are replayed before the "
            "engine serves, and by POST /delta_catch_up.",
        ),
        Flag(
            "follow",
            "--delta-follow",
            "",
            None,
            "Follow the delta log: look for new versions, stage them while generating and commit "
            "them. Versions that queue up are merged into one commit. The engine then takes "
            "versions from the log alone: updates by requests are refused.",
        ),
        Flag(
            "follow_group",
            "--delta-follow-group",
            "NAME",
            _parse_group,
            "Take a version only once it is complete for this group: all live followers of the log "
            "with the same name have staged it and can commit it. Then each commits it. Before an "
            "engine has the group's version, it is not ready (default: none).",
        ),
        Flag(
            "peers",
            "--delta-peer",
            "URL",
            _parse_peer,
            "Another engine of the same log, http://HOST:PORT; repeatable. Give all engines of a "
            "group the same URLs. A part that this engine lacks is asked for there before the "
            "store is read, and verified by its hash; one engine of the group reads it from the "
            "store. For a log in an object store (default: none).",
            repeatable=True,
        ),
    ],
    "DeltaUpdates: access": [
        Flag(
            "allow_from",
            "--delta-allow-from",
            "CIDR",
            _parse_network,
            "A network (10.0.4.0/24) whose clients can use the delta endpoints without a token, "
            "as those on this host can; repeatable. Whoever can send from there can replace the "
            "weights. Without effect if a token is set (default: none).",
            repeatable=True,
        ),
    ],
    "DeltaUpdates: checks and memory": [
        Flag(
            "audit_file",
            "--delta-audit-file",
            "FILE",
            _parse_file,
            "Append one record for each version that is committed or rolled back to this file: who "
            "sent it, its digests and when it was committed, signed if DELTA_HMAC_KEY is set. "
            "While no record can be written, no version is taken. `delta-log audit` verifies it "
            "(default: none).",
        ),
        Flag(
            "scrub_interval",
            "--delta-scrub-interval",
            "SECONDS",
            positive_seconds,
            "Compare live memory with the digest, each tensor once per so many seconds, with at "
            "most a twentieth of one core per rank (default: off).",
        ),
        Flag(
            "max_pause",
            "--delta-max-pause",
            "SECONDS",
            positive_seconds,
            "Resume generation that a caller has paused for longer, such as a trainer that died. "
            "Give more than any pause that a trainer needs (default: off).",
        ),
        Flag(
            "undo_bytes",
            "--delta-undo-bytes",
            "BYTES",
            parse_size,
            "Host memory per rank for the old values of the last version, which undo a failed "
            "write and allow a rollback. A sync that would need more must be full, and cannot be "
            f"undone if it fails (default: {_DEFAULTS.undo_bytes >> 30}G).",
        ),
        Flag(
            "shadow_bytes",
            "--delta-shadow-bytes",
            "BYTES",
            parse_size,
            "Host memory per rank for the unprocessed weights of modules that the engine "
            "quantises or packs. A module that does not fit is not updated "
            f"(default: {_DEFAULTS.shadow_bytes >> 30}G).",
        ),
    ],
}
"""The flags by the title of their group, without --enable-delta-updates and the token."""

TUNING: Final[dict[str, Tuned]] = {
    "max-body-bytes": Tuned(
        "BYTES",
        parse_size,
        "Largest part that is accepted, decompressed "
        f"(default: {_DEFAULTS.max_body_bytes >> 30}G).",
    ),
    "max-uploads": Tuned(
        "N",
        _parse_positive,
        "Updates that one HTTP process accepts at once; more are answered 429 "
        f"(default: {_DEFAULTS.max_uploads}).",
    ),
    "min-upload-rate": Tuned(
        "BYTES",
        parse_size,
        "Minimum bytes per second over a whole body "
        f"(default: {_DEFAULTS.min_upload_rate >> 10}K).",
    ),
    "stage-timeout": Tuned(
        "SECONDS",
        positive_seconds,
        "Seconds after its last part for which an unfinished sync keeps other senders out, and "
        f"for which a body can stall (default: {_DEFAULTS.stage_timeout:g}).",
    ),
    "read-workers": Tuned(
        "N",
        _parse_positive,
        "Parts that a rank stages at once, and that are begun at once of a request that names "
        f"several files (default: {_DEFAULTS.read_workers}).",
    ),
    "spool-dir": Tuned(
        "DIR",
        _parse_directory,
        "Folder for request bodies while they are staged (default: /dev/shm, or the temporary "
        "folder if that is too small).",
    ),
    "follow-interval": Tuned(
        "SECONDS",
        positive_seconds,
        "Seconds between two looks at the log, with a fifth of jitter; POST /delta_catch_up is "
        f"one at once (default: {_DEFAULTS.follow_interval:g}).",
    ),
    "follow-hold": Tuned(
        "N",
        _parse_version,
        f"Stay so many versions behind the log's newest (default: {_DEFAULTS.follow_hold}).",
    ),
    "own-url": Tuned(
        "URL",
        _parse_peer,
        "URL at which other engines reach this one. It is in the heartbeat, so that engines that "
        "follow the same log, and have this key too, ask each other for parts as --delta-peer "
        "does, without a token (default: none).",
    ),
    "part-port": Tuned(
        "PORT",
        _parse_port,
        "For an engine on several hosts: TCP port of the first host at which the others fetch "
        f"parts (default: {_DEFAULTS.part_port}, any free one).",
    ),
    "cache-dir": Tuned(
        "DIR",
        _parse_directory,
        "For an engine on several hosts, or a log in an object store: a folder that only this "
        "user can write into, where a host keeps the parts that it has fetched, once for all of "
        "its engines and ranks (default: one in the temporary folder).",
    ),
    "cache-bytes": Tuned(
        "BYTES",
        parse_size,
        f"Bytes of parts that are kept in this folder (default: {_DEFAULTS.cache_bytes >> 30}G).",
    ),
    "streams": Tuned(
        "N",
        _parse_positive,
        "Requests at once for one part in an object store, each for a range of it "
        f"(default: {_DEFAULTS.streams}).",
    ),
    "fetch-rate": Tuned(
        "BYTES",
        parse_size,
        "Most bytes per second that this engine fetches from an object store, for links that are "
        "shared (default: no limit).",
    ),
    "device-bytes": Tuned(
        "BYTES",
        parse_size,
        "Memory per GPU that is reserved at start-up, before the engine takes the rest for its KV "
        "cache, for what syncs keep there: 6 bytes per changed bf16 element until the commit, 4 "
        "until the next one. Beyond that they are in pinned host memory, and the write is slower "
        f"(default: {_DEFAULTS.device_bytes >> 20}M).",
    ),
    "apply": Tuned(
        "scatter|masked",
        _parse_apply,
        "How certified tensors are written: directly (scatter), or through the model's own loader "
        f"(masked), which exists to compare with (default: {_DEFAULTS.apply}).",
    ),
    "chunk-bytes": Tuned(
        "BYTES",
        parse_size,
        "Most bytes of full-shape tensors in one call of the model's loader with apply=masked "
        f"(default: {_DEFAULTS.chunk_bytes >> 20}M).",
    ),
}
"""The keys of ``--delta-tuning``."""


def _parse_tuning(text: str) -> list[tuple[str, Any]]:
    """Return keys and values of ``KEY=VALUE``, or of a JSON object, as files can have them."""
    if text.lstrip().startswith("{"):
        try:
            found = msgspec.json.decode(text, type=dict[str, str | int | float])
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"not a JSON object of keys: {error}") from None
        return [_parse_tuned(key, str(value)) for key, value in found.items()]
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"not KEY=VALUE: {text!r} (keys: {', '.join(TUNING)})")
    return [_parse_tuned(key, value)]


def _parse_tuned(key: str, value: str) -> tuple[str, Any]:
    if key not in TUNING:
        raise argparse.ArgumentTypeError(f"not a key: {key!r} (keys: {', '.join(TUNING)})")
    try:
        return key, TUNING[key].parse(value)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{key}: {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to an engine's own parser, in groups."""
    groups = {title: parser.add_argument_group(title) for title in FLAGS}
    main = groups["DeltaUpdates"]
    main.description = (
        "Sparse weight updates by HTTP or from a shared folder, applied bit-exactly to the "
        "running model or refused with the engine unchanged."
    )
    main.add_argument(
        "--enable-delta-updates",
        action="store_true",
        default=False,
        help="Accept sparse weight updates at POST /update_weights_delta.",
    )
    for title, flags in FLAGS.items():
        for one in flags:
            options: dict[str, Any] = {"action": "store_true"}
            if one.parse is not None:
                action = "append" if one.repeatable else "store"
                options = {"metavar": one.value, "type": one.parse, "action": action}
            groups[title].add_argument(
                one.name, help=one.help, default=argparse.SUPPRESS, **options
            )
    groups["DeltaUpdates: access"].add_argument(
        "--delta-api-key",
        metavar="TOKEN",
        help="Bearer token of the delta endpoints; without one they answer only to clients on "
        f"this host (default: {API_KEY_ENVIRONMENT}).",
        default=argparse.SUPPRESS,
        action=_StoreInEnvironment,
    )
    main.add_argument(
        "--delta-tuning",
        metavar="KEY=VALUE",
        help="A limit or a size that rarely needs a change; repeatable. "
        f"Keys: {', '.join(TUNING)}.",
        default=argparse.SUPPRESS,
        type=_parse_tuning,
        action="append",
    )
