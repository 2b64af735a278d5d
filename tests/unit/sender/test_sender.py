"""`DeltaSender` against an engine in the same process that decodes and commits as a real one."""

from __future__ import annotations

import hashlib
import hmac

import pytest
import torch

from delta_sender import DeltaSender
from delta_sender.encode import part_builder
from delta_sender.encode.encoding_policy import AUTO
from delta_sender.publish.http_client import EngineClient
from engine_ext.dtypes import itemsize, torch_bits_dtype
from engine_ext.format.positions import ENCODINGS
from engine_ext.format.zstd_frames import ZSTD_MAGIC
from tests.support.fake_engine import Engine, breaks, digest_of, model_of, sender_of, train


@pytest.mark.parametrize(
    ("encoding", "options"),
    [
        *((encoding, {"bucket_bytes": 400}) for encoding in ENCODINGS),
        ("gap8_ulp", {"bucket_bytes": 1}),
        *((encoding, {"changes_in_memory": 0}) for encoding in (*ENCODINGS, AUTO)),
    ],
)
def test_engine_follows_the_trainer_bit_for_bit(encoding: str, options: dict[str, int]) -> None:
    """In parts of several sizes, from memory and from a file."""
    dtypes = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
    model = model_of(*dtypes, tensors=5, numel=200)
    engine = Engine.of(model)
    sender = sender_of(engine, model, encoding=encoding, **options)
    for step, density in enumerate([0.0, 0.01, 0.3, 0.9, 1.0]):
        train(model, step, density)
        report = sender.sync(model.items())
        assert engine.holds(model)
        assert report.version == sender.version == engine.version == step + 1
        assert not report.full
        assert report.status == "committed"
        assert report.digest == digest_of(engine.weights).hex()


def test_report_counts_what_was_sent() -> None:
    model = model_of(tensors=2, numel=1000)
    engine = Engine.of(model)
    sender = sender_of(engine, model, base_version=0, encoding="deltas")
    model["layers.0.weight"].view(-1)[[3, 500]] += 1
    report = sender.sync(model.items())
    assert (report.version, report.base_version, report.nnz, report.numel) == (1, 0, 2, 2000)
    assert report.density == 2 / 2000
    assert report.full_bytes == 4000
    assert report.parts == 1
    assert report.wire_bytes == len(engine.bodies[0])
    assert report.encode_ms > 0
    assert report.post_ms > 0
    answer = {"status": "committed", "version": 1, "base_version": 0, "digest": report.digest}
    assert report.engine == answer


@pytest.mark.parametrize(
    ("before", "after"), [(0x7FC0, 0x7FC1), (0xFFC0, 0x7FC0), (0x0000, 0x8000), (0x3F80, 0x7FC0)]
)
def test_nan_payloads_and_signs_of_zero_are_changes(before: int, after: int) -> None:
    pattern = torch.tensor([before] * 50, dtype=torch.int32).to(torch.uint16)
    model = {"w": pattern.view(torch.bfloat16)}
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    pattern[7] = after
    assert sender.sync(model.items()).nnz == 1
    assert engine.holds(model)
    assert engine.log[0].deltas[0].values.tolist() == [after]
    assert sender.sync(model.items()).nnz == 0


def test_metadata_of_the_parts() -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model, version=4)
    sender = sender_of(engine, model, bucket_bytes=1, base_version=4)
    train(model)
    sender.sync(model.items())
    # The first ones are posted side by side.
    manifests = sorted((part.manifest for part in engine.log), key=lambda m: m.part or 0)
    assert [m.part for m in manifests] == [0, 1, 2]
    assert [m.num_parts for m in manifests] == [None, None, 3]
    assert {(m.current_version, m.base_version, m.full) for m in manifests} == {(5, 4, False)}
    assert len({m.sync_id for m in manifests}) == 1
    assert all(body.startswith(ZSTD_MAGIC) for body in engine.bodies)
    unchanged = sender.sync(model.items())
    assert (unchanged.parts, unchanged.nnz, engine.version) == (1, 0, 6)
    [empty] = engine.log[3:]
    assert (empty.deltas, empty.manifest.num_parts) == ((), 1)
    assert empty.manifest.sync_id != manifests[0].sync_id


def test_parts_are_capped_and_of_one_dtype() -> None:
    model = model_of(torch.bfloat16, torch.float32, tensors=20)
    model["large"] = torch.zeros(4000, dtype=torch.bfloat16)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=600, encoding="deltas")
    train(model, density=0.1)
    sender.sync(model.items())
    ends = [part.manifest.params[-1] for part in engine.log]
    sizes = [last.pos_end + last.val_end * itemsize(last.dtype) for last in ends]
    for size, part in zip(sizes, engine.log, strict=True):
        assert len({delta.dtype for delta in part.deltas}) == 1
        assert size <= 600 or [delta.name for delta in part.deltas] == ["large"]
    # dtypes that alternate are gathered: far fewer parts than tensors, all but two well filled
    assert len(engine.log) <= sum(sizes) / 400 + 2


