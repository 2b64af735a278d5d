"""The script that ports start from: its bytes, what a decoder makes of them, and its answers."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from engine_ext.dtypes import bits_dtype
from engine_ext.format import DecodedPart, decode_part
from tests.support.fake_engine import Engine
from tests.support.independent_encoder import PROPERTY
from tests.support.present import present

SCRIPT = Path(__file__).parents[3] / "scripts" / "reference_sender.py"
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8")
# Signed zeros, NaNs of several payloads, infinities; narrower dtypes take the last bytes.
PATTERNS = (0, 0x80008000, 0x80000080, 0x7FC17FC1, 0xFFC1FFFF, 0x7F817F80, 0x3F803F81)

_spec = importlib.util.spec_from_file_location("reference_sender_of_ports", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)


def tensor_of(dtype: str, *patterns: int, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor of these bit patterns, cut to the width of the dtype."""
    wide = np.array(patterns, "<u8").astype(bits_dtype(dtype))
    flat = torch.empty(len(patterns), dtype=getattr(torch, dtype))
    flat.view(torch.uint8).numpy()[:] = wide.view(np.uint8)
    return flat if shape is None else flat.reshape(shape)


def patterns_of(tensor: torch.Tensor) -> list[int]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    raw = own.view(-1).view(torch.uint8).numpy()
    return raw.view(bits_dtype(dtype)).tolist()


