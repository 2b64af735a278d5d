"""The chain of a delta log: what senders have written, pruned versions included."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.audit import Chain, Link, prove, read_log_trail
from engine_ext.errors import LogDamaged
from engine_ext.log import DeltaLog, Done, done_of, is_signed, keep_publications, open_log
from engine_ext.log.catalog import DONE, folder_name
from tests.support.present import present
from tests.support.served_models import PROPERTY
from tests.unit.audit.test_audit_file import KEY, digest
from tests.unit.log.places import Place, part

SENDER = {"run": "r", "run_epoch": 2, "run_owner": "trainer:11"}


def write(log: DeltaLog, version: int, key: str | None = KEY, **metadata: Any) -> None:
    digests = {
        "digest_before": digest(version - 1),
        "digest_after": digest(version),
        "digest_part": digest(1),
    }
    body = part(version, version - 1, **{**SENDER, **digests, **metadata})
    with log.writer() as writer:
        draft = writer.begin(version)
        draft.add(body)
        draft.finish(key)


def audited(log: DeltaLog, target: int = 3, key: str | None = KEY) -> Chain:
    trail = read_log_trail(log, key)
    chain = prove(trail.links, target, 0, digest(0))
    chain.problems += trail.problems
    return chain


def test_a_log_proves_its_versions(log: DeltaLog) -> None:
    for version in (1, 2, 3):
        write(log, version)
    chain = audited(log)
    assert chain.problems == []
    assert [(link.base_version, link.version) for link in chain.links] == [(0, 1), (1, 2), (2, 3)]
    assert {link.sender for link in chain.links} == {"r (epoch 2, trainer:11)"}
    assert chain.links[-1].digest == digest(3)
    assert read_log_trail(log, KEY).signed == 3


def test_pruned_versions_keep_their_records(log: DeltaLog) -> None:
    for version in (1, 2, 3):
        write(log, version)
    gone = log.listing().entries[:2]
    keep_publications(log.store, gone)
    log.store.delete([entry.folder.name for entry in gone])
    assert [entry.version for entry in log.listing().entries] == [3]
    chain = audited(log)
    assert chain.problems == []
    assert [link.source.endswith("(pruned)") for link in chain.links] == [True, True, False]


@pytest.mark.parametrize("line", [b"{", b'{"version": 1, "files": {"\xff": null}}'])
def test_damaged_record_of_pruned_versions_is_named(place: Place, line: bytes) -> None:
    write(place.open(), 1)
    place.put("audit/v000001-v000001-1.jsonl", line)
    with pytest.raises(LogDamaged, match=r"audit/v000001-v000001-1.jsonl cannot be read"):
        audited(place.open(), 1)


def test_a_missing_version_is_a_gap(log: DeltaLog) -> None:
    for version in (1, 2, 3):
        write(log, version)
    log.store.delete([folder_name(2)])
    assert audited(log).problems == ["gap: no record leads to version 2"]


def test_other_weights_between_versions_are_a_gap(log: DeltaLog) -> None:
    write(log, 1)
    write(log, 2, digest_before="e" * 32)
    write(log, 3)
    assert audited(log).problems == [
        f"gap: weight_v000002 starts from the weights {'e' * 32}, and what leads there are "
        f"{digest(1)}"
    ]


def test_changed_done_is_named(place: Place) -> None:
    log = place.open()
    for version in (1, 2, 3):
        write(log, version)
    name = f"{folder_name(2)}/{DONE}"
    place.put(name, place.read(name).replace(b"trainer:11", b"trainer:12"))
    problem = "signature: weight_v000002 was changed: its signature is of something else"
    assert problem in audited(place.open()).problems[0]
    assert audited(place.open(), key=None).problems == []


def test_versions_without_record_are_read(place: Place) -> None:
    log = place.open()
    write(log, 1)
    name = f"{folder_name(1)}/{DONE}"
    done = msgspec.json.decode(place.read(name), type=Done)
    place.put(name, msgspec.json.encode(msgspec.structs.replace(done, publication=None)))
    chain = audited(place.open(), 1, None)
    assert chain.problems == []
    assert chain.links[0].sender == "r (epoch 2, trainer:11)"
    assert audited(place.open(), 1).problems == [
        "signature: weight_v000001 has no record of its sender"
    ]


@pytest.mark.parametrize("signed_with", [None, "another key"])
def test_records_need_the_signature_by_the_key(log: DeltaLog, signed_with: str | None) -> None:
    write(log, 1, signed_with)
    [problem] = audited(log, 1).problems
    assert problem.startswith("signature: weight_v000001")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The signed record of a version."""
    folder = tmp_path_factory.mktemp("log")
    write(open_log(folder), 1)
    return msgspec.json.decode((folder / folder_name(1) / DONE).read_bytes(), type=Done)


