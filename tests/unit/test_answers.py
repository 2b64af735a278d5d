"""How a command or a sender words what a server has answered."""

from __future__ import annotations

import json

import pytest

from engine_ext.answers import answer_in_words
from engine_ext.errors import BaseMismatch, MalformedPart


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            MalformedPart("params names a tensor twice", tensor="a.weight"),
            "HTTP 400: MalformedPart: params names a tensor twice (a.weight)",
        ),
        (
            BaseMismatch("a.weight: its copies differ", tensor="a.weight"),
            "HTTP 409: BaseMismatch: a.weight: its copies differ",
        ),
        (MalformedPart("part 3 of 2"), "HTTP 400: MalformedPart: part 3 of 2"),
    ],
)
def test_refusal_names_its_tensor_once(error: MalformedPart | BaseMismatch, words: str) -> None:
    body = json.dumps({"error": error.to_wire()})
    assert answer_in_words(error.status, body, None, "http://engine") == words
