"""The reader of the spans in all answers that have some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from delta_sender import rollouts

LABELS = [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 9}]
SPANS = [[0, 7], [3, 8]]


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ({"choices": [{"weight_spans": SPANS}, {"text": ""}]}, [SPANS, None]),
        ({"choices": []}, []),
        # /inference/v1/generate, SGLang's /generate, and vLLM in Python
        ({"choices": [{"token_ids": [1], "weight_versions": LABELS}]}, [SPANS]),
        ({"text": "", "meta_info": {"weight_version": "8", "weight_versions": LABELS}}, [SPANS]),
        ([{"meta_info": {"weight_versions": LABELS}}, {"meta_info": {}}], [SPANS, None]),
        (
            SimpleNamespace(
                outputs=[SimpleNamespace(weight_versions=[SimpleNamespace(version="x", start=0)])]
            ),
            [[[0, "x"]]],
        ),
    ],
)
def test_spans_of_every_choice(response: Any, found: list[Any]) -> None:
    assert rollouts.spans(response) == found