@PROPERTY
@given(data=st.data())
def test_every_fact_of_a_record_is_signed(done: Done, data: st.DataObject) -> None:
    assert is_signed(done, KEY)
    content = msgspec.to_builtins(done)
    name = data.draw(st.sampled_from(sorted({*content, *content["publication"]})))
    group = content if name in content else content["publication"]
    if name in ("publication", "signature"):
        return
    value = group[name]
    if name == "files":
        [facts] = value.values()
        facts["bytes"] += 1
    else:
        group[name] = value + 1 if isinstance(value, int | float) else value[::-1] + "x"
    assert not is_signed(msgspec.convert(content, Done), KEY)


def link(version: int, base: int | None, **facts: Any) -> Link:
    known: dict[str, Any] = {
        "source": folder_name(version),
        "run": "r",
        "digest_before": None if base is None else digest(base),
        "digest": digest(version),
        "nbytes": 1,
        "sender": None,
        "at": None,
    }
    return Link(version=version, base_version=base, **{**known, **facts})


def test_two_successors_are_a_fork() -> None:
    links = [link(1, 0), link(2, 1), link(3, 1)]
    assert prove(links, 3).problems == [
        "fork: weight_v000002 and weight_v000003 both start from version 1"
    ]


def test_two_contents_are_a_fork() -> None:
    links = [link(1, 0), link(1, 0, digest="e" * 32, source="another record")]
    assert prove(links, 1).problems[0].startswith("fork: version 1 has the digest")


def test_a_fold_is_no_fork() -> None:
    links = [link(1, 0), link(2, 1), link(3, 2), fold(3, 0)]
    chain = prove(links, 3, 0, digest(0))
    assert (chain.problems, len(chain.links)) == ([], 3)


def fold(version: int, base: int) -> Link:
    return link(version, base, source=folder_name(version, base), is_fold=True)


def test_a_fold_hides_no_fork() -> None:
    links = [link(5, 4), fold(10, 5), link(11, 5), link(12, 5)]
    assert prove(links, 5).problems == [
        "fork: weight_v000011 and weight_v000012 both start from version 5"
    ]


def test_two_folds_are_no_fork() -> None:
    """Those that they lead over were pruned, and had no record."""
    assert prove([fold(40, 0), fold(80, 0)], 80, 0, digest(0)).problems == []


@pytest.mark.parametrize(
    ("target", "given", "problem"),
    [
        (2, digest(2), None),
        (0, digest(0), None),
        (2, "e" * 32, f"gap: weight_v000002 leads to {digest(2)}, the checkpoint has {'e' * 32}"),
        (
            0,
            "e" * 32,
            f"gap: weight_v000001 starts from {digest(0)}, the checkpoint has {'e' * 32}",
        ),
        (2, None, "gap: version 2 is the checkpoint's, whose digest is not known"),
        (7, digest(7), "gap: no record has a digest of version 7"),
    ],
)
def test_the_checkpoint_itself_is_compared(
    target: int, given: str | None, problem: str | None
) -> None:
    links = [link(version, version - 1) for version in (1, 2, 3)]
    found = prove(links, target, target, given).problems
    assert [one.partition(": give")[0] for one in found[:1]] == ([problem] if problem else [])


def test_a_number_used_again_after_pruning_is_a_fork(log: DeltaLog) -> None:
    for version in (1, 2):
        write(log, version)
    first = log.listing().entries[0]
    keep_publications(log.store, [first])
    assert audited(log, 2).problems == []  # it was not deleted after all
    log.store.delete([first.folder.name])
    write(log, 1, digest_after="e" * 32)
    problem = f"fork: version 1 has the digest {'e' * 32} in weight_v000001, and {digest(1)} in"
    assert any(one.startswith(problem) for one in audited(log, 2).problems)


@pytest.mark.parametrize("wrong", [{"publication": None}, {"base_version": 1}, {"base_version": 2}])
def test_impossible_record_of_a_pruned_version(place: Place, wrong: dict[str, Any]) -> None:
    log = place.open()
    write(log, 1)
    [entry] = log.listing().entries
    done = msgspec.structs.replace(present(done_of(entry)), **wrong)
    place.put("audit/v000001-v000001-0123abcd.jsonl", msgspec.json.encode(done) + b"\n")
    with pytest.raises(LogDamaged, match=r"0123abcd\.jsonl cannot be read"):
        read_log_trail(log, None)


def test_another_checkpoint_does_not_connect() -> None:
    [problem] = prove([link(1, 0)], 1, 0, "e" * 32).problems
    assert problem.startswith("gap: weight_v000001 starts from the weights")


def test_a_full_version_begins_a_chain() -> None:
    links = [link(1, 0), link(2, None), link(3, 2)]
    chain = prove(links, 3)
    assert (chain.problems, [one.version for one in chain.links]) == ([], [2, 3])
    assert prove(links, 3, 0, digest(0)).problems == [
        "weight_v000002 is full: no record connects it with the checkpoint"
    ]