def test_the_first_parts_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each can have twice as much as the one before, up to `bucket_bytes`."""
    monkeypatch.setattr(part_builder, "_FIRST", 100)
    model = model_of(tensors=70, numel=9)
    engine = Engine.of(model)
    options = {"bucket_bytes": 350, "encoding": "deltas", "posts_in_flight": 1}
    sender = sender_of(engine, model, **options)
    train(model, density=1.0)
    sender.sync(model.items())
    assert engine.holds(model)
    each = model["layers.0.weight"].nbytes
    counts = [len(part.deltas) for part in engine.log]
    assert counts[:4] == [100 // each, 200 // each, 350 // each, 350 // each]
    assert counts[-1] == 1


@pytest.mark.parametrize(
    ("encoding", "dtype", "even"),
    [
        ("deltas", torch.bfloat16, 1 / 2),
        ("deltas", torch.float32, 2 / 3),
        ("deltas", torch.int8, 1 / 3),
        ("indices", torch.bfloat16, 1 / 3),
    ],
)
def test_a_param_goes_dense_where_that_is_no_larger(
    encoding: str, dtype: torch.dtype, even: float
) -> None:
    model = {"w": torch.ones(600).to(dtype)}
    engine = Engine.of(model)
    sender = sender_of(engine, model, encoding=encoding)
    few = round(600 * even) - 1
    for count in (few, few + 1):
        model["w"].view(torch_bits_dtype(dtype))[:count] ^= 1
        assert sender.sync(model.items()).nnz == (count if count == few else 600)
        assert engine.holds(model)
    assert [part.deltas[0].indices is None for part in engine.log] == [False, True]


@pytest.mark.parametrize(
    ("encoding", "share", "step", "sent"),
    [
        ("gap8_exp", 0.6, 1, "gap8_exp"),
        ("gap8_exp", 0.8, 1, "gap8_exp"),
        ("gap8_exp", 1.0, 1, "gap8_exp, dense"),
        ("gap8_ulp", 0.8, 1, "gap8_ulp"),
        ("gap8_ulp", 1.0, 1, "gap8_ulp"),
        ("gap8_ulp", 1.0, 300, "gap8_exp, dense"),
    ],
)
def test_where_bytes_are_packed_it_is_the_packed_ones_that_count(
    encoding: str, share: float, step: int, sent: str
) -> None:
    model = {"w": torch.randn(6000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    engine = Engine.of(model)
    sender = sender_of(engine, model, encoding=encoding)
    model["w"].view(torch.int16)[: round(6000 * share)] += step
    report = sender.sync(model.items())
    assert report.picked == {sent: 1}
    assert report.nnz == (6000 if "dense" in sent else round(6000 * share))
    assert engine.holds(model)


def test_shapes_and_layouts() -> None:
    nothing = torch.empty(0, 3)  # shared, as empty tensors of one file can be: no tie
    model = {
        "scalar": torch.tensor(1.5),
        "empty": nothing,
        "also_empty": nothing,
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "strided": torch.arange(12.0)[::2],
        "grad": torch.ones(3, requires_grad=True),
        "bool": torch.tensor([True, False]),
    }
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    with torch.no_grad():
        model["scalar"] += 1
        model["transposed"][1, 2] = 99
        model["strided"][1] = 98
        model["grad"][0] = 97
        model["bool"][1] = True
    sender.sync(model.items())
    assert engine.holds(model)
    sender.sync_full(model.items())
    assert engine.holds(model)
    assert {d.name: d.shape for part in engine.log[-3:] for d in part.deltas}["scalar"] == ()


def test_full_sync_sends_everything_dense() -> None:
    model = model_of(torch.bfloat16, torch.float32)
    engine = Engine.of({name: torch.zeros_like(t) for name, t in model.items()}, version=9)
    sender = sender_of(engine, model, bucket_bytes=1000)
    train(model)
    report = sender.sync_full(model.items())
    assert engine.holds(model)
    assert report.full
    assert engine.version == sender.version == 10
    assert report.nnz == report.numel
    assert report.density == 1.0
    assert all(p.manifest.full and p.manifest.base_version is None for p in engine.log)
    train(model, 1)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


def test_endpoint_query_and_token() -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model, api_key="k", pause_mode="wait", flush_cache=False)
    sender.sync(model.items())
    request = engine.requests[0]
    assert request.url.path == "/update_weights_delta"
    assert dict(request.url.params) == {"pause_mode": "wait", "flush_cache": "false"}
    assert request.headers["Authorization"] == "Bearer k"
    assert request.headers["Content-Type"] == "application/octet-stream"
    sender.close()
    sender_of(engine, model, flush_cache="salt").sync(model.items())
    assert engine.requests[-1].url.params["flush_cache"] == "salt"


def test_parts_are_signed_with_a_key(naps: list[float]) -> None:
    """Over the bytes that are sent, also when they are sent again; a question is no part."""
    model = model_of()
    engine = Engine.of(model)
    engine.faults = {0: breaks}
    sender = sender_of(engine, model, hmac_key="k")
    sender.sync(model.items())
    assert len(engine.requests) == 2
    for request in engine.requests:
        expected = hmac.new(b"k", request.content, hashlib.sha256).hexdigest()
        assert request.headers["X-Delta-Signature"] == expected
    assert "X-Delta-Signature" not in engine.questions[0].headers
    engine.requests.clear()
    sender.close()
    sender_of(engine, model).sync(model.items())
    assert "X-Delta-Signature" not in engine.requests[0].headers


def test_only_an_own_client_is_closed() -> None:
    model = model_of()
    client = Engine.of(model).client()
    with DeltaSender("http://engine", model.items(), client=client) as sender:
        sender.sync(model.items())
    assert not client.is_closed
    with DeltaSender("http://engine", model.items()) as sender:
        engine = sender._publisher.sessions[0].destination
    assert isinstance(engine, EngineClient)
    assert engine.client.is_closed
