"""Every way to send a delta to a live engine, compared with a fresh engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from delta_sender import DeltaSender
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import PROMPTS, fingerprint
from tests.live.programs import environment
from tests.support.folder_writer import write_version
from tests.support.plain_trainer import Trainer, container, model_digest, split
from tests.support.present import present

ENCODINGS = ("indices", "deltas", "deltas_zstd", "gap8_exp", "gap8_ulp")
CASES = [
    pytest.param(("vllm", "qwen3", 1, "scatter"), marks=pytest.mark.versions),
    pytest.param(("vllm", "qwen3", 2, "scatter"), marks=[pytest.mark.full, pytest.mark.versions]),
    pytest.param(("vllm", "qwen3", 1, "masked"), marks=pytest.mark.full),
    pytest.param(("vllm", "llama_tied", 1, "scatter"), marks=pytest.mark.full),
    pytest.param(("vllm", "llama_tied", 2, "scatter"), marks=pytest.mark.full),
    pytest.param(("sglang", "qwen3", 1, "scatter"), marks=pytest.mark.versions),
    pytest.param(("sglang", "qwen3", 2, "scatter"), marks=[pytest.mark.full, pytest.mark.versions]),
    pytest.param(("sglang", "qwen3", 1, "masked"), marks=pytest.mark.full),
    pytest.param(("sglang", "qwen3_moe", 1, "scatter"), marks=pytest.mark.full),
    pytest.param(("sglang", "llama_tied", 1, "scatter"), marks=pytest.mark.full),
]


class Run:
    """A live engine and the trainer that it follows."""

    def __init__(
        self, kind: str, engine: EngineProcess, base: Path, root: Path, apply: str
    ) -> None:
        self.kind = kind
        self.apply = apply
        self.engine = engine
        self.base = base
        self.root = root
        self.trainer = Trainer(tiny_models.load_tensors(base))

    def part(self, changed: Mapping[str, torch.Tensor], encoding: str, **options: Any) -> bytes:
        """A container of some of the last step's changes."""
        if encoding == "gap8_ulp" and self.apply == "masked":
            encoding = "gap8_exp"  # `test_differences_need_proven_old_values` sees it refused
        trainer = self.trainer
        return container(trainer.tensors, changed, encoding=encoding, old=trainer.old, **options)

    def post(self, body: bytes, **params: str) -> httpx.Response:
        return self.engine.post(
            "/update_weights_delta",
            content=body,
            params=params,
            headers={"Content-Type": "application/octet-stream"},
        )

    def committed(self, response: httpx.Response) -> dict[str, object]:
        answer: dict[str, object] = response.json()
        assert response.status_code == 200, answer
        assert answer["status"] == "committed", answer
        assert answer["version"] == self.trainer.version
        assert self.engine.weight_version() == str(self.trainer.version)
        return answer

    def files(self, parts: list[bytes]) -> dict[str, Any]:
        """Write parts below the root; the body of a disk request for them."""
        folder = self.root / f"weight_v{self.trainer.version:06d}"
        folder.mkdir()
        names = [f"rank0_flush{number:03d}.safetensors" for number in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            (folder / name).write_bytes(part)
        return {"model_path": str(folder), "files": names}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def run(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Run]:
    kind, model, tp, apply = request.param
    root = tmp_path_factory.mktemp("deltas")
    base = checkpoint(model)
    arguments = ["--delta-root", str(root), "--delta-tuning", f"apply={apply}"]
    engine = start(kind, base, tp=tp, extra_args=arguments)
    for prompt in PROMPTS:
        # Entries that the prefix cache keeps now must not answer for later weights.
        engine.complete(prompt, max_tokens=4, temperature=0.0)
    yield Run(kind, engine, base, root, apply)
    engine.stop()


def test_every_tensor_is_exact(run: Run) -> None:
    status = run.engine.delta_status()
    assert (status.engine, status.ranks) == (run.kind, run.engine.tp)
    assert (status.version.published, status.health.uncertified) == ("0", {})
    assert [set(counts) for counts in status.health.certification] == [{"exact"}] * run.engine.tp
    assert status.version.digest == model_digest(run.trainer.tensors).hex()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_part_by_http(run: Run, encoding: str) -> None:
    changed = run.trainer.step()
    body = run.part(changed, encoding, metadata=run.trainer.metadata())
    answer = run.committed(run.post(body))
    assert answer["nnz"] == sum(len(where) for where in changed.values())
    assert answer["tensors"] == len(changed)
    assert answer["bytes"] == len(body)
    repeat = run.post(body).json()
    assert repeat["status"] == "already_applied"


@pytest.mark.parametrize("encoding", ["deltas", "gap8_ulp"])
def test_parts_out_of_order_by_http(run: Run, encoding: str) -> None:
    changed = split(run.trainer.step(), 3)
    shared = run.trainer.metadata()
    bodies = [
        run.part(
            some,
            encoding,
            metadata={**shared, "part": str(number), "num_parts": "3"},
            manifest_checksum=True,
        )
        for number, some in enumerate(changed)
    ]
    for number in (2, 0):
        assert run.post(bodies[number]).json()["status"] == "staged"
        assert run.post(bodies[number]).json()["status"] == "staged"
    assert present(run.engine.delta_status().staged).parts == [0, 2]
    run.committed(run.post(bodies[1]))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["in-order", "last-first"])
