"""`DeltaSender` against an engine in the same process that decodes and commits as a real one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest
import torch

from engine_ext.digest import Digest
from engine_ext.dtypes import torch_bits_dtype
from engine_ext.wire.frame import ZSTD_MAGIC
from engine_ext.wire.part import ParamDelta
from engine_ext.wire.positions import ENCODINGS
from reference_sender import DeltaSender, SyncFailed
from tests.scripts.fakes import (
    Engine,
    Handler,
    Model,
    bits,
    breaks,
    digest_of,
    error,
    loses,
    model_of,
    sends,
    train,
)


def sender_of(engine: Engine, base: Model, **options: object) -> DeltaSender:
    return DeltaSender("http://engine/", base.items(), client=engine.client(), **options)


def snapshot_is(sender: DeltaSender, engine: Engine) -> bool:
    snapshot = sender._sender._snapshot
    return all(
        np.array_equal(kept, engine.weights[name].view(kept.dtype))
        for name in snapshot
        for kept in [snapshot.image(name).values]
    )


# ---- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_engine_follows_the_trainer_bit_for_bit(encoding: str, bucket_bytes: int) -> None:
    model = model_of(torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8)
    engine = Engine.of(model)
    sender = sender_of(engine, model, encoding=encoding, bucket_bytes=bucket_bytes)
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
    assert report.engine == {"status": "committed", "version": 1, "digest": report.digest}


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


def test_unchanged_model_sends_one_empty_part() -> None:
    model = model_of()
    engine = Engine.of(model)
    report = sender_of(engine, model).sync(model.items())
    assert report.parts == 1
    assert report.nnz == 0
    assert engine.version == 1
    assert engine.log[0].deltas == ()
    assert engine.log[0].manifest.num_parts == 1


def test_metadata_of_the_parts() -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model, version=4)
    sender = sender_of(engine, model, bucket_bytes=1, base_version=4)
    train(model)
    sender.sync(model.items())
    manifests = [part.manifest for part in engine.log]
    assert [m.part for m in manifests] == [0, 1, 2]
    assert [m.num_parts for m in manifests] == [None, None, 3]
    assert {(m.current_version, m.base_version, m.full) for m in manifests} == {(5, 4, False)}
    assert len({m.sync_id for m in manifests}) == 1
    assert all(body.startswith(ZSTD_MAGIC) for body in engine.bodies)
    sender.sync(model.items())
    assert engine.log[-1].manifest.sync_id != manifests[0].sync_id


def test_parts_are_capped_and_of_one_dtype() -> None:
    model = model_of(torch.bfloat16, torch.float32, tensors=20)
    model["large"] = torch.zeros(4000, dtype=torch.bfloat16)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=600, encoding="deltas")
    train(model, density=0.1)
    sender.sync(model.items())
    sizes = [p.header.positions.end - p.header.positions.begin for p in engine.log]
    sizes = [
        s + p.header.values.end - p.header.values.begin
        for s, p in zip(sizes, engine.log, strict=True)
    ]
    for size, part in zip(sizes, engine.log, strict=True):
        assert len({delta.dtype for delta in part.deltas}) == 1
        assert size <= 600 or [delta.name for delta in part.deltas] == ["large"]
    # dtypes that alternate are gathered: far fewer parts than tensors, all but two well filled
    assert len(engine.log) <= sum(sizes) / 400 + 2


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
    nothing = torch.empty(0, 3)  # shared, as empty tensors of one file may be: no tie
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
    assert engine.version == sender.version == 1
    assert report.nnz == report.numel
    assert report.density == 1.0
    assert all(p.manifest.full and p.manifest.base_version is None for p in engine.log)
    train(model, 1)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


def test_endpoint_query_and_token() -> None:
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model, api_key="k", pause_mode="wait", flush_cache=False)
    sender.sync(model.items())
    request = engine.requests[0]
    assert request.url.path == "/update_weights_delta"
    assert dict(request.url.params) == {"pause_mode": "wait", "flush_cache": "false"}
    assert request.headers["Authorization"] == "Bearer k"
    assert request.headers["Content-Type"] == "application/octet-stream"


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
    sender_of(engine, model).sync(model.items())
    assert "X-Delta-Signature" not in engine.requests[0].headers


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(ValueError, match="bitmap"):
        DeltaSender("http://engine", [], encoding="bitmap")


def test_only_an_own_client_is_closed() -> None:
    model = model_of()
    client = Engine.of(model).client()
    with DeltaSender("http://engine", model.items(), client=client) as sender:
        sender.sync(model.items())
    assert not client.is_closed
    with DeltaSender("http://engine", model.items()) as sender:
        own = sender._sender._links[0].server.client
    assert own.is_closed


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update({"layers.0.weight": torch.zeros(400)}), "layers.0.weight: float32"),
        (
            lambda m: m.update({"layers.0.weight": m["layers.0.weight"].view(-1)}),
            r"layers.0.weight: bfloat16 \(400,\), but bfloat16 \(4, 100\)",
        ),
        (lambda m: m.update({"new": torch.zeros(1)}), "new: not in the base"),
        (lambda m: m.pop("layers.5.weight"), "missing.*layers.5.weight"),
        (
            lambda m: m.update({"layers.0.weight": torch.zeros(1, dtype=torch.complex64)}),
            "layers.0.weight: .*complex64",
        ),
    ],
)
def test_other_names_shapes_and_dtypes_are_refused(
    change: Callable[[Model], object], said: str
) -> None:
    base = model_of()
    engine = Engine.of(base)
    sender = sender_of(engine, base, bucket_bytes=1)
    model = {name: tensor.clone() for name, tensor in base.items()}
    train(model)
    good = dict(model)
    change(model)
    for send in (sender.sync, sender.sync_full):
        with pytest.raises(ValueError, match=said):
            send(model.items())
    assert sender.version == engine.version == 0
    assert engine.holds(base)
    sender.sync(good.items())
    assert engine.holds(good)


def test_tied_tensors_are_sent_once() -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    tied = {**model, "lm_head.weight": model["layers.0.weight"]}
    sender = sender_of(engine, tied)
    for reading in (tied.items(), list(tied.items())[::-1], model.items()):
        train(model, 3)
        sender.sync(reading)
        assert engine.holds(model)
    sender.sync_full(tied.items())
    assert engine.holds(model)
    copies = {name: tensor.clone() for name, tensor in tied.items()}
    sender.sync(copies.items())
    copies["lm_head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match=r"lm_head.*differs from layers"):
        sender.sync(copies.items())


def test_a_tied_name_that_the_base_lacks_is_found_by_its_storage() -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, {name: tensor.clone() for name, tensor in model.items()})
    train(model)
    sender.sync([*model.items(), ("lm_head.weight", model["layers.1.weight"])])
    assert engine.holds(model)
    with pytest.raises(ValueError, match=r"lm_head.*not in the base"):
        sender.sync([*model.items(), ("lm_head.weight", model["layers.1.weight"].clone())])


def test_reused_memory_is_no_tie() -> None:
    def gathered(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
        for name in model:
            yield name, model[name].clone()  # freed by the time of the next, which reuses it

    model = {f"norm.{i}": torch.ones(64) for i in range(10)}
    engine = Engine.of(model)
    sender = DeltaSender("http://engine", gathered(model), client=engine.client())
    model["norm.7"][3] = 2
    sender.sync(gathered(model))
    assert engine.holds(model)


def test_a_name_given_twice_must_agree() -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    name, tensor = next(iter(model.items()))
    sender.sync([(name, tensor), (name, tensor.clone())])
    with pytest.raises(ValueError, match="repeats"):
        sender.sync([(name, tensor), (name, tensor + 1)])


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("status", [400, 401, 413, 422, 500, 507])
def test_a_refused_sync_is_sent_again_whole(failing: int, status: int) -> None:
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    engine.faults[failing] = sends(error(status, "NotUpdatable", tensor="layers.0.weight"))
    train(model)
    with pytest.raises(SyncFailed, match="no") as caught:
        sender.sync(model.items())
    assert caught.value.status == status
    assert caught.value.error["tensor"] == "layers.0.weight"
    assert sender.version == 0
    assert len(engine.requests) == failing + 1
    model["layers.2.weight"][0, 0] += 1
    report = sender.sync(model.items())
    assert engine.holds(model)
    assert report.version == 1
    assert not report.full
    assert sender.sync(model.items()).nnz == 0


@pytest.mark.parametrize("part", range(3))
def test_lost_answers_and_connections_are_retried(part: int, naps: list[float]) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    engine.faults = {
        part: loses,
        part + 1: breaks,
        part + 2: sends(httpx.Response(503, text="<html>no upstream</html>")),
        part + 3: sends(httpx.Response(502)),
    }
    train(model)
    report = sender.sync(model.items())
    assert len(set(engine.bodies[part : part + 5])) == 1
    assert len(naps) == 4
    assert engine.holds(model)
    assert not report.full
    assert report.parts == 3
    assert report.status == ("already_applied" if part == 2 else "committed")
    assert report.wire_bytes == sum(len(body) for body in set(engine.bodies))
    assert sender.sync(model.items()).nnz == 0


@pytest.mark.parametrize("another", [False, True])
def test_a_commit_whose_answer_never_came_is_found_out(naps: list[float], another: bool) -> None:
    """The engine says that it has it; or that it has something else of that version."""
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    engine.faults = dict.fromkeys(range(8), loses)
    train(model)
    with pytest.raises(SyncFailed, match="ReadTimeout") as caught:
        sender.sync(model.items())
    assert caught.value.status is None
    assert caught.value.error == {}
    assert (sender.version, engine.version, len(naps)) == (0, 1, 7)
    if another:
        engine.weights["layers.1.weight"][3] ^= 1
        engine.last_sync = {"version": 1, "sync_id": "another's"}
    train(model, 1)
    report = sender.sync(model.items())
    assert report.full is another
    assert report.base_version == (0 if another else 1)
    assert report.version == engine.version == sender.version == 2
    assert engine.holds(model)
    train(model, 2)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


def busy(
    retry_after: str | None = None, status: int = 409, kind: str = "SyncInProgress"
) -> httpx.Response:
    response = error(status, kind)
    if retry_after is not None:
        response.headers["Retry-After"] = retry_after
    return response


def test_waits_as_long_as_the_engine_says(naps: list[float]) -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    date = "Wed, 21 Oct 2026 07:28:00 GMT"
    many = busy("3", 429, "TooManyUploads")
    answers = [busy("7"), busy(), busy("0"), busy(date), many]
    engine.faults = {number: sends(answer) for number, answer in enumerate(answers)}
    train(model)
    assert not sender.sync(model.items()).full
    assert naps == [7.0, 1.0, 0.1, 1.0, 3.0]
    assert engine.holds(model)
    assert len(set(engine.bodies)) == 1


def test_waits_no_longer_than_the_timeout(naps: list[float]) -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model, timeout=60.0)
    engine.faults = {0: sends(busy("20")), 1: sends(busy("61"))}
    train(model)
    with pytest.raises(SyncFailed, match="SyncInProgress") as caught:
        sender.sync(model.items())
    assert caught.value.status == 409
    assert naps == [20.0]
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize(
    ("refusal", "version"),
    [
        (lambda: error(409, "VersionConflict", expected=0, actual=41), 42),
        (lambda: error(409, "VersionConflict", expected=5, actual=0), 6),
        (lambda: error(409, "BaseMismatch", actual="f00d"), 6),
        (lambda: error(500, "CommitFailed", "uncertain"), 6),
        (lambda: error(503, "EngineUncertain", "uncertain"), 6),
    ],
)
def test_an_engine_with_other_bytes_gets_a_full_sync(
    failing: int, refusal: Callable[[], httpx.Response], version: int
) -> None:
    base = model_of(tensors=4)
    engine = Engine.of({name: torch.zeros_like(t) for name, t in base.items()}, version=5)
    sender = sender_of(engine, base, base_version=5, bucket_bytes=1)
    engine.faults[failing] = sends(refusal())
    model = {name: tensor.clone() for name, tensor in base.items()}
    train(model)
    report = sender.sync((name, tensor) for name, tensor in model.items())
    assert report.full
    assert report.version == sender.version == engine.version == version
    assert engine.holds(model)
    assert report.parts == 4
    train(model, 1)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


def test_there_is_only_one_full_sync() -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    engine.faults = {
        0: sends(error(503, "EngineUncertain", "uncertain")),
        1: sends(error(500, "CommitFailed", "uncertain")),
    }
    engine.uncertain = True
    train(model)
    with pytest.raises(SyncFailed, match="CommitFailed"):
        sender.sync(model.items())
    assert len(engine.requests) == 2
    assert sender.version == 0
    report = sender.sync(model.items())
    assert report.full
    assert engine.holds(model)
    assert not engine.uncertain


def test_sleeping_weights_are_no_reason_for_a_full_sync() -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    engine.faults[0] = sends(error(409, "WeightsAsleep"))
    with pytest.raises(SyncFailed, match="WeightsAsleep"):
        sender.sync(model.items())
    assert len(engine.requests) == 1


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=["committed"]),
        httpx.Response(200, json={"status": "committed", "version": 8}),
        httpx.Response(307, headers={"Location": "http://elsewhere"}),
    ],
)
def test_a_strange_answer_is_no_commit(part: int, answer: httpx.Response) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    engine.faults[part] = sends(answer)
    train(model)
    with pytest.raises(SyncFailed):
        sender.sync(model.items())
    assert sender.version == 0
    assert len(engine.requests) == part + 1
    sender.sync(model.items())
    assert engine.holds(model)


def test_a_last_part_that_is_only_staged_is_no_commit() -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)

    def forgets(take: Handler, request: httpx.Request) -> httpx.Response:
        engine.staged.clear()  # as after its stage timeout
        return take(request)

    engine.faults[1] = forgets
    train(model)
    with pytest.raises(SyncFailed, match="staged"):
        sender.sync(model.items())
    sender.sync(model.items())
    assert engine.holds(model)
    assert sender.version == 2  # the engine might have committed the first


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("density", [0.05, 0.9])
def test_a_trainer_that_moves_on_while_posting(full: bool, density: float) -> None:
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)

    def moves(take: Handler, request: httpx.Request) -> httpx.Response:
        train(model, 50 + len(engine.requests))
        return take(request)

    engine.faults = dict.fromkeys(range(6), moves)
    train(model, density=density)
    (sender.sync_full if full else sender.sync)(model.items())
    assert snapshot_is(sender, engine)
    assert not engine.holds(model)
    sender.sync(model.items())
    assert engine.holds(model)


def test_a_resync_sends_what_was_read_though_the_trainer_moved_on() -> None:
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)

    def refuses(take: Handler, request: httpx.Request) -> httpx.Response:
        train(model, 9)
        return error(409, "BaseMismatch")

    engine.faults[3] = refuses
    train(model)
    assert sender.sync(model.items()).full
    assert snapshot_is(sender, engine)
    sender.sync(model.items())
    assert engine.holds(model)


def test_base_and_trainer_tensors_are_left_alone() -> None:
    base = model_of()
    model = {name: tensor.clone() for name, tensor in base.items()}
    engine = Engine.of(base)
    sender = sender_of(engine, base)
    train(model)
    before = {name: tensor.clone() for name, tensor in model.items()}
    sender.sync(model.items())
    sender.sync_full(model.items())
    fresh = model_of()
    assert all(torch.equal(base[name], fresh[name]) for name in base)
    assert all(torch.equal(model[name], before[name]) for name in model)


@pytest.mark.parametrize("fault", ["breaks", "loses"])
def test_an_interrupted_sync_is_set_right_by_the_next(fault: str) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)

    def interrupts(take: Handler, request: httpx.Request) -> httpx.Response:
        if fault == "loses":
            take(request)
        raise KeyboardInterrupt

    for number in (0, 2):
        engine.faults = {number: interrupts}
        train(model, number)
        with pytest.raises(KeyboardInterrupt):
            sender.sync(model.items())
        assert sender.version == 0
    assert engine.version == (1 if fault == "loses" else 0)
    train(model, 3)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


@pytest.mark.parametrize("full", [False, True])
def test_a_snapshot_interrupted_while_it_moved(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    snapshot = sender._sender._snapshot
    advance = snapshot.advance

    def interrupted(changes: dict[str, ParamDelta]) -> None:
        advance(dict([*changes.items()][:1]))
        raise KeyboardInterrupt

    train(model)
    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.sync(model.items())
    train(model, 1)
    report = (sender.sync_full if full else sender.sync)(model.items())
    assert report.full
    assert engine.holds(model)
    assert report.digest == digest_of(engine.weights).hex()


# ---- digests -------------------------------------------------------------------------------------


def test_digests_of_the_parts() -> None:
    model = model_of(torch.bfloat16, torch.float32, tensors=4)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    before = digest_of(engine.weights)
    train(model)
    after = digest_of({name: bits(tensor) for name, tensor in model.items()})
    assert sender.sync(model.items()).digest == after.hex()
    manifests = [part.manifest for part in engine.log]
    assert {m.digest_before for m in manifests} == {before.hex()}
    assert [m.digest_after for m in manifests] == [None, None, None, after.hex()]
    parts = [Digest.parse(m.digest_part or "") for m in manifests]
    assert sum(parts, start=before) == after
    engine.log.clear()
    train(model, 1)
    report = sender.sync_full(model.items())
    assert {m.digest_before or m.digest_part for m in (p.manifest for p in engine.log)} == {None}
    assert [p.manifest.digest_after for p in engine.log] == [None, None, None, report.digest]
    assert sender.sync(model.items()).digest == report.digest
    assert engine.log[-1].manifest.digest_part == Digest.ZERO.hex()


@pytest.mark.parametrize("touched", [True, False])
def test_a_corrupted_element_is_found_and_healed(touched: bool) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    train(model)
    sender.sync(model.items())
    engine.weights["layers.1.weight"][7] ^= 4
    posted = len(engine.requests)
    model["layers.2.weight" if not touched else "layers.1.weight"].view(-1)[7] += 1
    report = sender.sync(model.items())
    assert report.full
    assert len(engine.requests) == posted + 1 + 3
    assert engine.holds(model)
    assert report.digest == digest_of(engine.weights).hex()
    train(model, 1)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


def test_a_corrupted_element_that_the_delta_overwrites_with_the_right_value_is_found() -> None:
    """After the sync its bytes would be right; that they were wrong before is told all the same."""
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    model["layers.0.weight"].view(-1)[3] += 1
    engine.weights["layers.0.weight"][3] = bits(model["layers.0.weight"])[3]
    assert sender.sync(model.items()).full
    assert engine.holds(model)


def test_without_digests_only_the_version_counts() -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, digest=False)
    engine.weights["layers.1.weight"][7] ^= 4
    model["layers.0.weight"].view(-1)[7] += 1
    report = sender.sync(model.items())
    assert (report.full, report.digest) == (False, None)
    assert not engine.holds(model)
    assert sender.sync_full(model.items()).digest is None
    assert engine.holds(model)
    manifests = [part.manifest for part in engine.log]
    assert {m.digest_part or m.digest_before or m.digest_after for m in manifests} == {None}


@pytest.mark.parametrize("full", [False, True])
def test_an_engine_that_commits_other_bytes_is_told_of_and_gets_a_full_sync(full: bool) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model)

    def spoils(take: Handler, request: httpx.Request) -> httpx.Response:
        take(request)
        engine.weights["layers.1.weight"][9] ^= 1
        return engine.ok("committed", digest=engine.digest().hex())

    engine.faults[0] = spoils
    train(model)
    with pytest.raises(SyncFailed, match=r"version 1 is committed, but .* does not hold") as caught:
        (sender.sync_full if full else sender.sync)(model.items())
    assert caught.value.status == 200
    assert len(engine.requests) == 1
    assert sender.version == engine.version == 1
    engine.faults[1] = sends(error(500, "DeltaError"))
    with pytest.raises(SyncFailed, match="DeltaError"):
        sender.sync(model.items())
    report = sender.sync(model.items())  # unchanged: as a delta it would be empty
    assert (report.full, report.version) == (True, 3)  # 2 was tried
    assert engine.holds(model)
    assert not sender.sync(model.items()).full


def test_a_lost_answer_and_a_repeat_keep_the_digest_right(naps: list[float]) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    engine.faults = {1: loses, 3: loses}
    train(model)
    report = sender.sync(model.items())
    assert report.status == "already_applied"
    assert report.digest == digest_of(engine.weights).hex()
    train(model, 1)
    report = sender.sync(model.items())
    assert (report.full, report.digest) == (False, digest_of(engine.weights).hex())


def test_the_same_sync_again_after_its_answers_were_lost(naps: list[float]) -> None:
    """Nothing is left to be sent."""
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    engine.faults = dict.fromkeys(range(2, 10), loses)
    train(model)
    with pytest.raises(SyncFailed, match="ReadTimeout"):
        sender.sync(model.items())
    assert (sender.version, engine.version) == (0, 1)
    report = sender.sync(model.items())
    assert (report.status, report.full, report.nnz) == ("committed", False, 0)
    assert (report.base_version, report.version) == (1, 2)
    assert report.digest == digest_of(engine.weights).hex()
    train(model, 1)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


def test_less_than_was_committed_is_not_taken_for_the_same(naps: list[float]) -> None:
    """The trainer goes back on one tensor after a lost answer."""
    model = model_of(tensors=2)
    old = model["layers.1.weight"].clone()
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    engine.faults = dict.fromkeys(range(1, 9), loses)
    train(model)
    with pytest.raises(SyncFailed, match="ReadTimeout"):
        sender.sync(model.items())
    model["layers.1.weight"].copy_(old)
    report = sender.sync(model.items())
    assert (report.full, report.base_version) == (False, 1)
    assert report.digest == digest_of(engine.weights).hex()
    assert engine.holds(model)


@pytest.mark.parametrize("first_full", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("kept", ["digest", "plan", "neither", "some"])
def test_without_digests_nothing_is_taken_for_what_was_committed_unnoticed(
    first_full: bool, full: bool, changed: int, kept: str, naps: list[float]
) -> None:
    """The trainer goes back on one tensor after a lost answer."""
    model = model_of(tensors=2)
    old = model[f"layers.{changed}.weight"].clone()
    some = {f"layers.{changed}.weight"} if kept == "some" else set()
    engine = Engine.of(model, has_plan=kept in ("plan", "some"), undigested=some)
    sender = sender_of(engine, model, bucket_bytes=1, digest=kept in ("digest", "some"))
    engine.faults = dict.fromkeys(range(1, 9), loses)
    train(model)
    with pytest.raises(SyncFailed, match="ReadTimeout"):
        (sender.sync_full if first_full else sender.sync)(model.items())
    model[f"layers.{changed}.weight"].copy_(old)
    report = (sender.sync_full if full else sender.sync)(model.items())
    assert report.version == sender.version == engine.version
    assert engine.holds(model)
    train(model, 1)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_full_sync_after_one_whose_answer_was_lost(changed: int, naps: list[float]) -> None:
    """Some of its parts are those of that one."""
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    engine.faults = dict.fromkeys(range(1, 9), loses)
    train(model)
    with pytest.raises(SyncFailed, match="ReadTimeout"):
        sender.sync_full(model.items())
    model[f"layers.{changed}.weight"].view(-1)[3] += 1
    report = sender.sync_full(model.items())
    assert (report.status, report.version) == ("committed", 2)
    assert engine.holds(model)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failed_sync_does_not_advance_the_digest(failing: int) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    before = digest_of(engine.weights)
    engine.faults[failing] = sends(error(507, "SpoolFull"))
    train(model)
    with pytest.raises(SyncFailed, match="SpoolFull"):
        sender.sync(model.items())
    report = sender.sync(model.items())
    assert not report.full
    assert engine.log[-1].manifest.digest_before == before.hex()
    assert report.digest == digest_of(engine.weights).hex()


def test_tensors_outside_the_digest() -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model, undigested={"layers.1.weight"})
    sender = sender_of(engine, model, bucket_bytes=1)
    train(model)
    report = sender.sync(model.items())
    assert not report.full
    assert engine.holds(model)
    assert report.digest == engine.digest().hex() != digest_of(engine.weights).hex()
    assert engine.log[1].manifest.digest_part == Digest.ZERO.hex()
    assert sender.sync_full(model.items()).digest == report.digest


def test_no_digests_where_the_base_lacks_a_tensor(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    del model["layers.1.weight"]
    sender = sender_of(engine, model)
    for step in range(2):
        train(model, step)
        report = sender.sync(model.items())
        assert (report.full, report.digest) == (False, None)
    assert np.array_equal(engine.weights["layers.0.weight"], bits(model["layers.0.weight"]))
    assert caplog.text.count("no digests") == 1
    assert "layers.1.weight" in caplog.text


# ---- the plan ------------------------------------------------------------------------------------


def test_the_plan_is_asked_for_once_and_with_the_token() -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model, api_key="k")
    assert engine.questions == []
    for step in range(2):
        train(model, step)
        sender.sync(model.items())
    assert [dict(question.url.params) for question in engine.questions] == [{}, {"plan": "true"}]
    for question in engine.questions:
        assert question.url.path == "/delta_status"
        assert question.headers["Authorization"] == "Bearer k"


def test_ignored_tensors_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(tensors=4)
    engine = Engine.of(model, ignored={"layers.1.weight"})
    sender = sender_of(engine, model, bucket_bytes=1)
    for step in range(2):
        train(model, step)
        report = sender.sync(model.items())
        assert (report.full, report.parts, report.numel) == (False, 3, 1200)
        assert engine.holds(model)
        assert report.digest == digest_of(engine.weights).hex()
    report = sender.sync_full(model.items())
    assert (report.parts, report.density) == (3, 1.0)
    assert caplog.text.count("left out") == 1
    assert "layers.1.weight" in caplog.text
    model["layers.1.weight"] += 1
    assert sender.sync(model.items()).nnz == 0


def test_uncertified_and_unknown_tensors_are_the_engines_to_refuse() -> None:
    for engine in (
        Engine.of(model_of(tensors=3), uncertified={"layers.2.weight"}),
        Engine.of(model_of(tensors=2)),
    ):
        model = model_of(tensors=3)
        sender = sender_of(engine, model)
        model["layers.0.weight"] += 1
        assert sender.sync(model.items()).digest == engine.digest().hex()
        model["layers.2.weight"] += 1
        with pytest.raises(SyncFailed, match="NotUpdatable") as caught:
            sender.sync(model.items())
        assert caught.value.error["tensor"] == "layers.2.weight"


@pytest.mark.parametrize("status", [404, 200])
def test_an_engine_without_a_plan(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model, has_plan=False)
    if status == 404:
        missing = httpx.Response(404, json={"detail": "Not Found"})
        monkeypatch.setattr(engine, "status", lambda: missing)
    sender = sender_of(engine, model)
    for step in range(2):
        train(model, step)
        assert sender.sync(model.items()).digest is None
        assert engine.holds(model)
    assert sender.sync_full(model.items()).digest is None
    manifests = [part.manifest for part in engine.log]
    assert {m.digest_part or m.digest_before or m.digest_after for m in manifests} == {None}
    engine.ignored = {"layers.1.weight"}
    train(model, 2)
    with pytest.raises(SyncFailed, match="NotUpdatable"):
        sender.sync(model.items())


def test_a_plan_that_cannot_be_had_fails_the_sync(
    naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    train(model)
    for answer, attempts in ((error(401, "Unauthorized"), 1), (httpx.Response(502), 8)):
        with monkeypatch.context() as patched:
            patched.setattr(engine, "status", lambda answer=answer: answer)
            with pytest.raises(SyncFailed) as caught:
                sender.sync(model.items())
        assert caught.value.status == answer.status_code
        assert len(engine.questions) == attempts
        engine.questions.clear()
    assert engine.requests == []
    assert sender.sync(model.items()).digest == digest_of(engine.weights).hex()


@pytest.mark.parametrize("first", ["embed.weight", "lm_head.weight"])
@pytest.mark.parametrize(
    ("held", "ignored"),
    [
        ({"embed.weight"}, set()),  # the checkpoint lacks the other
        ({"embed.weight"}, {"lm_head.weight"}),
        ({"embed.weight", "lm_head.weight"}, set()),  # the engine keeps them apart
    ],
)
def test_tied_tensors_are_sent_under_every_name_that_the_engine_holds(
    first: str, held: set[str], ignored: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.ones(20, 4)
    names = sorted(["embed.weight", "lm_head.weight"], key=lambda name: name != first)
    model = {names[0]: weight, "norm.weight": torch.ones(8), names[1]: weight}
    engine = Engine.of({n: t for n, t in model.items() if n in held or n not in names})
    engine.ignored = ignored
    sender = sender_of(engine, model)
    for send in (sender.sync, sender.sync_full, sender.sync):
        train(model, density=0.2)
        report = send(model.items())
        assert all(np.array_equal(engine.weights[name], bits(weight)) for name in held)
        assert report.digest == digest_of(engine.weights).hex()
        assert report.numel == 80 * len(held) + 8
    assert "left out" not in caplog.text


def test_another_engine_at_the_same_place() -> None:
    """It was restarted: other tensors are ignored, and others are in its digest."""
    model = model_of(tensors=4)
    engine = Engine.of(model, ignored={"layers.0.weight"})
    sender = sender_of(engine, model)
    train(model)
    sender.sync(model.items())
    fresh = Engine.of(
        model_of(tensors=4), ignored={"layers.1.weight"}, undigested={"layers.2.weight"}
    )
    engine.weights, engine.version, engine.committed = fresh.weights, 0, set()
    engine.ignored, engine.undigested = fresh.ignored, fresh.undigested
    train(model, 1)
    report = sender.sync(model.items())
    assert report.full
    assert engine.holds(model)
    assert report.digest == engine.digest().hex()
    train(model, 2)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)
