"""`DeltaSender` against an engine in the same process that decodes and commits as a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest
import torch

from engine_ext.dtypes import bits_dtype, torch_bits_dtype
from engine_ext.wire.frame import ZSTD_MAGIC, FrameReader
from engine_ext.wire.part import Part, decode_part
from reference_sender import DeltaSender, SyncFailed

Model = dict[str, torch.Tensor]
Handler = Callable[[httpx.Request], httpx.Response]


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes as unsigned ints [numel], copied."""
    flat = tensor.detach().clone().contiguous().view(-1)
    return flat.view(torch_bits_dtype(tensor.dtype)).numpy()


def error(status: int, kind: str, state: str = "unchanged", **operands: object) -> httpx.Response:
    body = {"type": kind, "message": "no", "engine_state": state, **operands}
    return httpx.Response(status, json={"error": body})


@dataclass
class Engine:
    """Stages and commits parts; `faults` replaces the answer to the n-th request."""

    weights: dict[str, np.ndarray]
    version: int = 0
    committed: str | None = None
    uncertain: bool = False
    staged: dict[int, Part] = field(default_factory=dict)
    staging: str | None = None
    bodies: list[bytes] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    log: list[Part] = field(default_factory=list)
    faults: dict[int, Callable[[Handler, httpx.Request], httpx.Response]] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, model: Model, **state: object) -> Engine:
        return cls({name: bits(tensor) for name, tensor in model.items()}, **state)

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        number = len(self.requests)
        self.requests.append(request)
        self.bodies.append(request.content)
        fault = self.faults.get(number)
        return fault(self.take, request) if fault else self.take(request)

    def take(self, request: httpx.Request) -> httpx.Response:
        reader = FrameReader(1 << 30)
        part = decode_part(b"".join(reader.feed(request.content)))
        reader.finish()
        self.log.append(part)
        manifest = part.manifest
        assert manifest.sync_id
        assert manifest.manifest_checksum
        assert manifest.part is not None
        if manifest.sync_id == self.committed:
            return self.ok("already_applied")
        if self.uncertain and not manifest.full:
            return error(503, "EngineUncertain", "uncertain")
        if not manifest.full and manifest.base_version != self.version:
            expected = manifest.base_version
            return error(409, "VersionConflict", expected=expected, actual=self.version)
        if self.staging != manifest.sync_id:
            self.staging, self.staged = manifest.sync_id, {}
        self.staged[manifest.part] = part
        if len(self.staged) != manifest.num_parts:
            return self.ok("staged")
        self.commit(manifest.full)
        self.version, self.committed = manifest.current_version or 0, manifest.sync_id
        self.uncertain = False
        return self.ok("committed")

    def commit(self, full: bool) -> None:
        deltas = [delta for part in self.staged.values() for delta in part.deltas]
        assert len({delta.name for delta in deltas}) == len(deltas)
        if full:
            assert {delta.name for delta in deltas} == set(self.weights)
            assert all(delta.indices is None for delta in deltas)
        for delta in deltas:
            where = slice(None) if delta.indices is None else delta.indices
            self.weights[delta.name].view(bits_dtype(delta.dtype))[where] = delta.values
        self.staged = {}

    def ok(self, status: str) -> httpx.Response:
        return httpx.Response(200, json={"status": status, "version": self.version})

    def holds(self, model: Model) -> bool:
        return self.weights.keys() == model.keys() and all(
            np.array_equal(self.weights[name], bits(tensor)) for name, tensor in model.items()
        )


def sends(response: httpx.Response) -> Callable[[Handler, httpx.Request], httpx.Response]:
    """A fault: answer so, and take nothing."""
    return lambda take, request: response


def breaks(take: Handler, request: httpx.Request) -> httpx.Response:
    """A fault: the connection fails before the engine has the part."""
    raise httpx.ConnectError("refused", request=request)


def loses(take: Handler, request: httpx.Request) -> httpx.Response:
    """A fault: the engine takes the part, and its answer is lost."""
    take(request)
    raise httpx.ReadTimeout("late", request=request)


