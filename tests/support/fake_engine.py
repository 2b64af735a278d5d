"""An engine in this process that commits like a real one, its faults, and a trainer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
import msgspec
import numpy as np
import torch

from delta_sender import DeltaSender, MultiSender
from engine_ext.conformance.verified_file import verified_file
from engine_ext.dtypes import torch_bits_dtype
from engine_ext.format.digest import Digest, change_digest, tensor_digest
from engine_ext.format.param_delta import ParamDelta
from engine_ext.format.part import DecodedPart, decode_part
from engine_ext.format.zstd_frames import FrameReader
from engine_ext.ranks.replies import CommittedSync
from tests.support.statuses import engine_status, last_sync

EngineT = TypeVar("EngineT", bound="Engine")
Model = dict[str, torch.Tensor]
Handler = Callable[[httpx.Request], httpx.Response]
A, B, C = "http://a:1", "http://b:2", "http://c:3"


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's bytes as unsigned ints [numel], copied."""
    flat = tensor.detach().clone().contiguous().view(-1)
    return flat.view(torch_bits_dtype(tensor.dtype)).numpy().view(f"u{tensor.itemsize}")


def digest_of(weights: dict[str, np.ndarray]) -> Digest:
    tensors = (tensor_digest(name, values) for name, values in weights.items())
    return sum(tensors, start=Digest.ZERO)


def error(status: int, kind: str, state: str = "unchanged", **operands: Any) -> httpx.Response:
    body = {"type": kind, "message": "no", "engine_state": state, **operands}
    return httpx.Response(status, json={"error": body})


