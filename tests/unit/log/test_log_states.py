"""A log in a folder and one in a store, through the same steps: readers see the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from obstore.store import MemoryStore

from engine_ext.log import fold_versions, route
from engine_ext.log.writer import LogWriter
from tests.support.served_models import PROPERTY
from tests.unit.log.places import FolderPlace, ObjectsPlace, Place, decoded, part

State = dict[str, tuple[int | None, int, list[int]]]  # by folder: base, version, first values


class LogMachine(RuleBasedStateMachine):
    """Senders, folds and prunes; `expected` is what readers must see after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        folder = Path(self.scratch.name)
        self.places: list[Place] = [
            FolderPlace(folder / "log"),
            ObjectsPlace("s3://test/log", folder, MemoryStore()),
        ]
        self.logs = [place.open() for place in self.places]
        self.writers: list[LogWriter] = [log.writer() for log in self.logs]
        self.expected: State = {}
        self.refused: set[str] = set()
        self.number = -1
        # First values of the parts, by a version's place, folder and files.
        self.values: dict[tuple[Any, ...], list[int]] = {}

    def teardown(self) -> None:
        for writer in self.writers:
            writer.close()
        self.scratch.cleanup()

    def next_number(self) -> int:
        return max(0, *(writer.last_number for writer in self.writers)) + 1

    @rule(parts=st.integers(1, 3), full=st.booleans())
    def write(self, parts: int, full: bool) -> None:
        version = self.next_number()
        base = None if full else version - 1
        for writer in self.writers:
            draft = writer.begin(version)
            for k in range(parts):
                facts = {"part": k, "num_parts": parts, "sync_id": f"s{version}"}
                draft.add(part(version, base, full=full, **facts))
            draft.finish()
        self.expected[f"weight_v{version:06d}"] = (base, version, [version] * parts)
        self.number = version

    @rule()
    def abandon(self) -> None:
        """In a store, the next sender to open the log settles what was begun, as refused."""
        version = self.next_number()
        for writer in self.writers:
            draft = writer.begin(version)
            draft.add(part(version, version - 1))
            draft.drop()
        self.refused.add(f"weight_v{version:06d}")

    @precondition(lambda self: f"weight_v{self.number:06d}" in self.expected)
    @rule()
    def refuse(self) -> None:
        for writer in self.writers:
            writer.refuse(self.number)
        folder = f"weight_v{self.number:06d}"
        self.expected = {name: e for name, e in self.expected.items() if e[1] != self.number}
        self.refused.add(folder)

    @rule()
    def reopen(self) -> None:
        for writer in self.writers:
            writer.close()
        self.logs = [place.open() for place in self.places]
        self.writers = [log.writer() for log in self.logs]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        newest = f"weight_v{self.number:06d}"
        known = [name for name in sorted(self.expected) if name != newest]
        gone = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
        for log in self.logs:
            log.store.delete([*gone])
        for name in gone:
            del self.expected[name]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fold(self, data: st.DataObject) -> None:
        base = data.draw(st.integers(0, max(self.number - 1, 0)))
        steps = route(self.logs[0].listing().entries, base)
        name = f"weight_v{steps[-1].version:06d}_from_v{base:06d}" if steps else ""
        if len(steps) < 2 or name in self.expected:
            return
        for log in self.logs:
            fold_versions(log, route(log.listing().entries, base), base)
        last, full = steps[-1].version, steps[0].full
        # Sparse parts leave the first element of a full one as it is; that can be a fold itself.
        first = self.expected[steps[0].folder.name][2][0] if full else last
        self.expected[name] = (None if full else base, last, [first])

    @rule()
    def tidy(self) -> None:
        for log in self.logs:
            log.tidy(log.listing())

    @invariant()
    def readers_see_what_was_written(self) -> None:
        for log, writer, place in zip(self.logs, self.writers, self.places, strict=True):
            assert self.content(place) == self.expected
            assert writer.last_number >= self.number
            refused = {folder.name for folder in log.listing().refused}
            assert refused <= self.refused

    def content(self, place: Place) -> State:
        """Return what a reader sees of a log, its parts included.

        Files with the bytes that they had when a reader had read them are not read so again.
        """
        log, names = place.open(), place.names()
        listing = log.listing()
        assert listing.damaged == {}
        found: State = {}
        for entry in listing.entries:
            folder = entry.folder.name
            own = [name for name in names if name.startswith(f"{folder}/")]
            files = tuple((name, place.read(name)) for name in own)
            key = (place.takes_over, folder, files)
            if key not in self.values:
                with log.fetched(entry):
                    parts = decoded(entry)
                self.values[key] = [int(one.deltas[0].values[0]) for one in parts]
            found[folder] = (entry.base_version, entry.version, self.values[key])
        return found


TestLog = LogMachine.TestCase
TestLog.settings = settings(PROPERTY, max_examples=20, stateful_step_count=15)