def model_of(*dtypes: torch.dtype, tensors: int = 6, numel: int = 400) -> Model:
    generator = torch.Generator().manual_seed(7)
    return {
        f"layers.{i}.weight": torch.randn(4, numel // 4, generator=generator).to(
            (dtypes or (torch.bfloat16,))[i % max(1, len(dtypes))]
        )
        for i in range(tensors)
    }


def train(model: Model, step: int = 0, density: float = 0.05) -> None:
    """Change some elements of every tensor in place, each to other bytes."""
    generator = torch.Generator().manual_seed(step)
    for tensor in model.values():
        flat = tensor.view(torch_bits_dtype(tensor.dtype)).view(-1)
        chosen = torch.rand(flat.numel(), generator=generator) < density
        flat[chosen] ^= 1


def sender_of(engine: Engine, base: Model, **options: object) -> DeltaSender:
    return DeltaSender("http://engine/", base.items(), client=engine.client(), **options)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Tenacity's sleeps, in seconds, recorded and not slept."""
    slept: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", slept.append)
    return slept


# ---- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["indices", "deltas", "deltas_zstd"])
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
    assert report.engine == {"status": "committed", "version": 1}


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


@pytest.mark.parametrize(("dense_above", "dense"), [(0.0, True), (0.05, True), (0.2, False)])
def test_dense_above(dense_above: float, dense: bool) -> None:
    model = {"w": torch.ones(100)}
    engine = Engine.of(model)
    sender = sender_of(engine, model, dense_above=dense_above)
    model["w"][:10] = 2
    sender.sync(model.items())
    assert engine.holds(model)
    assert (engine.log[0].deltas[0].indices is None) is dense


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
        own = sender._client
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


def test_a_commit_whose_answer_never_came_is_set_right_by_a_full_sync(naps: list[float]) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    engine.faults = dict.fromkeys(range(8), loses)
    train(model)
    with pytest.raises(SyncFailed, match="ReadTimeout") as caught:
        sender.sync(model.items())
    assert caught.value.status is None
    assert caught.value.error == {}
    assert sender.committing
    assert (sender.version, engine.version, len(naps)) == (0, 1, 7)
    train(model, 1)
    report = sender.sync(model.items())
    assert report.full
    assert report.version == engine.version == sender.version == 2
    assert engine.holds(model)
    assert not sender.committing
    train(model, 2)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


def busy(retry_after: str | None = None) -> httpx.Response:
    response = error(409, "SyncInProgress")
    if retry_after is not None:
        response.headers["Retry-After"] = retry_after
    return response


def test_waits_as_long_as_the_engine_says(naps: list[float]) -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    date = "Wed, 21 Oct 2026 07:28:00 GMT"
    answers = [busy("7"), busy(), busy("0"), busy(date)]
    engine.faults = {number: sends(answer) for number, answer in enumerate(answers)}
    train(model)
    assert not sender.sync(model.items()).full
    assert naps == [7.0, 1.0, 0.1, 1.0]
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
    assert sender.version == 1


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dense_above", [None, 0.0])
def test_a_trainer_that_moves_on_while_posting(full: bool, dense_above: float | None) -> None:
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1, dense_above=dense_above)

    def moves(take: Handler, request: httpx.Request) -> httpx.Response:
        train(model, 50 + len(engine.requests))
        return take(request)

    engine.faults = dict.fromkeys(range(6), moves)
    train(model)
    (sender.sync_full if full else sender.sync)(model.items())
    for name, kept in sender._snapshot.items():
        assert np.array_equal(kept.values, engine.weights[name].view(kept.values.dtype))
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
    for name, kept in sender._snapshot.items():
        assert np.array_equal(kept.values, engine.weights[name].view(kept.values.dtype))
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


def test_interrupted_tells_whether_the_last_part_was_sent() -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)

    def interrupts(take: Handler, request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    for number, committing in ((0, False), (2, True)):
        engine.faults = {number: interrupts}
        train(model, number)
        with pytest.raises(KeyboardInterrupt):
            sender.sync(model.items())
        assert sender.committing is committing
        assert sender.version == 0
    sender.sync(model.items())
    assert engine.holds(model)