def test_only_the_last_part_says_how_many(run: Run, order: tuple[int, ...]) -> None:
    """The posts of a sender that does not know the engine before; the encodings can differ."""
    encodings = "gap8_exp", "gap8_ulp", "deltas_zstd"
    changed = split(run.trainer.step(), 3)
    shared = run.trainer.metadata()
    metadata = [{**shared, "part": str(number)} for number in range(3)]
    metadata[-1]["num_parts"] = "3"
    bodies = [
        run.part(some, encoding, metadata=own)
        for some, encoding, own in zip(changed, encodings, metadata, strict=True)
    ]
    for number in order[:-1]:
        assert run.post(bodies[number]).json()["status"] == "staged"
    run.committed(run.post(bodies[order[-1]]))


@pytest.mark.parametrize("encoding", ["indices", "gap8_exp"])
def test_files(run: Run, encoding: str) -> None:
    changed = split(run.trainer.step(), 2)
    parts = [run.part(some, encoding) for some in changed]
    request = {**run.files(parts), "weight_version": str(run.trainer.version)}
    run.committed(run.engine.post("/update_weights_delta", json=request))
    repeat = run.engine.post("/update_weights_delta", json=request).json()
    assert repeat["status"] == "already_applied"


@pytest.mark.parametrize("encoding", ["deltas", "deltas_zstd", "gap8_ulp"])
def test_update_weights_from_disk(run: Run, encoding: str) -> None:
    """As slime and vime call it: one version in several calls, slime's checksum, no versions."""
    changed = split(run.trainer.step(), 3)
    parts = [run.part(some, encoding, checksum="slime") for some in changed]
    request = run.files(parts)
    version = {"weight_version": str(run.trainer.version), "load_format": "delta"}
    first, second, third = request["files"]
    for names in ([first, second], [third]):
        body = {**request, **version, "files": names}
        answer = run.engine.post("/update_weights_from_disk", json=body)
        assert answer.json()["success"] is True, answer.json()
        run.committed(answer)


def test_several_files_as_bodies(run: Run) -> None:
    """One version in several bodies of slime's encoder, which have no number, id or base."""
    changed = split(run.trainer.step(), 3)
    version = str(run.trainer.version)
    for some in changed:
        run.committed(run.post(run.part(some, "deltas", checksum="slime"), weight_version=version))
    assert run.engine.delta_status().version.complete is None


def test_a_step_without_changes(run: Run) -> None:
    """The step is announced by a call, or shown by the folder of the version."""
    before = run.engine.checksums()
    run.trainer.version += 3
    version = str(run.trainer.version)
    answer = run.engine.post("/update_weight_version", json={"new_version": version})
    assert run.committed(answer)["success"] is True
    assert run.engine.checksums() == before
    run.trainer.version += 1
    write_version(run.root, run.trainer.version, {}, {})
    parts = [run.part(run.trainer.step(), "deltas", checksum="slime")]
    request = {**run.files(parts), "weight_version": str(run.trainer.version)}
    run.committed(run.engine.post("/update_weights_delta", json=request))


def test_a_version_half_delivered_is_no_base(run: Run) -> None:
    request = run.files([run.part(some, "deltas") for some in split(run.trainer.step(), 2)])
    first, second = request["files"]
    version = {"weight_version": str(run.trainer.version)}
    body = {**request, **version, "files": [first]}
    run.committed(run.engine.post("/update_weights_delta", json=body))
    assert run.engine.delta_status().version.complete is False
    before = run.engine.checksums()
    later = str(run.trainer.version + 1)
    answer = run.engine.post("/update_weight_version", json={"new_version": later})
    assert (answer.status_code, answer.json()["error"]["files"]) == (409, [second])
    assert run.engine.checksums() == before
    run.committed(run.engine.post("/update_weights_delta", json={**body, "files": [second]}))