@dataclass
class Engine:
    """Stage and commit parts like a real one; every digest hashes all weights again.

    At a version above 0 it holds what another run, `run`, has sent. `faults` replace the answer to
    the n-th POST. `ignored`, `uncertified`, `undigested` and `cast` name tensors of its checkpoint;
    it holds no weights for ignored ones.
    """

    weights: dict[str, np.ndarray]
    version: int = 0
    run: str | None = None
    has_runs: bool = True
    owner: dict[str, Any] | None = None
    fenced: dict[str, dict[str, Any]] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)  # by run
    foreign: str | None = None
    has_plan: bool = True
    ignored: set[str] = field(default_factory=set)
    uncertified: set[str] = field(default_factory=set)
    undigested: set[str] = field(default_factory=set)
    cast: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    last_sync: CommittedSync | None = None
    uncertain: bool = False
    staged: dict[int, tuple[DecodedPart, str]] = field(default_factory=dict)
    staging: str | None = None
    bodies: list[bytes] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    questions: list[httpx.Request] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)  # and releases
    log: list[DecodedPart] = field(default_factory=list)
    faults: dict[int, Callable[[Handler, httpx.Request], httpx.Response]] = field(
        default_factory=dict
    )
    # Parts come side by side. Faults can wait for each other, so they do not hold it.
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.loaded = self.version == 0
        if not self.loaded and self.run is None:
            self.run = "another"

    @classmethod
    def of(cls: type[EngineT], model: Model, **state: Any) -> EngineT:
        ignored = state.get("ignored", ())
        return cls({n: bits(t) for n, t in model.items() if n not in ignored}, **state)

    def client(self) -> httpx.Client:
        transport = httpx.MockTransport(self.answer)
        return httpx.Client(transport=transport, base_url="http://engine")

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            self.questions.append(request)
            return self.status()
        if request.url.path == "/delta_run":
            with self.lock:
                return self.take_claim(json.loads(request.content))
        with self.lock:
            number = len(self.requests)
            self.requests.append(request)
            self.bodies.append(request.content)
        fault = self.faults.get(number)
        return fault(self.take, request) if fault else self.take(request)

    def status(self) -> httpx.Response:
        status = engine_status(
            version={
                "number": self.version,
                "digest": self.digest().hex(),
                "run": self.run if self.has_runs else None,
                "loaded": self.loaded,
            },
            health={
                "state": "uncertain" if self.uncertain else "certain",
                "changed_externally": self.foreign,
            },
            owner=self.owner,
            last_sync=self.last_sync,
            plan=self.plan(),
        )
        return httpx.Response(200, json=msgspec.to_builtins(status))

    def plan(self) -> list[list[dict[str, object]]] | None:
        if self.has_plan:
            rows = [
                {"name": name, "status": self.kind(name), "digested": name in self.digested}
                for name in sorted(self.weights.keys() | self.ignored)
            ]
            absent = "not on this rank"
            other = [
                row if row["status"] == "ignored" else {**row, "status": absent} for row in rows
            ]
            return [rows, other]
        return None

    def restart(self, model: Model) -> None:
        """Be another process that has loaded a checkpoint."""
        self.weights = {n: bits(t) for n, t in model.items() if n not in self.ignored}
        self.version, self.run, self.owner, self.loaded = 0, None, None, True
        self.uncertain, self.last_sync, self.staging, self.foreign = False, None, None, None
        self.staged, self.highest, self.committed, self.fenced = {}, {}, set(), {}

    def take_claim(self, body: dict[str, Any]) -> httpx.Response:
        if not self.has_runs:
            return httpx.Response(404, json={"detail": "Not Found"})
        self.claims.append(body)
        run = {key: body[key] for key in ("run", "epoch", "host", "pid")}
        if body["action"] == "release":
            is_owner = self.owner is not None and run.items() <= self.owner.items()
            if is_owner:
                self.owner, self.staging, self.staged = None, None, {}
            return httpx.Response(200, json={"released": is_owner})
        if refusal := self.enter(run, takeover=bool(body.get("takeover"))):
            return refusal
        highest = self.highest.get(str(run["run"]))
        held = {"run": self.run, "version": self.version, "highest": highest}
        return httpx.Response(200, json={"owner": self.owner, **held})

    def enter(self, run: dict[str, Any], *, takeover: bool = False) -> httpx.Response | None:
        """Make a run the owner, or refuse it."""
        owner, name = self.owner, str(run["run"])
        if name in self.fenced:
            return error(409, "RunFenced", owner=self.fenced[name])
        if owner is not None and owner["run"] == name and owner["epoch"] > run["epoch"]:
            return error(409, "RunFenced", owner=owner)
        if owner is not None and owner["run"] != name and not takeover:
            message = "run {run} of pid {pid} on {host} owns it".format(**owner)
            return error(409, "RunConflict", owner=owner, message=message)
        if owner is None or (owner["run"], owner["epoch"]) != (name, run["epoch"]):
            self.owner = {**run, "since": 1.0}
            self.staging, self.staged = None, {}
            if owner is not None and owner["run"] != name:
                self.fenced[str(owner["run"])] = self.owner
        return None

    def kind(self, name: str) -> str:
        if name in self.ignored:
            return "ignored"
        return "uncertified" if name in self.uncertified else "exact"

    @property
    def digested(self) -> set[str]:
        return self.weights.keys() - self.undigested - self.uncertified

    def digest(self) -> Digest:
        return digest_of({name: self.weights[name] for name in self.digested})

    def take(self, request: httpx.Request) -> httpx.Response:
        with self.lock:
            return self.stage(request)

    def stage(self, request: httpx.Request) -> httpx.Response:
        reader = FrameReader(1 << 30)
        container = b"".join(reader.feed(request.content))
        part = decode_part(container)
        reader.finish()
        self.log.append(part)
        manifest = part.manifest
        identity, _ = verified_file(container)
        assert manifest.sync_id
        assert manifest.manifest_checksum
        assert manifest.part is not None
        if self.has_runs:
            assert manifest.run is not None
            assert manifest.run_epoch is not None
            assert manifest.run_owner is not None
            host, _, pid = manifest.run_owner.rpartition(":")
            run = {"run": manifest.run, "epoch": manifest.run_epoch, "host": host, "pid": int(pid)}
            if refusal := self.enter(run):
                return refusal
        if manifest.current_version == self.version and identity in self.committed:
            return self.ok("already_applied", self.digest().hex())
        if self.uncertain and not manifest.full:
            return error(503, "EngineUncertain", "uncertain")
        highest = self.highest.get(manifest.run or "", 0) if self.has_runs else 0
        if (manifest.current_version or 0) <= highest:
            return error(409, "VersionConflict", actual=self.version, highest=highest)
        if not manifest.full and manifest.base_version != self.version:
            expected = manifest.base_version
            return error(409, "VersionConflict", expected=expected, actual=self.version)
        for delta in part.deltas:
            if self.kind(delta.name) != "exact" or delta.name not in self.weights:
                return error(422, "NotUpdatable", tensor=delta.name)
            if delta.differences and delta.name in self.undigested | self.cast:
                self.staging, self.staged = None, {}
                return error(422, "NotUpdatable", tensor=delta.name)
        if self.staging != manifest.sync_id:
            self.staging, self.staged = manifest.sync_id, {}
        self.staged[manifest.part] = part, identity
        if len(self.staged) != manifest.num_parts:
            return self.ok("staged")
        if refusal := self.commit(manifest.full):
            return refusal
        base_version, self.version = self.version, manifest.current_version or 0
        self.run, self.loaded, self.foreign = manifest.run, False, None
        self.highest[manifest.run or ""] = self.version
        self.last_sync = last_sync(self.version, manifest.sync_id)
        self.uncertain = False
        return self.ok("committed", digest=self.digest().hex(), base_version=base_version)

    def commit(self, full: bool) -> httpx.Response | None:
        parts = [part for part, _ in self.staged.values()]
        deltas = [delta for part in parts for delta in part.deltas]
        for name in {delta.name for delta in deltas}:  # several parts, of several ranks
            pieces = [delta for delta in deltas if delta.name == name]
            if len(pieces) > 1:
                indices = np.concatenate([delta.indices for delta in pieces])
                assert np.unique(indices).size == indices.size
        if full:
            assert sorted(delta.name for delta in deltas) == sorted(self.weights)
            assert all(delta.indices is None for delta in deltas)
        if self.mismatch(parts, full):
            self.staged = {}
            return error(409, "BaseMismatch", expected="0" * 32, actual="f" * 32)
        for delta in deltas:
            self.weights[delta.name][self.where(delta)] = self.new(delta)
        self.committed = {identity for _, identity in self.staged.values()}
        self.staged = {}
        return None

    def where(self, delta: ParamDelta) -> Any:
        return slice(None) if delta.indices is None else delta.indices

    def new(self, delta: ParamDelta) -> np.ndarray:
        if not delta.differences:
            return delta.values
        return self.weights[delta.name][self.where(delta)] + delta.values

    def mismatch(self, parts: list[DecodedPart], full: bool) -> bool:
        """Return whether a digest in the parts differs from that of the engine's own weights."""
        before = after = self.digest()
        wrong = False
        for part in parts:
            change = Digest.ZERO
            for delta in part.deltas:
                if delta.name in self.digested:
                    old = self.weights[delta.name][self.where(delta)]
                    change += change_digest(delta.name, delta.indices, old, self.new(delta))
            after += change
            wrong |= part.manifest.digest_part not in (None, change.hex())
            wrong |= part.manifest.digest_before not in (None, before.hex())
        return wrong or any(p.manifest.digest_after not in (None, after.hex()) for p in parts)

    def ok(self, status: str, digest: str | None = None, **more: int) -> httpx.Response:
        answer = {"status": status, "version": self.version, "digest": digest, **more}
        return httpx.Response(200, json=answer)

    def holds(self, model: Model) -> bool:
        return self.weights.keys() == model.keys() - self.ignored and all(
            np.array_equal(values, bits(model[name])) for name, values in self.weights.items()
        )


