"""The weight versions of a choice's tokens, as both engines' OpenAI routes answer them.

A choice gets the key `KEY`: a list of spans ``[first_token, version]``, in the order of the tokens.
A span ends where the next one begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

KEY: Final = "weight_spans"
Spans = list[list[int | str]]

_FINISHED: Final = '"finish_reason":"'
_DATA: Final = "data: "


def spans(found: Iterable[tuple[int, str]]) -> Spans:
    """Return the spans of one choice, from the first token and the version of each.

    Versions are numbers; a label that something else has given the weights stays a text.
    """
    return [[first, int(label) if label.isdecimal() else label] for first, label in found]


def add_to_event(event: str, choices: Mapping[int, Spans]) -> str:
    """Return a server-sent event of a stream, with the spans of the choices that end in it.

    Args:
        choices: the spans by the index of the choice, as far as they are known.
    """
    # Most events end nothing, and in their JSON the quotes of a text are escaped.
    if _FINISHED not in event or not event.startswith(_DATA):
        return event
    body = json.loads(event.removeprefix(_DATA))
    for choice in body.get("choices", ()):
        if choice.get("finish_reason") is not None and choice.get("index") in choices:
            choice[KEY] = choices[choice["index"]]
    return f"{_DATA}{json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
