"""``delta-log audit``: prove what each version was, from a checkpoint's digest on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_ext.commands import output_may_be_unread

if TYPE_CHECKING:
    from engine_ext.audit import Chain, EngineTrail, Link, Reached

HELP: Final = (
    "Prove that records lead from a checkpoint's digest to a version. A record is what a sender "
    "has written into a log, also of versions that were pruned, or what an engine has written into "
    "its --delta-audit-file. Gaps, forks, changed records and wrong signatures are named. "
    "The parts in a log are not read: delta-log verify does that."
)
EPILOG: Final = """\
examples:
  delta-log audit /shared/log                          who has sent what, up to the newest version
  delta-log audit /shared/log --to 120 --digest 51c711e185dfe4dc26898ccaf3cdd7ca
  DELTA_HMAC_KEY=... delta-log audit /var/log/delta-audit.jsonl /shared/log
                                                       and what one engine has made of it

exit status:
  0    the records prove the version
  1    they do not; each reason is named
  2    wrong usage, or a trail that cannot be read
  130  interrupted
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "trails",
        nargs="+",
        metavar="TRAIL",
        help="a log's folder, its URL in an object store, or an engine's audit file; several must "
        "agree about the version",
    )
    parser.add_argument(
        "--to", type=int, metavar="N", help="prove this version (default: the newest)"
    )
    parser.add_argument(
        "--digest",
        metavar="HEX",
        help="digest of the checkpoint, as an engine that has loaded it reports it "
        "(version.digest of GET /delta_status)",
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="CHECKPOINT",
        help="folder of the checkpoint, in place of its digest: that of all its tensors. An engine "
        "that ignores some has another one",
    )
    parser.add_argument(
        "--base-version",
        type=int,
        metavar="N",
        help="version of the checkpoint (default: the oldest base)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Print the chain and what is wrong with it; return 0 if nothing is, else 1.

    Raises:
        ValueError: the options are wrong.
        OSError: a trail cannot be read.
        LogDamaged: the records in one cannot be read.
    """
    from engine_ext.format import Digest, signing_key

    digest = options.digest
    if digest is not None:
        digest = Digest.parse(digest).hex()
    if options.base is not None:
        if digest is not None:
            raise ValueError("give --digest or --base, not both")
        digest = digest_of(options.base)
    key = signing_key()
    if key == "":
        raise ValueError("the key in DELTA_HMAC_KEY is empty")
    found = _Found(key)
    for trail in options.trails:
        found.read(trail)
    target = options.to
    if target is None:
        target = max((link.version for link in found.links), default=None)
    if target is None:
        raise ValueError("there are no records of any version")
    chain = found.prove(target, options.base_version, digest)
    with output_may_be_unread():
        _show(chain, found, target, as_json=options.json)
    return 1 if chain.problems else 0


class _Found:
    """The records of several trails, which must agree."""

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.logged: list[Link] = []  # by senders
        self.links: list[Link] = []
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.signed = 0
        self.has_log = False
        self._engines: list[EngineTrail] = []

    def read(self, trail: str) -> None:
        from engine_ext.audit import read_engine_trail, read_log_trail
        from engine_ext.log import open_log
        from engine_ext.store_urls import is_store_url

        if is_store_url(trail) or not Path(trail).is_file():
            self.has_log = True
            log = read_log_trail(open_log(trail), self.key)
            self.logged += log.links
            self._add(log)
        else:
            engine = read_engine_trail(Path(trail), self.key)
            self._engines.append(engine)
            self.notes += engine.notes
            self._add(engine)

    def _add(self, trail: Any) -> None:
        self.links += trail.links
        self.problems += trail.problems
        self.signed += trail.signed

    def prove(self, target: int, base_version: int | None, digest: str | None) -> Chain:
        from engine_ext.audit import Chain, forks, prove

        problems = [*self.problems, *forks(self.links)]
        by_engine = [(engine.name, engine.reached(target)) for engine in self._engines]
        reached = [one for _, found in by_engine for one in found]
        if self.has_log:
            chain = prove(self.logged, target, base_version, digest)
        else:
            chains = [one.chain for one in reached if not one.is_past]
            if not chains:
                problems.append(f"gap: no record leads to version {target}")
            # The longest way: engines that started later are compared with what it leads over.
            chain = min(chains, key=_first_version, default=Chain())
        problems += chain.problems
        for one in reached:
            self._compare(one, chain, target, digest, problems)
        if reached or self.has_log:
            self.notes += [
                f"{name}: no record leads to version {target}"
                for name, found in by_engine
                if not found
            ]
        chain.problems = list(dict.fromkeys(problems))
        return chain

    def _compare(
        self, one: Reached, chain: Chain, target: int, digest: str | None, problems: list[str]
    ) -> None:
        """Add where an engine contradicts the chain, or only a note if it ended before others."""
        known = {link.version: (link.digest, link.source) for link in chain.links}
        if chain.start is not None:
            known.setdefault(chain.start[0], (chain.start[1], "the checkpoint"))
        expected, source = known.get(target, (None, ""))
        other = None not in (one.digest, expected) and one.digest != expected
        if one.is_past:
            # Version numbers begin anew with a run.
            if other:
                self.notes.append(
                    f"{one.source}: version {target} had the digest {one.digest} before the "
                    "engine's last start"
                )
            return
        problems += one.chain.problems
        if other:
            problems.append(
                f"fork: version {target} has the digest {expected} in {source}, and {one.digest} "
                f"in {one.source}"
            )
        if digest is not None and one.chain.start is not None:
            version, found = one.chain.start
            begin = known.get(version, (digest, ""))[0]
            if chain.start is not None and version == chain.start[0]:
                begin = digest
            if found != begin:
                problems.append(
                    f"gap: the records that lead to {one.source} start from version {version} with "
                    f"the digest {found}, not from {begin}"
                )

    def commits(self, link: Link) -> list[Link]:
        """Return the records of engines that have committed what a record is of."""
        return [
            one
            for one in self.links
            if one.where is not None and (one.version, one.digest) == (link.version, link.digest)
        ]


def _first_version(chain: Chain) -> int:
    return -1 if chain.start is None else chain.start[0]


def digest_of(checkpoint: Path) -> str:
    """Return the digest of all tensors of a checkpoint; FileNotFoundError if there is none."""
    from engine_ext.files import read_checkpoint
    from engine_ext.format import Digest, tensor_digest
    from engine_ext.kernels import bits_of, host_bits

    tensors = read_checkpoint(checkpoint)
    digests = (tensor_digest(name, host_bits(bits_of(one.reshape(-1)))) for name, one in tensors)
    return Digest.total(digests).hex()


def _show(chain: Chain, found: _Found, target: int, *, as_json: bool) -> None:
    rows = [_row(link, found) for link in chain.links]
    start = chain.start
    end = chain.links[-1].digest if chain.links else start and start[1]
    if as_json:
        facts = {
            "version": target,
            "digest": end,
            "start": None if start is None else {"version": start[0], "digest": start[1]},
            "proven": not chain.problems,
            "signed": None if found.key is None else found.signed,
            "records": rows,
            "problems": chain.problems,
            "notes": found.notes,
        }
        print(json.dumps(facts, indent=2))
        return
    _print_table(rows)
    for note in found.notes:
        print(f"note: {note}")
    for problem in chain.problems:
        print(problem)
    if chain.problems:
        print(f"version {target} is not proven", file=sys.stderr)
        return
    begin = "from nothing before it" if start is None else f"from version {start[0]} ({start[1]})"
    signatures = "signatures were not verified: DELTA_HMAC_KEY has no key"
    if found.key is not None:
        signatures = f"{found.signed} signature(s) verified"
    print(f"version {target} ({end}) follows {begin} by {len(rows)} record(s); {signatures}")
    if found.has_log:
        print("the parts in the log were not read: delta-log verify does that")


def _row(link: Link, found: _Found) -> dict[str, Any]:
    committed = [link] if link.where is not None else found.commits(link)
    return {
        "version": link.version,
        "base_version": link.base_version,
        "run": link.run,
        "digest_before": link.digest_before,
        "digest": link.digest,
        "bytes": link.nbytes,
        "sender": link.sender,
        "at": link.at,
        "record": link.source,
        "committed": [{"at": one.at, "engine": one.where} for one in committed],
    }


def _print_table(rows: Iterable[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("from", "to", "sender", "bytes", "digest", "at (UTC)", "committed by")
    for row in rows:
        base = row["base_version"]
        by = "\n".join(f"{one['engine']} {_time(one['at'])}" for one in row["committed"])
        table.add_row(
            "full" if base is None else str(base),
            str(row["version"]),
            row["sender"] or "",
            f"{row['bytes']:,}",
            row["digest"] or "",
            _time(row["at"]),
            by,
        )
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)


def _time(at: float | None) -> str:
    if at is None:
        return ""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