class AdapterEngine(Engine):
    """One that knows adapters."""

    def status(self) -> httpx.Response:
        answer = super().status().json()
        return httpx.Response(200, json={**answer, "adapter": self.named(self.questions[-1])})

    @staticmethod
    def named(request: httpx.Request) -> str | None:
        return request.url.params.get("adapter")


def copied(model: Model) -> Model:
    return {name: tensor.clone() for name, tensor in model.items()}


def client_of(*engines: Engine) -> httpx.Client:
    """Return a client that finds engines at `A`, `B` and `C`."""
    hosts = dict(zip("abc", engines, strict=False))
    return httpx.Client(transport=httpx.MockTransport(lambda r: hosts[r.url.host].answer(r)))


def sends(response: httpx.Response) -> Callable[[Handler, httpx.Request], httpx.Response]:
    """Return a fault: a fixed answer; nothing is taken."""
    return lambda take, request: response


def breaks(take: Handler, request: httpx.Request) -> httpx.Response:
    """Fail: the connection breaks before the engine has the part."""
    raise httpx.ConnectError("refused", request=request)


def loses(take: Handler, request: httpx.Request) -> httpx.Response:
    """Fail: the engine takes the part, and its answer is lost."""
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


def sender_of(engine: Engine, base: Model, **options: Any) -> DeltaSender:
    return DeltaSender("http://engine/", base.items(), client=engine.client(), **options)


def set_lag_limit(sender: MultiSender, seconds: float | None) -> None:
    """Change the option `lag_limit` from the next sync on."""
    publisher = sender._publisher
    publisher.options = replace(publisher.options, lag_limit=seconds)


def snapshot_is(sender: DeltaSender, engine: Engine) -> bool:
    snapshot = sender._publisher.snapshot
    return all(
        np.array_equal(held, engine.weights[name].view(held.dtype))
        for name in snapshot
        for held in [snapshot.image(name).values]
    )
