"""The examples in the docstrings of the public classes run, against engines in this process."""

from __future__ import annotations

import doctest
import functools
from collections import defaultdict
from types import ModuleType

import httpx
import pytest
import torch

import delta_sender
from delta_sender.diff import quantize
from delta_sender.publish import multi_sender, sender
from tests.support.fake_engine import Engine, error


@pytest.mark.parametrize("module", [delta_sender, sender, multi_sender, quantize])
def test_the_examples_run(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"lm_head.weight": torch.zeros(16, 4, dtype=torch.bfloat16)}
    engines: defaultdict[str, Engine] = defaultdict(lambda: Engine.of(weights))

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "broken":
            return error(507, "SpoolFull") if request.method == "POST" else httpx.Response(404)
        return engines[request.url.host].answer(request)

    client = functools.partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert examples
    for test in examples:
        test.globs = {}  # an example has nothing but what it imports
        assert not doctest.DocTestRunner().run(test).failed
