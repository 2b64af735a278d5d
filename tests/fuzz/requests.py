"""Requests to every route, most of them nearly valid. ROOT stands for the allowed folder."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from tests.fuzz.bodies import TEXTS, any_json, bodies, good
from tests.support.delta_bodies import SHAPES
from tests.support.endpoint_rig import DELTA, FROM_DISK, STATUS

QUERY = st.dictionaries(
    st.sampled_from(["weight_version", "base_version", "pause_mode", "flush_cache", "plan"]),
    st.sampled_from(["7", "8", "-1", "true", "false", "keep", "abort", ""]) | st.text(max_size=9),
    max_size=3,
)
HEADERS = st.dictionaries(
    st.sampled_from(["Content-Encoding", "Content-Length", "X-Delta-Signature", "Authorization"]),
    st.sampled_from(["identity", "gzip", "0", "-1", "99999999999999999999", "x"]),
    max_size=1,
)
TYPES = st.sampled_from(
    [*["application/octet-stream"] * 6, *["application/json"] * 4, "text/plain", "", "application/"]
)
FOLDERS = st.sampled_from(["ROOT", "ROOT/..", "", "/", "ROOT/pipe"])
FILES = st.sampled_from(["a", "b", "a.safetensors", "pipe", "..", "", "ROOT/a"])
DISK = st.fixed_dictionaries(
    {
        "model_path": st.sampled_from(["ROOT", "ROOT/..", "", "/", "ROOT/pipe"])
        | st.text(max_size=9)
    },
    optional={
        "files": st.lists(FILES | st.text(max_size=9), max_size=3) | any_json(),
        "load_format": st.sampled_from(["delta", "auto", None]) | any_json(),
        "weight_version": st.integers(0, 9) | any_json(),
        "base_version": st.integers(0, 9) | any_json(),
        "pause_mode": st.sampled_from(["keep", "wait"]) | any_json(),
        "flush_cache": st.booleans() | any_json(),
    },
)
# A valid request with a valid part: otherwise hardly any would be committed.
SYNCS = st.fixed_dictionaries(
    {
        "method": st.just("POST"),
        "path": st.just(DELTA),
        "type": st.just("application/octet-stream"),
        "params": st.just({}),
        "headers": st.just({}),
        "body": good(SHAPES),
        "json": st.just("{}"),
    }
)
REQUESTS = SYNCS | st.fixed_dictionaries(
    {
        "method": st.sampled_from(["POST", "POST", "POST", "POST", "GET", "PUT"]),
        "path": st.sampled_from(
            [DELTA] * 4 + [FROM_DISK, STATUS, "/delta_digest", "/delta_rollback", "/delta_catch_up"]
        ),
        "type": TYPES,
        "params": QUERY | st.just({}),
        "headers": HEADERS | st.just({}),
        "body": bodies(SHAPES) | good(SHAPES),
        "json": DISK.map(json.dumps) | any_json().map(json.dumps) | st.sampled_from(TEXTS),
    }
)