@dataclass
class FakeEngine(Engine):
    """Keeps what it commits.

    Attributes:
        answers: Given to the next posts, in this order, in place of what they would be answered;
            a function is called with what it is to replace.
        parts: What it has committed.
        syncs: For each commit, whether it was of a full sync.
    """

    answers: list[Callable[[Callable[[], httpx.Response]], httpx.Response]] = field(
        default_factory=list
    )
    parts: list[DecodedPart] = field(default_factory=list)
    syncs: list[bool] = field(default_factory=list)

    def take(self, request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://engine/update_weights_delta"
        assert request.headers["Content-Type"] == "application/octet-stream"
        take = partial(super().take, request)
        return self.answers.pop(0)(take) if self.answers else take()

    def commit(self, full: bool) -> httpx.Response | None:
        sent = [part for _, (part, _) in sorted(self.staged.items())]
        refused = super().commit(full)
        if refused is None:
            self.parts += sent
            self.syncs.append(full)
        return refused


def refusal(
    status: int, kind: str, state: str = "unchanged", message: str = "no", **headers: str
) -> httpx.Response:
    error = {"type": kind, "message": message, "engine_state": state}
    return httpx.Response(status, json={"error": error}, headers=headers)


def model() -> dict[str, torch.Tensor]:
    return {
        "a": tensor_of("bfloat16", *range(6), shape=(2, 3)),
        "b": tensor_of("bfloat16", 7, 8, 9),
        "c": tensor_of("bfloat16", 1),
    }


def changed(tensors: dict[str, torch.Tensor], name: str, *indices: int) -> dict[str, torch.Tensor]:
    """A copy in which these elements of one tensor have another lowest bit."""
    new = {key: tensor.clone() for key, tensor in tensors.items()}
    new[name].view(-1).view(torch.uint8)[[i * new[name].itemsize for i in indices]] ^= 1
    return new


SPARSE = (
    bytes.fromhex("e002000000000000") + rb'{"__metadata__": {"encoding": "deltas_zstd", '
    rb'"params": "[{\"name\": \"a.weight\", \"dtype\": \"bfloat16\", \"shape\": [2, 3], '
    rb"\"pos_start\": 0, \"val_start\": 0, \"pos_end\": 4, \"val_end\": 2, \"pos_width\": 2}, "
    rb"{\"name\": \"b.weight\", \"dtype\": \"bfloat16\", \"shape\": [65538], "
    rb"\"pos_start\": 4, \"val_start\": 2, \"pos_end\": 12, \"val_end\": 4, \"pos_width\": 4}]"
    rb'", "sync_id": "s", "current_version": "5", "base_version": "4", "part": "0", '
    rb'"num_parts": "1", "checksum": "xxh3_128:6365c21e4a341db1dd777e7af9e7406a", '
    rb'"manifest_checksum": "xxh3_128:09479999f3f4a8f134a4a634ca5b5bdb"}, '
    rb'"__values__": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}, '
    rb'"__positions__": {"dtype": "U8", "shape": [12], "data_offsets": [8, 20]}}'
    + b" " * 3
    + bytes.fromhex("c17f 0080  803f 00c0")  # a NaN, -0.0; 1.0, -2.0
    + bytes.fromhex("0100 0200  00000000 00000100")  # of indices 1, 4; 0, 65537
)
DENSE = (
    bytes.fromhex("3002000000000000") + rb'{"__metadata__": {"encoding": "deltas_zstd", '
    rb'"params": "[{\"name\": \"scale\", \"dtype\": \"float32\", \"shape\": [], '
    rb"\"pos_start\": 0, \"val_start\": 0, \"pos_end\": 0, \"val_end\": 1, \"pos_width\": 0}]"
    rb'", "sync_id": "s", "current_version": "5", "full": "true", "part": "0", '
    rb'"num_parts": "1", "checksum": "xxh3_128:e6f9acca6893caeb591ef4e963e120d4", '
    rb'"manifest_checksum": "xxh3_128:d6133d050c2d6c34d3b071785795a70d"}, '
    rb'"__values__": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
    rb'"__positions__": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]}} '
    + bytes.fromhex("0000803f")
)
EMPTY = (
    bytes.fromhex("a801000000000000")
    + rb'{"__metadata__": {"encoding": "deltas_zstd", "params": "[]", "sync_id": "s", '
    rb'"current_version": "5", "base_version": "4", "part": "0", "num_parts": "1", '
    rb'"checksum": "xxh3_128:99aa06d3014798d86001c324468d497f", '
    rb'"manifest_checksum": "xxh3_128:c59c3aa87ba8f2eb266f4a19ad5643fc"}, '
    rb'"__values__": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, '
    rb'"__positions__": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}' + b" " * 7
)
NUMBERS = {"part": "0", "num_parts": "1"}
SPARSE_METADATA = {"sync_id": "s", "current_version": "5", "base_version": "4", **NUMBERS}
FULL_METADATA = {"sync_id": "s", "current_version": "5", "full": "true", **NUMBERS}


def golden_changes() -> list[tuple[str, torch.Tensor, Any]]:
    base = {
        "a.weight": tensor_of("bfloat16", 1, 0x7FC0, 2, 3, 0x0000, 4, shape=(2, 3)),
        "b.weight": torch.zeros(65538, dtype=torch.bfloat16),
        "c.weight": tensor_of("bfloat16", 0x7FC0, 0x8000),
    }
    new = {name: tensor.clone() for name, tensor in base.items()}
    new["a.weight"] = tensor_of("bfloat16", 1, 0x7FC1, 2, 3, 0x8000, 4, shape=(2, 3))
    new["b.weight"][[0, 65537]] = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    found: list[tuple[str, torch.Tensor, Any]] = script.compare(base, new)
    return found


@pytest.mark.parametrize(
    ("changes", "metadata", "golden"),
    [
        (golden_changes(), SPARSE_METADATA, SPARSE),
        ([("scale", torch.tensor(1.0), None)], FULL_METADATA, DENSE),
        ([], SPARSE_METADATA, EMPTY),
    ],
    ids=["sparse", "dense", "empty"],
)
def test_golden_bytes(
    changes: list[tuple[str, torch.Tensor, Any]], metadata: dict[str, str], golden: bytes
) -> None:
    part = script.encode_part(changes, metadata)
    assert part[:4] == b"\x28\xb5\x2f\xfd"
    container = zstandard.decompress(part)
    assert container == golden
    # The file is one that the safetensors library reads, and that the engine takes.
    assert load(container)["__positions__"].dtype == torch.uint8
    assert [delta.name for delta in decode_part(container).deltas] == [each[0] for each in changes]


@st.composite
def steps(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model of tensors of several dtypes before and after a step."""
    base, new = {}, {}
    for number in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.sampled_from([(), (0,), (1,), (3, 0), (3, 5), (2, 70_000)]))
        numel = int(np.prod(shape, dtype=int))
        old = np.zeros(numel, np.uint64)
        fresh = old.copy()
        if numel:
            at = draw(st.lists(st.integers(0, numel - 1), max_size=8))
            some = st.lists(st.sampled_from(PATTERNS), min_size=len(at), max_size=len(at))
            old[at], fresh[at] = draw(some), draw(some)
        name = f"tensor {number} \u00e9\n="
        base[name] = tensor_of(dtype, *old.tolist(), shape=shape)
        new[name] = tensor_of(dtype, *fresh.tolist(), shape=shape)
    return base, new


@pytest.mark.slow
@PROPERTY
@given(steps())
def test_decoder_finds_exactly_the_changed_elements(
    step: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    base, new = step
    engine = FakeEngine.of(base)
    assert script.Sender(engine.client(), base).sync(new) == 1
    found = {}
    for part in engine.parts:
        assert len({delta.dtype for delta in part.deltas}) <= 1
        for delta in part.deltas:
            assert delta.dtype == str(new[delta.name].dtype).removeprefix("torch.")
            assert delta.shape == tuple(new[delta.name].shape)
            found[delta.name] = dict(
                zip(present(delta.indices).tolist(), delta.values.tolist(), strict=True)
            )
    expected = {
        name: {
            index: after
            for index, (before, after) in enumerate(
                zip(patterns_of(base[name]), patterns_of(new[name]), strict=True)
            )
            if before != after
        }
        for name in new
    }
    assert found == {name: elements for name, elements in expected.items() if elements}
    assert engine.syncs == [False]


@pytest.mark.parametrize(("index", "width"), [(65535, 2), (65536, 4)])
def test_gap_widths(index: int, width: int) -> None:
    part = script.encode_part([("w", torch.zeros(70_000), np.array([index]))], {})
    (entry,) = decode_part(zstandard.decompress(part)).manifest.params
    assert entry.pos_width == width


def test_gap_that_has_no_form() -> None:
    with pytest.raises(ValueError, match="w: a gap of 4294967296 elements; send the tensor dense"):
        script.encode_part([("w", torch.zeros(1), np.array([2**32]))], {})


def test_sparse_syncs_in_one_part() -> None:
    base = model()
    engine = FakeEngine.of(base)
    sender = script.Sender(engine.client(), base)
    first = changed(base, "a", 1, 5)
    second = changed(changed(first, "b", 0), "a", 1)
    for version, tensors in enumerate((first, second, second), 1):
        assert sender.sync(tensors) == sender.version == engine.version == version
        assert engine.holds(tensors)
    manifests = [part.manifest for part in engine.parts]
    assert [len(manifest.params) for manifest in manifests] == [1, 2, 0]
    assert [manifest.base_version for manifest in manifests] == [0, 1, 2]
    assert {(m.part, m.num_parts, m.full) for m in manifests} == {(0, 1, False)}
    assert len({manifest.sync_id for manifest in manifests}) == 3


def test_base_is_a_copy() -> None:
    """A trainer changes its tensors in place."""
    weights = model()
    engine = FakeEngine.of(weights)
    sender = script.Sender(engine.client(), weights)
    for step in range(3):
        weights["b"].view(torch.int16)[step] ^= 1
        sender.sync(weights)
        assert engine.holds(weights)
    assert [part.deltas[0].nnz for part in engine.parts] == [1, 1, 1]


def test_views_and_parameters() -> None:
    base = {
        "view": torch.arange(6.0).reshape(2, 3).T,
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "nothing": torch.from_numpy(np.empty(0, np.float32)),
    }
    engine = FakeEngine.of(base)
    new = {**base, "view": base["view"].clone(), "parameter": torch.tensor([0.0, -0.0])}
    new["view"][2, 0] = float("nan")
    script.Sender(engine.client(), base).sync(new)
    assert engine.holds(new)
    assert sum(delta.nnz for delta in engine.parts[0].deltas) == 2


def test_large_syncs_are_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PART_BYTES", 10)
    base = model()
    engine = FakeEngine.of(base)
    sender = script.Sender(engine.client(), base)
    assert sender.sync(base) == 1
    engine.version, engine.parts, engine.syncs = 3, [], []
    assert sender.sync(base) == 4
    assert [[delta.name for delta in part.deltas] for part in engine.parts] == [["a", "b"], ["c"]]
    assert engine.syncs == [True]


def test_tensors_that_the_engine_ignores_are_left_out() -> None:
    base = model()
    engine = FakeEngine.of(base, ignored={"b"})
    sender = script.Sender(engine.client(), base)
    new = changed(changed(base, "a", 0), "b", 1)
    sender.sync(new)
    engine.version = 9
    newer = changed(new, "a", 2)
    sender.sync(newer)
    assert engine.holds(newer)
    assert engine.syncs == [False, True]


def test_restarted_engine_is_sent_everything() -> None:
    base, new = model(), changed(model(), "a", 3)
    engine = FakeEngine.of(base)
    sender = script.Sender(engine.client(), base)
    sender.sync(new)
    engine.restart(changed(base, "c", 0))  # its parts claim it
    assert sender.sync(new) == sender.version == engine.version == 3
    assert engine.holds(new)
    assert engine.syncs == [False, True]
    assert engine.parts[-1].manifest.base_version is None
    assert sender.sync(changed(new, "b", 1)) == 4
    assert engine.syncs == [False, True, False]


def test_engine_of_another_run_is_left_alone() -> None:
    base, new = model(), changed(model(), "a", 3)
    engine = FakeEngine.of(base)
    zombie = script.Sender(engine.client(), base)
    zombie.sync(new)
    with pytest.raises(script.SyncError, match="RunConflict"):
        script.Sender(engine.client(), new, version=1).sync(base)
    engine.owner = {"run": "another", "epoch": 1, "host": "h", "pid": 1}  # it has taken over
    with pytest.raises(script.SyncError, match="RunConflict"):
        zombie.sync(base)
    assert (engine.version, engine.syncs) == (1, [False])


@pytest.mark.parametrize("loaded", [True, False])
def test_base_error_leaves_weights_of_others(loaded: bool) -> None:
    """They are another run's, or were loaded before the sender had sent anything."""
    base, new = model(), changed(model(), "a", 3)
    engine = FakeEngine.of(base)
    sender = script.Sender(engine.client(), base)
    others = changed(base, "c", 0)

    def conflict(take: Callable[[], httpx.Response]) -> httpx.Response:
        engine.restart(others)
        if not loaded:
            engine.run, engine.loaded = "another", False
        return refusal(409, "BaseMismatch")

    if not loaded:
        sender.sync(base)
    engine.answers = [conflict]
    with pytest.raises(script.BaseError, match="BaseMismatch"):
        sender.sync(new)
    assert engine.holds(others)


def test_half_written_engine_is_sent_everything() -> None:
    base, new = model(), changed(model(), "a", 3)
    engine = FakeEngine.of(base)
    sender = script.Sender(engine.client(), base)

    def fails(take: Callable[[], httpx.Response]) -> httpx.Response:
        engine.run, engine.loaded = sender.run, False
        return refusal(500, "CommitFailed", state="uncertain")

    engine.answers = [fails]
    assert sender.sync(new) == 2
    assert engine.syncs == [True]


def test_part_of_another_sync_is_no_success() -> None:
    """The engine might hold more of that sync than this part."""
    base, new = model(), changed(model(), "a", 3)
    engine = FakeEngine.of(base)
    sender = script.Sender(engine.client(), base)
    sender.sync(base)
    engine.answers = [lambda _: httpx.Response(200, json={"status": "already_applied"})]
    assert sender.sync(new) == 3
    assert engine.syncs == [False, True]
    assert engine.holds(new)


REFUSALS = [
    lambda _: refusal(422, "NotUpdatable", message="a: this engine cannot update it exactly"),
    lambda _: refusal(409, "SyncInProgress", message="a: this engine", **{"Retry-After": "7"}),
    lambda _: httpx.Response(502, text="a: this engine is away"),
]


@pytest.mark.parametrize("answer", REFUSALS, ids=["refused", "busy", "proxy"])
def test_refusal_leaves_the_base_where_it_was(
    answer: Callable[[Callable[[], httpx.Response]], httpx.Response],
) -> None:
    base, first = model(), changed(model(), "a", 3)
    engine = FakeEngine.of(base)
    sender = script.Sender(engine.client(), base)
    engine.answers = [answer]
    with pytest.raises(script.SyncError, match=r"HTTP \d{3}: .*a: this engine"):
        sender.sync(first)
    assert (sender.version, engine.version) == (0, 0)
    assert engine.answers == []
    second = changed(first, "b", 0)
    assert sender.sync(second) == sender.version == engine.version == 2
    assert engine.holds(second)
    assert engine.syncs == [False]


def test_refused_full_sync_leaves_the_base_where_it_was() -> None:
    base, new = model(), changed(model(), "a", 3)
    engine = FakeEngine.of(base)
    sender = script.Sender(engine.client(), base)
    sender.sync(base)
    conflict = refusal(409, "VersionConflict")
    asleep = refusal(409, "WeightsAsleep", message="wake it up first")
    engine.answers = [lambda _: conflict, lambda _: asleep]
    with pytest.raises(script.SyncError, match="wake it up first"):
        sender.sync(new)
    assert engine.syncs == [False]
    assert sender.sync(new) == 4
    assert engine.syncs == [False, False]
    assert engine.holds(new)


@pytest.mark.parametrize("arrived", [False, True], ids=["request lost", "answer lost"])
def test_lost_answer(arrived: bool) -> None:
    """Whether or not the engine has committed, the next sync ends on the trainer's bytes."""

    def lose(take: Callable[[], httpx.Response]) -> httpx.Response:
        if arrived:
            take()
        raise httpx.ReadTimeout("nothing came back")

    base, first = model(), changed(model(), "a", 3)
    engine = FakeEngine.of(base)
    engine.answers = [lose]
    sender = script.Sender(engine.client(), base)
    with pytest.raises(httpx.ReadTimeout):
        sender.sync(first)
    assert (sender.version, engine.version) == (0, int(arrived))
    second = changed(base, "b", 0)  # not what was sent in vain
    sender.sync(second)
    assert engine.holds(second)
    assert sender.version == engine.version > 1
    assert engine.syncs[-1] is arrived


@pytest.mark.parametrize(
    "other",
    [{}, {"w": torch.zeros(3)}, {"w": torch.zeros(2, dtype=torch.half)}, {"v": torch.zeros(2)}],
    ids=["missing", "shape", "dtype", "name"],
)
def test_other_model_than_the_base(other: dict[str, torch.Tensor]) -> None:
    base = {"w": torch.zeros(2)}
    engine = FakeEngine.of(base)
    with pytest.raises(ValueError, match="not the names, dtypes and shapes of the base"):
        script.Sender(engine.client(), base).sync(other)
    assert engine.parts == []


def test_stands_alone_and_is_short() -> None:
    source = SCRIPT.read_text()
    assert len(source.splitlines()) <= 180
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    libraries = imported - sys.stdlib_module_names
    assert libraries == {"torch", "numpy", "zstandard", "xxhash", "httpx"}
