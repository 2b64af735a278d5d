"""Syncs that a destination has missed: what it holds, and what is sent next."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from delta_sender import DeltaSender, MultiSender, PartialSyncError
from delta_sender.diff.snapshot import Snapshot
from delta_sender.encode.acked_state import AckedState
from engine_ext.format import ENCODINGS
from tests.support.fake_engine import A, B, Engine, bits, client_of, copied, error, sends

SIZE = 24
# Few different numbers: elements come back to what they were, and some syncs change most of them.
WEIGHTS = arrays(np.int16, SIZE, elements=st.sampled_from([0, 1, 0x3F80]))
TAKES = st.tuples(WEIGHTS, st.booleans())


def tensor_of(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy()).view(torch.bfloat16)


@settings(deadline=None)
@given(base=WEIGHTS, syncs=st.lists(TAKES, max_size=5), encoding=st.sampled_from(ENCODINGS))
def test_missed_changes_lead_to_what_is_held(
    base: np.ndarray, syncs: Sequence[tuple[np.ndarray, bool]], encoding: str
) -> None:
    """Each sync is taken or missed; what is sent leads from what is held to the new weights."""
    rest = ("rest", torch.zeros(10 * SIZE))  # changes of half of the model can be kept
    snapshot = Snapshot([("w", tensor_of(base)), rest], encoding)
    state, held = AckedState(snapshot, 0), base.view(np.uint16).copy()
    for weights, takes in syncs:
        read = snapshot.read([("w", tensor_of(weights)), rest])
        changes = {key: change for key, change in read if change is not None}
        change = snapshot.change_between("w", state.missed.get("w"), changes.get("w"))
        sent = held.copy()
        if change is not None:
            one = snapshot.sparse(change).decoded()
            assert one.indices is not None
            assert np.array_equal(held[one.indices], one.old)
            assert change.nnz in (one.indices.size, SIZE)
            sent[one.indices] = one.new
        assert np.array_equal(sent, weights.view(np.uint16))
        if takes:
            held, state.missed = sent, {}
        else:
            state.note_missed(changes)
        snapshot.advance(changes)
        assert not state.needs_full
        assert np.array_equal(snapshot.image("w", state.missed.get("w")).values, held)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("digested", [True, False])
def test_engine_gets_all_that_it_has_missed(encoding: str, digested: bool) -> None:
    """Most of a small tensor that no digest covers, and then a few elements more."""
    base = {"norm": torch.zeros(1000).bfloat16(), "w": torch.zeros(100_000).bfloat16()}
    undigested = set() if digested else {"norm"}
    engines = [Engine.of(base, undigested=undigested) for _ in range(2)]
    model = copied(base)
    client = client_of(*engines)
    with MultiSender([A, B], base.items(), client=client, encoding=encoding) as sender:
        for missed, change in ((True, (0, 800, 1)), (True, (0, 100, 0)), (False, (900, 905, 2))):
            first, last, value = change
            model["norm"][first:last] = value
            start = len(engines[1].requests)
            full = sends(error(507, "SpoolFull"))
            engines[1].faults = {start + n: full for n in range(9)} if missed else {}
            with contextlib.suppress(PartialSyncError):
                sender.sync(model.items())
        for engine in engines:
            assert {name: one.tobytes() for name, one in engine.weights.items()} == {
                name: bits(one).tobytes() for name, one in model.items()
            }


def test_restarted_engine_lacks_what_no_digest_covers() -> None:
    """Its digest is that of the sender's, as no tensor that it covers has changed."""
    base = {"gate": torch.zeros(64), "w": torch.zeros(1000).bfloat16()}
    engine, model = Engine.of(base, undigested={"gate"}), copied(base)
    with DeltaSender("http://engine", base.items(), client=engine.client()) as sender:
        for step in range(2):
            model["gate"][10 * step : 10 * step + 10] = 1
            report = sender.sync(model.items())
            assert (report.full, report.nnz) == (False, (10, 64)[step])
            assert engine.holds(model)
            engine.restart(base)
