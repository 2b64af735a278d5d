"""Declare the keyword arguments of the senders: name, type, default, documentation and flag.

This is the only declaration: `DeltaSender` takes the keywords of `Options`, `MultiSender` those of
`MultiOptions`, `ShardedSender` those of `EngineOptions`, `LogSender` those of `LogOptions`, and
their signatures, their docstrings and the command line are made from it. A flag's help is the first
sentence of the documentation.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypedDict, TypeVar, cast, get_type_hints

import httpx

from delta_sender.diff.device import SNAPSHOT_ON
from delta_sender.diff.quantize import FORMS
from delta_sender.encode.encoding_policy import CHOICES
from engine_ext.resources import RateLimit

_Class = TypeVar("_Class", bound=type)


class Option(NamedTuple):
    """One keyword argument.

    `flag` has the keywords of `argparse.ArgumentParser.add_argument`; None if it has no flag. An
    option that is on by default has a flag that turns it off.
    """

    default: Any
    flag: Mapping[str, Any] | None = None
    doc: str = ""


def _seconds(text: str) -> float | None:
    return seconds if math.isfinite(seconds := float(text)) else None


FULL: Final = ("own", "allow")
_LIMIT_FLAG: Final = {"type": float, "metavar": "BYTES"}
_KEY_FLAG: Final = {"metavar": "KEY", "help": "bearer token (default: that in DELTA_API_KEY)"}


class CommonOptions(TypedDict, total=False):
    """Keyword arguments that every sender has.

    Attributes:
        base_version: Version that the engines are at, if no digest shows what they hold.
        encoding: How changes travel; auto picks by density and link speed. One of ``indices``,
            ``deltas``, ``deltas_zstd``, ``gap8_exp``, ``gap8_ulp`` and ``auto``. With ``gap8_ulp``,
            full syncs, dense params and params that the engine's digest does not cover travel as
            ``gap8_exp``; so does everything after an engine has refused differences and taken
            values, and one sync if its old values are not the snapshot's. ``auto`` picks for each
            param the fastest of ``gap8_ulp``, ``gap8_exp`` and ``deltas``, sparse or dense; see
            `SyncReport.picked`.
        bucket_bytes: Most bytes of positions and values in one part, before compression. The first
            part may have 8 MiB, and each further one twice as much as the one before. A param is
            never split; a larger one travels alone.
        posts_in_flight: Parts that are posted to an engine at once. The last part of a sync is
            posted alone. An engine that has no room for so many (429) gets fewer until the next
            sync.
        digest: Keep the model's digest, and send digests along if the engine has a plan.
        api_key: Bearer token.
        hmac_key: Key to sign the parts with, for engines with ``DELTA_HMAC_KEY``.
        pause_mode: What happens to requests in flight: they continue with the new weights (keep),
            finish first (wait), or end (abort).
        flush_cache: Drop KV entries of the old weights.
        bandwidth_limit: Most bytes per second to all engines together, for links that are shared;
            or a `RateLimit` that several senders share. None: no limit. Engines refuse uploads that
            are slower than their --delta-min-upload-rate.
        timeout: Seconds for one request, and for waiting until another sync is out of the way.
            Connecting is given 10 seconds at most.
        client: HTTP client to use; it is not closed with the sender.
        snapshot_on: What CUDA tensors are compared with. ``device``: a copy of the snapshot on
            their device, which takes the model's size there. ``host``: the snapshot in pinned host
            memory, uploaded in chunks. ``auto``: on the device if that takes at most half of the
            memory that is free there at the first sync.
        changes_in_memory: Most bytes of one sync's changes that are kept in memory until they are
            committed; None: a quarter of the snapshot. The rest is written to a temporary file
            below ``TMPDIR``.
        refuse_nonfinite: Refuse a sync in which a value has become NaN or infinite. Without it, a
            warning names the first tensor with one.
        unchanged_warning: Syncs in a row in which no value has changed, after which a warning names
            the usual causes. 0: none.
    """

    base_version: Annotated[int, Option(0, {"type": int, "metavar": "N"})]
    encoding: Annotated[str, Option("deltas_zstd", {"choices": CHOICES})]
    bucket_bytes: Annotated[int, Option(64 << 20, {"type": int, "metavar": "N"})]
    posts_in_flight: Annotated[int, Option(4, {"type": int, "metavar": "N"})]
    digest: Annotated[bool, Option(True, {"help": "send no digests along"})]
    api_key: Annotated[str | None, Option(None, _KEY_FLAG)]
    hmac_key: Annotated[str | None, Option(None)]
    pause_mode: Annotated[str, Option("keep", {"choices": ("keep", "wait", "abort")})]
    flush_cache: Annotated[bool, Option(True, {"help": "keep KV entries of the old weights"})]
    bandwidth_limit: Annotated[float | RateLimit | None, Option(None, _LIMIT_FLAG)]
    timeout: Annotated[float, Option(600.0)]
    client: Annotated[httpx.Client | None, Option(None)]
    snapshot_on: Annotated[str, Option(SNAPSHOT_ON[0])]
    changes_in_memory: Annotated[int | None, Option(None)]
    refuse_nonfinite: Annotated[bool, Option(False, {"action": "store_true"})]
    unchanged_warning: Annotated[int, Option(3)]


class EngineOptions(CommonOptions, total=False):
    """Keyword arguments of the senders that post to engines.

    Attributes:
        takeover: Take an engine from the run that owns it. That run is fenced for good: whatever
            its trainer sends, or claims, is refused.
        full: When the whole model may be sent without being asked for. ``own``: only over what this
            run has sent, over the base, over what an engine was started with if it was sent
            something before, and to an engine without weights. ``allow``: over anything.
    """

    takeover: Annotated[bool, Option(False, {"action": "store_true"})]
    full: Annotated[str, Option(FULL[0])]


class Options(EngineOptions, total=False):
    """Keyword arguments of `DeltaSender`.

    Attributes:
        adapter: Name of a LoRA adapter that the engines have loaded; its own tensors are sent, not
            the model's. The base has the names of its folder (``base_model.model.`` ...), and
            versions count for this adapter. Not with a delta log.
        delta_log: Folder, or URL in an object store (``s3://BUCKET/PREFIX``), that gets every
            version, durably, before an engine commits it, for engines that are started with
            --delta-log. Versions continue from the highest number in it. A
            version that no engine committed is marked as refused; its number is not used again.
        log_differences: Let the delta log carry differences, if `encoding` sends any. They take
            about half the bytes of values. Every engine that replays the log must take them (none
            does that casts a tensor or writes through its loader), and ``delta-log fold`` needs the
            checkpoint.
        state: File that remembers over a restart of the sender its run, and what each engine has
            acknowledged. A sender with the file of an earlier one continues that run: it needs no
            takeover, and may send the model over what the earlier one has sent. One sender at a
            time may use it. Without digests, the version in the file counts if the base is what an
            engine is at; if the base is neither what an engine acknowledged nor what it was being
            sent last, the next sync to it is a full one.
        quantize: How to quantise the given tensors, if the base is a quantised checkpoint. One of
            ``fp8_block``, ``fp8_channel`` and ``int8_channel``; see `delta_sender.diff.quantize`. A
            tensor is quantised if its name is that of a quantised weight in the base. Names,
            shapes and dtypes are then checked one by one, while earlier tensors are sent.
    """

    adapter: Annotated[str | None, Option(None, {"metavar": "NAME"})]
    delta_log: Annotated[str | Path | None, Option(None, {"metavar": "LOG"})]
    log_differences: Annotated[bool, Option(False, {"action": "store_true"})]
    state: Annotated[str | Path | None, Option(None, {"type": Path, "metavar": "FILE"})]
    quantize: Annotated[str | None, Option(None, {"choices": tuple(FORMS)})]


class LogOptions(CommonOptions, total=False):
    """Keyword arguments of `LogSender`.

    Attributes:
        log_differences: See `Options`.
    """

    log_differences: Annotated[bool, Option(False)]


_LAG_FLAG: Final = {
    "type": _seconds,
    "metavar": "SECONDS",
    "help": "go on without engines that need SECONDS longer than the first; inf waits for all "
    "(default: %(default)s)",
}


class MultiOptions(Options, total=False):
    """Keyword arguments of `MultiSender`.

    Attributes:
        lag_limit: Seconds after the first engine's commit at which a sync returns without engines
            that are not done. None waits for all.
    """

    lag_limit: Annotated[float | None, Option(60.0, _LAG_FLAG)]


@functools.cache
def declared(options: type) -> dict[str, Option]:
    """Return what one of the classes above declares, by name."""
    docs: dict[str, str] = {}
    for declaring in (CommonOptions, EngineOptions, Options, options):
        entry, doc = r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", inspect.getdoc(declaring) or ""
        docs |= {name: " ".join(text.split()) for name, text in re.findall(entry, doc, re.M)}
    hints = get_type_hints(options, include_extras=True)
    return {n: hint.__metadata__[0]._replace(doc=docs.get(n, "")) for n, hint in hints.items()}


_DEFAULTS: Final = {name: option.default for name, option in declared(MultiOptions).items()}


def with_defaults(given: Mapping[str, Any], options: type = MultiOptions) -> MultiOptions:
    """Return every option: as given, or its default.

    Raises:
        TypeError: `options` does not declare a name.
        ValueError: The bandwidth limit is not above 0.
    """
    if unknown := given.keys() - declared(options).keys():
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
    chosen = {**_DEFAULTS, **given}
    if isinstance(limit := chosen["bandwidth_limit"], (int, float)):
        chosen["bandwidth_limit"] = RateLimit(limit)
    return cast(MultiOptions, chosen)


def check_values(options: MultiOptions) -> None:
    """Check what types do not.

    Raises:
        ValueError: One has an unknown value.
    """
    encoding = options["encoding"]
    if encoding not in CHOICES:
        raise ValueError(f"encoding {encoding!r} is not one of {', '.join(CHOICES)}")
    if options["full"] not in FULL:
        raise ValueError(f"full {options['full']!r} is not one of {', '.join(FULL)}")
    if options["posts_in_flight"] < 1:
        raise ValueError("posts_in_flight is 1 at least")


def takes_options(options: type) -> Callable[[_Class], _Class]:
    """Complete the signature and docstring of a class whose ``__init__`` takes ``**options``."""
    hints, keyword = get_type_hints(options), inspect.Parameter.KEYWORD_ONLY

    def complete(sender: _Class) -> _Class:
        *parameters, _ = inspect.signature(sender).parameters.values()
        doc = f"{(sender.__doc__ or '').rstrip()}\n\n    Keyword Args:\n"
        for name, option in declared(options).items():
            default = option.default
            parameters.append(
                inspect.Parameter(name, keyword, default=default, annotation=hints[name])
            )
            text = f"{name}: {option.doc} (default: {default!r})"
            text = textwrap.fill(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12)
            doc += f"{text}\n"
        sender.__doc__ = doc
        sender.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return sender

    return complete
