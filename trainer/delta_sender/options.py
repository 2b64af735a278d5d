"""The options of all senders: one frozen class, which the command line's flags are made from."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from delta_sender.results import SyncError
from engine_ext.resources import RateLimit
from engine_ext.settings import api_key

if TYPE_CHECKING:
    import httpx

# Those of `engine_ext.format` and `diff.quantize`, without importing torch for a command's help.
CHOICES: Final = ("indices", "deltas", "deltas_zstd", "gap8_exp", "gap8_ulp", "auto")
FORMS: Final = ("fp8_block", "fp8_channel", "int8_channel")
FULL: Final = ("own", "allow")
Flush = bool | Literal["salt"]
# Fields that only senders to engines have. A delta log has no owner and keeps what it was given.
ENGINE_ONLY: Final = (
    "takeover", "full", "adapter", "delta_log", "state", "quantize", "lag_limit",
    "commit", "commit_window", "quorum", "evict",
)  # fmt: skip
# Fields that only a sender to several engines has.
FLEET_ONLY: Final = ("lag_limit", "commit", "commit_window", "quorum", "evict")
COMMITS: Final = ("each", "all_or_none")


def _seconds(text: str) -> float | None:
    return seconds if math.isfinite(seconds := float(text)) else None


@dataclass(frozen=True, kw_only=True)
class SenderOptions:
    """The keyword arguments that senders share.

    Every sender takes these as keywords of its own signature. `LogSender` and `ShardedSender` have
    fewer: a log has no owner, and ranks that send shards keep no state file.

    Attributes:
        base_version: Version that the engines are at, if no digest shows what they hold.
        encoding: How changes travel; auto picks by density and link speed. One of ``indices``,
            ``deltas``, ``deltas_zstd``, ``gap8_exp``, ``gap8_ulp`` and ``auto``. With ``gap8_ulp``,
            full syncs, dense params and params that the engine's digest does not cover travel as
            ``gap8_exp``; so does everything after an engine has refused differences and taken
            values, and one sync if its old values are not the snapshot's. ``auto`` picks for each
            param the fastest of ``gap8_ulp``, ``gap8_exp`` and ``deltas``, sparse or dense, and
            from 25 Gbit/s on without zstd; see `SyncReport.picked`.
        bucket_bytes: Most bytes of positions and values in one part, before compression. The first
            part can have 8 MiB, and each further one twice as much as the one before. A param is
            never split; a larger one travels alone.
        posts_in_flight: Parts that are posted to an engine at once. The last part of a sync is
            posted alone. An engine that has no room for so many (429) gets fewer until the next
            sync.
        digest: Keep the model's digest, and send digests along if the engine has a plan.
        api_key: Bearer token; white space at its ends is dropped.
        hmac_key: Key to sign the parts with, for engines with ``DELTA_HMAC_KEY``.
        pause_mode: What happens to requests in flight: they continue with the new weights (keep),
            finish first (wait), or end (abort).
        flush_cache: Drop KV entries of the old weights. ``"salt"``: requests in flight keep theirs,
            and no other request gets any of them. False: all requests can get them, without end.
        bandwidth_limit: Most bytes per second to all engines together, for links that are shared;
            or a `RateLimit` that several senders share. None: no limit. Engines refuse uploads that
            are slower than `min-upload-rate`.
        timeout: Seconds for one request, and for waiting until another sync is out of the way.
            Connecting is given 10 seconds at most.
        client: HTTP client to use; it is not closed with the sender.
        snapshot_on: Where CUDA tensors are compared. ``device``: with a copy of the snapshot on
            their device, which takes the model's size there, and an eighth more during a sync.
            ``host``: with the snapshot in pinned host memory, uploaded in chunks; PyTorch rounds
            each tensor's memory up to a power of two there. ``auto``: on the
            device if that takes at most half of the memory that is free there. It is copied when
            the sender is made if the base is on the device, else in the first sync; an optimiser
            that takes its memory later finds less.
        changes_in_memory: Most bytes of one sync's changes that are kept in memory until they are
            committed; None: a quarter of the snapshot. The rest is written to a temporary file
            below ``TMPDIR``.
        refuse_nonfinite: Refuse a sync in which a value has become NaN or infinite. Without it, a
            warning names the first tensor with one.
        unchanged_warning: Syncs in a row in which no value has changed, after which a warning names
            the usual causes. 0: none.
        takeover: Take an engine from the run that owns it. That run is fenced for good: whatever
            its trainer sends, or claims, is refused.
        full: When the whole model can be sent without being asked for. ``own``: only over what this
            run has sent, over the base, over what an engine was started with if it was sent
            something before, and to an engine without weights. ``allow``: over anything.
        adapter: Name of a LoRA adapter that the engines have loaded; its own tensors are sent, not
            the model's. The base has the names of its folder (``base_model.model.`` ...), and
            versions count for this adapter. Not with a delta log.
        delta_log: Folder, or URL in an object store (``s3://BUCKET/PREFIX``), that gets every
            version, durably, before an engine commits it, for engines that are started with
            --delta-log. Versions continue from the highest number in it. The first one is full if
            the log has versions, and neither a digest nor `state` shows which of them the base is.
            A version that no engine committed is marked as refused; its number is not used again.
        log_differences: Let the delta log carry differences, if `encoding` sends any. They take
            about half the bytes of values. Every engine that replays the log must take them (none
            does that casts a tensor or writes through its loader), and ``delta-log fold`` needs the
            checkpoint.
        state: File that remembers over a restart of the sender its run, and what each engine has
            acknowledged. A sender with the file of an earlier one continues that run: it needs no
            takeover, and can send the model over what the earlier one has sent. One sender at a
            time can use it. Without digests, the version in the file counts if the base is what an
            engine is at; if the base is neither what an engine acknowledged nor what it was being
            sent last, the next sync to it is a full one.
        quantize: How to quantise the given tensors, if the base is a quantised checkpoint. One of
            ``fp8_block``, ``fp8_channel`` and ``int8_channel``; see `quantize_weight`. A tensor is
            quantised if its name is that of a quantised weight in the base. Names, shapes and
            dtypes are then checked one by one, while earlier tensors are sent.
        lag_limit: Seconds after the first engine's commit at which a sync returns without engines
            that are not done. None waits for all. If engines commit as one, it is the seconds
            after the first one has prepared in which the others must have.
        commit: When engines commit. ``each``: as soon as one has staged all. ``all_or_none``: once
            all have staged and checked all, or no engine does. If the trainer dies in between, the
            engines settle it among themselves: they must reach each other at the given urls, with
            the same token. A `delta_log` gets the version once all have agreed, before the first
            one commits.
        commit_window: Seconds in which engines that commit as one have to agree to commit, and then
            to do so.
        quorum: How many engines must be ready to commit as one; the others are left out, and get
            what they missed in a later sync. None: all.
        evict: Called with the url of an engine that is left out and its error, before the others
            commit: take it out of the router here. If it raises, no engine commits. Also called for
            one that has agreed and did not commit in `commit_window`.

    Raises:
        ValueError: One has an unknown value, or no HTTP header carries the token.
    """

    base_version: int = 0
    encoding: str = "deltas_zstd"
    bucket_bytes: int = 64 << 20
    posts_in_flight: int = 4
    digest: bool = True
    api_key: str | None = None
    hmac_key: str | None = None
    pause_mode: str = "keep"
    flush_cache: Flush = True
    bandwidth_limit: float | RateLimit | None = None
    timeout: float = 600.0
    client: httpx.Client | None = None
    snapshot_on: str = "auto"
    changes_in_memory: int | None = None
    refuse_nonfinite: bool = False
    unchanged_warning: int = 3
    takeover: bool = False
    full: str = "own"
    adapter: str | None = None
    delta_log: str | Path | None = None
    log_differences: bool = False
    state: str | Path | None = None
    quantize: str | None = None
    lag_limit: float | None = 60.0
    commit: str = "each"
    commit_window: float = 10.0
    quorum: int | None = None
    evict: Callable[[str, SyncError], object] | None = None

    def __post_init__(self) -> None:
        self._check_fleet()
        if self.encoding not in CHOICES:
            raise ValueError(f"encoding {self.encoding!r} is not one of {', '.join(CHOICES)}")
        if self.full not in FULL:
            raise ValueError(f"full {self.full!r} is not one of {', '.join(FULL)}")
        if self.flush_cache not in (True, False, "salt"):
            raise ValueError(f"flush_cache {self.flush_cache!r} is not True, False or 'salt'")
        if self.posts_in_flight < 1:
            raise ValueError("posts_in_flight is 1 at least")
        if self.api_key is not None:
            given = self.api_key.strip()
            object.__setattr__(self, "api_key", api_key(given) if given else None)
        if isinstance(limit := self.bandwidth_limit, (int, float)):
            object.__setattr__(self, "bandwidth_limit", RateLimit(limit))

    def _check_fleet(self) -> None:
        if self.commit not in COMMITS:
            raise ValueError(f"commit {self.commit!r} is not one of {', '.join(COMMITS)}")
        given = [name for name in FLEET_ONLY[2:] if getattr(self, name) != DEFAULTS[name]]
        if self.commit == "each":
            if given:
                raise ValueError(f"only with commit='all_or_none': {', '.join(given)}")
            return
        if self.commit_window <= 0 or (self.quorum is not None and self.quorum < 1):
            raise ValueError("commit_window is above 0 and quorum is 1 at least")

    def check_engines(self, urls: Collection[str]) -> None:
        """Check the urls of a sender's engines.

        Raises:
            ValueError: There is none, one is there twice, or there are fewer than `quorum`.
        """
        if not urls or len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError("give every engine's url, each once")
        if self.quorum is not None and self.quorum > len(urls):
            raise ValueError(f"quorum is {self.quorum}, of {len(urls)} engines")

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> SenderOptions:
        """Return the options in the ``locals()`` of a constructor whose signature has them.

        Raises:
            ValueError: One has an unknown value.
        """
        return cls(**{name: arguments[name] for name in DEFAULTS.keys() & arguments.keys()})

    def refuse_engine_options(self) -> None:
        """Check that no option is set that a delta log does not have.

        Raises:
            ValueError: One is not at its default.
        """
        wrong = [name for name in ENGINE_ONLY if getattr(self, name) != DEFAULTS[name]]
        if wrong:
            names = ", ".join(sorted(wrong))
            raise ValueError(f"not with a delta log that engines follow: {names}")


DEFAULTS: Final = {each.name: each.default for each in fields(SenderOptions)}


def _first_sentences(documented: str | None) -> dict[str, str]:
    """Return how the documentation of each attribute begins, as the help of a flag."""
    text = inspect.cleandoc(documented or "")
    found = re.findall(r"^ {4}(\w+): (.+?)\.(?=\s|$)", text, re.M | re.S)
    return {name: " ".join((said[0].lower() + said[1:]).split()) for name, said in found}


# Flags of the command line by field: what `argparse`'s ``add_argument`` takes; with a help where
# the beginning of the documentation is none. A field that is on by default has a flag that turns it
# off; some fields have none.
_KEYWORDS: Final[dict[str, dict[str, Any]]] = {
    "base_version": {"type": int, "metavar": "N"},
    "encoding": {"choices": CHOICES},
    "bucket_bytes": {"type": int, "metavar": "N"},
    "posts_in_flight": {"type": int, "metavar": "N"},
    "digest": {"help": "send no digests along"},
    "api_key": {"help": "bearer token (default: that in DELTA_API_KEY)", "metavar": "KEY"},
    "pause_mode": {"choices": ("keep", "wait", "abort")},
    "flush_cache": {"help": "let all requests get KV entries of old weights, without end"},
    "bandwidth_limit": {
        "help": "most bytes per second to all engines together, for links that are shared",
        "type": float,
        "metavar": "BYTES",
    },
    "refuse_nonfinite": {"action": "store_true"},
    "takeover": {"action": "store_true"},
    "adapter": {"metavar": "NAME"},
    "delta_log": {"metavar": "LOG"},
    "log_differences": {"action": "store_true"},
    "state": {"type": Path, "metavar": "FILE"},
    "quantize": {"choices": FORMS},
    "lag_limit": {
        "help": (
            "continue without engines that need SECONDS longer than the first; inf waits for all"
        ),
        "type": _seconds,
        "metavar": "SECONDS",
    },
}
_DOCUMENTED: Final = _first_sentences(SenderOptions.__doc__)
FLAGS: Final[dict[str, dict[str, Any]]] = {
    name: {"help": _DOCUMENTED.get(name, ""), **keywords} for name, keywords in _KEYWORDS.items()
}