def test_pull_then_commit(run: Run, tmp_path: Path) -> None:
    """As slime asks for it: no checkpoint is ever at the path that it loads."""
    local, target = str(tmp_path / "none"), run.trainer.version + 2
    wanted = {"local_checkpoint_dir": local, "source_dir": str(run.root)}
    seed = {**wanted, "target_version": run.trainer.version}
    assert run.engine.post("/pull_weights", json=seed).json()["success"] is True
    for encoding in ("indices", "deltas_zstd"):
        changed = split(run.trainer.step(), 2)
        run.files([run.part(some, encoding, checksum="slime") for some in changed])
    before = run.engine.checksums()
    answer = run.engine.post("/pull_weights", json={**wanted, "target_version": target})
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert run.engine.checksums() == before
    body = {"model_path": local, "weight_version": str(target)}
    run.committed(run.engine.post("/update_weights_from_disk", json=body))
    assert run.engine.post("/update_weights_from_disk", json=body).json()["success"] is True
    assert run.engine.delta_status().health.changed_externally is None


def test_the_head_of_a_tied_embedding_is_skipped(run: Run) -> None:
    """It takes the embedding's values; no engine loads it a second time."""
    changed = dict(run.trainer.step())
    tied = "lm_head.weight" not in run.trainer.tensors
    name, like = "lm_head.weight", "model.embed_tokens.weight"
    tensors = (
        {**run.trainer.tensors, name: run.trainer.tensors[like]} if tied else run.trainer.tensors
    )
    sent = {**changed, name: changed[like]} if tied else changed
    answer = run.committed(run.post(container(tensors, sent, metadata=run.trainer.metadata())))
    assert answer["skipped"] == ({name: len(changed[like])} if tied else {})


@pytest.mark.parametrize("checksum", ["xxh3", "slime"])
def test_versions_in_the_query(run: Run, checksum: str) -> None:
    body = container(run.trainer.tensors, run.trainer.step(), checksum=checksum)
    run.committed(run.post(body, weight_version=str(run.trainer.version)))


def test_differences_need_proven_old_values(run: Run) -> None:
    """Other old values than the engine's are refused, and by the masked apply all differences."""
    trainer = run.trainer
    version, tensors = trainer.version, dict(trainer.tensors)
    trainer.step()
    changed = trainer.step()
    metadata = {**trainer.metadata(), "base_version": str(version)}
    before = run.engine.checksums()
    body = container(
        trainer.tensors, changed, encoding="gap8_ulp", old=trainer.old, metadata=metadata
    )
    response = run.post(body)
    masked = run.apply == "masked"
    assert response.status_code == (422 if masked else 409)
    assert response.json()["error"]["type"] == ("NotUpdatable" if masked else "BaseMismatch")
    assert run.engine.checksums() == before
    trainer.version, trainer.tensors = version, tensors


def test_empty_part_advances_the_version(run: Run) -> None:
    run.trainer.version += 1
    before = run.engine.checksums()
    run.committed(run.post(container({}, {}, metadata=run.trainer.metadata())))
    assert run.engine.checksums() == before


def test_dense_and_sparse_params_in_one_part(run: Run) -> None:
    changed = dict(run.trainer.step())
    mixed = {name: None if k % 2 else where for k, (name, where) in enumerate(changed.items())}
    run.committed(run.post(container(run.trainer.tensors, mixed, metadata=run.trainer.metadata())))


def test_nan_is_a_value_like_any_other(run: Run) -> None:
    """The masked apply marks unchanged elements with NaN: it cannot send one, and says so."""
    name, where = "model.norm.weight", torch.tensor([2])
    old = run.trainer.tensors[name]
    new = old.clone()
    new.view(torch.int16)[2] = 0x7FC1
    for tensor in (new, old):
        run.trainer.version += 1
        tensors = {**run.trainer.tensors, name: tensor}
        response = run.post(container(tensors, {name: where}, metadata=run.trainer.metadata()))
        if tensor is new and run.engine.delta_status().apply == "masked":
            assert response.status_code == 422
            assert "NaN" in response.json()["error"]["message"]
            run.trainer.version -= 1
            continue
        run.committed(response)


def test_full_sync_to_any_version(run: Run) -> None:
    changed = run.trainer.step()
    run.trainer.version += 10
    metadata = {"current_version": str(run.trainer.version), "full": "true"}
    dense = dict.fromkeys(changed)
    run.committed(run.post(container(run.trainer.tensors, dense, metadata=metadata)))


