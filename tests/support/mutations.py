"""Ways to break one part: its bytes, or one place of its JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.support.independent_encoder import header_of, with_header

HOSTILE: list[Any] = ["", "0", "-1", "x", 0, 1, -1, 2, 2**31, 2**63, 1.5, None, True, [], {}, "I8"]


@st.composite
def mutants(draw: st.DrawFn, body: bytes) -> bytes:
    """`body` with one thing changed: bytes, or one place of the JSON."""
    kinds = ("flip", "cut", "insert", "delete", "header", "metadata", "params")
    kind = draw(st.sampled_from(kinds))
    at = draw(st.integers(0, len(body) - 1))
    if kind == "flip":
        return body[:at] + bytes([body[at] ^ draw(st.integers(1, 255))]) + body[at + 1 :]
    if kind == "cut":
        return body[:at]
    if kind == "insert":
        return body[:at] + draw(st.binary(min_size=1, max_size=9)) + body[at:]
    if kind == "delete":
        return body[:at] + body[at + draw(st.integers(1, 9)) :]
    header, data = header_of(body)
    metadata = header["__metadata__"]
    if kind == "params":
        params = json.loads(metadata["params"])
        mutate(draw, draw(st.sampled_from(params)))
        metadata["params"] = json.dumps(params)
    elif kind == "metadata":
        mutate(draw, metadata)
    else:
        mutate(draw, draw(st.sampled_from([header, *header.values()])))
    return with_header(header, data)


def mutate(draw: st.DrawFn, target: dict[str, Any]) -> None:
    """Change one key of a JSON object: drop it, or give it another's value or a hostile one."""
    key = draw(st.sampled_from(sorted(target)))
    choice = draw(st.sampled_from(["drop", "swap", "nudge", "hostile"]))
    if choice == "drop":
        del target[key]
    elif choice == "swap":
        other = draw(st.sampled_from(sorted(target)))
        target[key], target[other] = target[other], target[key]
    elif choice == "nudge" and isinstance(target[key], int):
        target[key] += draw(st.integers(-8, 8))
    else:
        target[key] = draw(st.sampled_from(HOSTILE))


@st.composite
def byte_mutants(draw: st.DrawFn, body: bytes) -> bytes:
    at = draw(st.integers(0, len(body) - 1))
    cut = draw(st.integers(0, 3))
    return body[:at] + draw(st.binary(max_size=4)) + body[at + cut :]
