"""Senders that publish in a delta log in a real object store."""

from __future__ import annotations

import errno

import pytest
import torch

from delta_sender import LogSender
from engine_ext.log import Objects
from tests.support.fake_engine import copied, model_of, train
from tests.unit.sender.test_log_destination import chain, replayed

pytestmark = pytest.mark.slow


def test_a_second_sender_takes_over(store_url: str) -> None:
    """The first one's next version is refused, and its snapshot stays where the log is."""
    model = model_of(torch.bfloat16)
    base = copied(model)
    with LogSender(store_url, model.items()) as first:
        train(model)
        first.sync(model.items())
        taken = copied(model)
        with LogSender(store_url, taken.items()) as second:
            train(model, 1)
            with pytest.raises(BlockingIOError, match="another sender"):
                first.sync(model.items())
            train(taken, 2)
            second.sync(taken.items())
    assert replayed(store_url, base).holds(taken)


def test_the_answer_to_the_last_write_is_lost(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version might be in the log: it stays whole, and a full version applies to any base."""
    model = model_of(torch.bfloat16)
    base = copied(model)
    create = Objects.create

    def loses(store: Objects, name: str, data: bytes) -> None:
        create(store, name, data)
        if name.endswith("DONE"):
            raise OSError(errno.EIO, "no answer", name)

    with LogSender(store_url, model.items()) as sender:
        train(model)
        with monkeypatch.context() as patched:
            patched.setattr(Objects, "create", loses)
            with pytest.raises(OSError, match="no answer"):
                sender.sync(model.items())
        at_one = copied(model)
        train(model, 1)
        assert sender.sync(model.items()).full
    assert chain(store_url) == [(0, 1), (None, 2)]
    assert replayed(store_url, at_one, 1).holds(model)
    assert replayed(store_url, base).holds(model)