@pytest.mark.parametrize("encoding", ["deltas_zstd", "gap8_ulp", "auto"])
def test_reference_sender(run: Run, encoding: str) -> None:
    """It posts while it reads on, so that only the last part says how many there are.

    Differences that the masked apply refuses go as values by the sender's own fallback.
    """
    with DeltaSender(
        run.engine.url,
        run.trainer.tensors.items(),
        base_version=run.trainer.version,
        encoding=encoding,
        bucket_bytes=4096,
    ) as sender:
        run.trainer.step()
        report = sender.sync(run.trainer.tensors.items())
        assert report.status == "committed"
        assert report.parts > 1
        if encoding == "auto":
            assert sum(report.picked.values()) == len(run.trainer.tensors)
        run.trainer.step()
        report = sender.sync(run.trainer.tensors.items())
        assert (report.version, report.full) == (run.trainer.version, False)


def test_differences_to_other_old_values(run: Run) -> None:
    """The sender falls back to values, and to a full sync if those are not enough."""
    for elsewhere in (False, True):
        base = {name: tensor.clone() for name, tensor in run.trainer.tensors.items()}
        changed = run.trainer.step()
        for name, where in changed.items():
            base[name].view(-1).view(torch.int16)[where] ^= 8
        if elsewhere:  # it believes that the engine has this already, and leaves it out
            base["model.norm.weight"] = run.trainer.tensors["model.norm.weight"].clone()
        with DeltaSender(
            run.engine.url,
            base.items(),
            base_version=run.trainer.version - 1,
            encoding="gap8_ulp",
            bucket_bytes=4096,
            posts_in_flight=1,  # so that an attempt is refused once
            full="allow",
        ) as sender:
            report = sender.sync(run.trainer.tensors.items())
        assert (report.status, report.full) == ("committed", elsewhere)
        assert set(report.picked) == {"gap8_exp, dense" if elsewhere else "gap8_exp"}
        assert report.version == run.trainer.version
        assert report.digest == model_digest(run.trainer.tensors).hex()
        history = run.engine.get("/delta_status", params={"history": "true"}).json()["history"]
        errors = [sync["error"] for sync in history if sync["version"] == report.version]
        # The values, whose digest is not the outcome's.
        refused = ["BaseMismatch"] if elsewhere else []
        assert errors == [*refused, None]


def test_command_line_of_the_sender(run: Run, tmp_path: Path) -> None:
    before = tiny_models.save_checkpoint(run.base, tmp_path / "a", run.trainer.tensors)
    base_version = run.trainer.version
    run.trainer.step()
    after = tiny_models.save_checkpoint(run.base, tmp_path / "b", run.trainer.tensors)
    command = [sys.executable, "-m", "delta_sender", "--base", str(before), "--target", str(after)]
    command += ["--url", run.engine.url, "--base-version", str(base_version)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": environment()}
    result = subprocess.run(command, **options, check=False)
    assert result.returncode == 0, result.stderr
    assert "committed" in result.stdout
    again = subprocess.run(command, **options, check=True)
    assert "committed; 0 of" in again.stdout  # the engine holds the target
    run.trainer.step()
    further = tiny_models.save_checkpoint(run.base, tmp_path / "c", run.trainer.tensors)
    command[command.index("--target") + 1] = str(further)
    again = subprocess.run(command, **options, check=False)
    assert again.returncode == 1  # the engine does not hold the base any more
    assert "--allow-full" in again.stderr
    resync = subprocess.run([*command, "--allow-full"], **options, check=True)
    assert "committed (full; behind: " in resync.stdout
    run.trainer.version = run.engine.delta_status().version.number
    assert run.trainer.version > base_version + 1


def test_equals_a_fresh_engine(
    run: Run, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """Last: all that the engine computes with is what a fresh one loads from the trainer."""
    assert run.engine.delta_status().version.number == run.trainer.version
    found = run.engine.get("/delta_digest", params={"scan": "true"}).json()
    assert found["corrupted"] == []
    assert found["digest"] == model_digest(run.trainer.tensors).hex()
    updated = fingerprint(run.engine)
    run.engine.stop()
    target = tiny_models.save_checkpoint(run.base, tmp_path / "target", run.trainer.tensors)
    fresh = start(run.kind, target, tp=run.engine.tp)
    assert fingerprint(fresh) == updated
    fresh.stop()
