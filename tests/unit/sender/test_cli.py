"""The command ``delta-send`` on two tiny checkpoints."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import save_file

from delta_sender import cli
from delta_sender.publish.publisher import Publisher
from engine_ext.dtypes import torch_bits_dtype
from engine_ext.format.digest import Digest, tensor_digest
from engine_ext.format.part import DecodedPart, decode_part
from engine_ext.format.zstd_frames import FrameReader
from engine_ext.log import open_log
from tests.support.statuses import engine_status
from tests.unit.log.places import folders

URL = "http://engine:8000"
CHANGES = {("a.weight", 3, 2.0), ("c.scale", 0, 5.0), ("c.scale", 6, 7.0)}


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.zeros(4, 8, dtype=torch.bfloat16),
        "b.weight": torch.ones(8, dtype=torch.bfloat16),
        "c.scale": torch.ones(16),
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The base with `CHANGES`, in two files and with an index."""
    model = tensors()
    for name, index, value in CHANGES:
        model[name].view(-1)[index] = value
    folder = tmp_path / "target"
    folder.mkdir()
    files = {"a.weight": "x-1.safetensors", "b.weight": "x-2.safetensors"}
    files["c.scale"] = files["a.weight"]
    for file in set(files.values()):
        save_file({n: t for n, t in model.items() if files[n] == file}, folder / file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def decoded(body: bytes) -> DecodedPart:
    reader = FrameReader(1 << 20)
    part = decode_part(b"".join(reader.feed(body)))
    reader.finish()
    return part


def changes_of(parts: list[DecodedPart]) -> set[tuple[str, int, float]]:
    found = set()
    for delta in (delta for part in parts for delta in part.deltas):
        assert delta.indices is not None
        width = {"bfloat16": (torch.int16, torch.bfloat16), "float32": (torch.int32, torch.float32)}
        bits, dtype = width[delta.dtype]
        values = torch.tensor(delta.values.tolist()).to(bits).view(dtype).tolist()
        found |= {(delta.name, int(i), v) for i, v in zip(delta.indices, values, strict=True)}
    return found


Handler = Callable[[httpx.Request], httpx.Response]
Serve = Callable[..., list[httpx.Request]]


class Command:
    """``delta-send`` from the base to the target; `out` and `err` are what it printed last."""

    def __init__(self, base: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.base, self.target, self._capsys, self.out, self.err = base, target, capsys, "", ""

    def __call__(self, *options: object, base: bool = True) -> int:
        given = ["--base", self.base] if base else []
        status = cli.main([*map(str, [*given, "--target", self.target, *options])])
        self.out, self.err = self._capsys.readouterr()
        return status

    def back(self, *options: object) -> int:
        """Send from the target to the base."""
        return Command(self.target, self.base, self._capsys)(*options)


@pytest.fixture
def send(base: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(base, target, capsys)


def accept(request: httpx.Request) -> httpx.Response:
    manifest = decoded(request.content).manifest
    last = manifest.part is not None and manifest.part + 1 == manifest.num_parts
    status = "committed" if last else "staged"
    return httpx.Response(200, json={"status": status, "version": manifest.current_version})


def plan(ignored: str = "") -> dict[str, object]:
    """The status of an engine of two ranks that ignores one tensor of the checkpoint."""
    rows = [
        {"name": n, "status": "ignored" if n == ignored else "exact", "digested": n != ignored}
        for n in tensors()
    ]
    held = {"digest": digest_of(tensors(), ignored)}
    status: dict[str, object] = msgspec.to_builtins(engine_status(version=held, plan=[rows, rows]))
    return status


def digest_of(model: dict[str, torch.Tensor], ignored: str = "") -> str:
    total = Digest.ZERO
    for name, tensor in model.items():
        if name != ignored:
            flat = tensor.view(-1).view(torch_bits_dtype(tensor.dtype)).numpy()
            total += tensor_digest(name, flat.view(f"u{tensor.itemsize}"))
    return total.hex()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Put a handler in the engine's place; returns the POST requests it gets."""

    def install(
        handler: Handler, status: dict[str, object] | None = None, code: int = 200
    ) -> list[httpx.Request]:
        requests: list[httpx.Request] = []

        def record(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/delta_run":
                return httpx.Response(404)
            if request.method == "GET":
                return httpx.Response(404) if status is None else httpx.Response(code, json=status)
            requests.append(request)
            return handler(request)

        client = functools.partial(httpx.Client, transport=httpx.MockTransport(record))
        monkeypatch.setattr(httpx, "Client", client)
        return requests

    for name in ("DELTA_API_KEY", "DELTA_HMAC_KEY"):
        monkeypatch.delenv(name, raising=False)
    return install


def test_sends_the_difference(send: Command, serve: Serve) -> None:
    requests = serve(accept)
    assert send("--url", URL, "--base-version", "11") == 0
    parts = [decoded(request.content) for request in requests]
    assert changes_of(parts) == CHANGES
    assert len(parts) == 2
    assert {p.manifest.current_version for p in parts} == {12}
    assert send.out.startswith("version 11 -> 12: committed; 3 of 56 elements (5.357%)")
    assert send.out.count("\n") == 1
    assert "target" in send.err
    assert "Authorization" not in requests[0].headers


def test_options_reach_the_engine(
    send: Command, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = serve(accept)
    arguments = ["--url", URL]
    arguments += ["--encoding", "indices", "--pause-mode", "abort", "--no-flush-cache"]
    assert send(*arguments, "--api-key", "given") == 0
    assert requests[0].headers["Authorization"] == "Bearer given"
    assert dict(requests[0].url.params) == {"pause_mode": "abort", "flush_cache": "false"}
    assert decoded(requests[0].content).manifest.encoding == "indices"
    monkeypatch.setenv("DELTA_API_KEY", "from-env")
    assert send(*arguments) == 0
    assert requests[-1].headers["Authorization"] == "Bearer from-env"
    assert "X-Delta-Signature" not in requests[-1].headers
    monkeypatch.setenv("DELTA_HMAC_KEY", "key")
    assert send(*arguments) == 0
    assert requests[-1].headers["X-Delta-Signature"] == signature(requests[-1].content)


def test_nonfinite_values_are_said_or_refused(
    send: Command, target: Path, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    model = tensors()
    model["b.weight"][3] = float("nan")
    (target / "model.safetensors.index.json").unlink()
    for file in target.iterdir():
        file.unlink()
    save_file(model, target / "model.safetensors")
    requests = serve(accept)
    arguments = ["--url", URL]
    assert send(*arguments, "--refuse-nonfinite") == 2
    assert "b.weight: 1 values have become NaN or infinite" in send.err
    assert [r for r in requests if r.method == "POST" and r.content] == []
    assert send(*arguments) == 0
    assert "b.weight: the first NaN or infinite value" in caplog.text


def signature(part: bytes) -> str:
    return hmac.new(b"key", part, hashlib.sha256).hexdigest()


def test_saved_parts_are_signed(
    send: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTA_HMAC_KEY", "key")
    assert send("--log", tmp_path / "log") == 0
    parts = sorted((tmp_path / "log" / "weight_v000001").glob("*.safetensors"))
    assert parts
    for part in parts:
        assert part.with_name(part.name + ".sig").read_text() == signature(part.read_bytes())


def test_auto_says_what_it_picked(send: Command, serve: Serve) -> None:
    requests = serve(accept)
    arguments = ["--url", URL]
    assert send(*arguments, "--encoding", "auto") == 0
    parts = [decoded(request.content) for request in requests]
    sent = sorted(part.manifest.encoding for part in parts for _ in part.deltas)
    said = ", ".join(f"{sent.count(encoding)} {encoding}" for encoding in sorted(set(sent)))
    assert f"{len(parts)} part(s) ({said}), encode" in send.out


def test_full_needs_no_base(send: Command, serve: Serve) -> None:
    requests = serve(accept)
    assert send("--url", URL, "--full", "--bucket-bytes", "70", base=False) == 0
    deltas = [delta for r in requests for delta in decoded(r.content).deltas]
    assert {(d.name, d.nnz, d.indices is None) for d in deltas} == {
        ("a.weight", 32, True),
        ("b.weight", 8, True),
        ("c.scale", 16, True),
    }
    assert len(requests) == 3
    assert "committed (full; requested); 56 of 56 elements" in send.out


def test_save_writes_all_parts_at_once(send: Command, tmp_path: Path) -> None:
    root = tmp_path / "updates"
    leftover = root / ".weight_v000012.partial"
    leftover.mkdir(parents=True)
    (leftover / "rank0_flush007.safetensors").write_bytes(b"from an interrupted run")
    arguments = ["--base-version", "11"]
    arguments += ["--log", str(root)]
    assert send(*arguments) == 0
    assert folders(root) == ["weight_v000012"]
    [done, *files] = sorted((root / "weight_v000012").iterdir())
    assert done.name == "DONE"
    assert [f.name for f in files] == ["rank0_flush000.safetensors", "rank0_flush001.safetensors"]
    assert changes_of([decoded(file.read_bytes()) for file in files]) == CHANGES
    assert "saved in" in send.out
    assert send(*arguments) == 2
    assert "exists" in send.err


def test_a_log_that_has_other_versions_is_left_to_its_sender(send: Command, tmp_path: Path) -> None:
    log = "--log", tmp_path / "log"
    assert send(*log) == 0
    assert send(*log, "--base-version", "9") == 2
    assert "does not lead to version 9" in send.err
    assert send(*log) == 2
    assert "version 1 exists" in send.err
    assert folders(tmp_path / "log") == ["weight_v000001"]
    assert send.back(*log, "--base-version", "1") == 0


@pytest.mark.parametrize("asks", [True, False])
def test_log_takes_no_version_of_another_base(
    send: Command, serve: Serve, tmp_path: Path, asks: bool
) -> None:
    """A digest shows it; without an engine that is asked, the command warns."""
    serve(accept, plan())
    options = ["--log", tmp_path / "log", *(["--url", URL] if asks else [])]
    assert send(*options) == 0
    assert ("the versions carry no digests" in send.err) != asks
    assert send(*options, "--base-version", "1") == (2 if asks else 0)
    wrong = "the base is not what version 1 in" if asks else "no digest shows whether --base"
    assert wrong in send.err
    assert folders(tmp_path / "log") == ["weight_v000001", "weight_v000002"][: 1 if asks else 2]


def test_log_continues_if_the_digest_is_that_of_the_base(
    send: Command, serve: Serve, tmp_path: Path
) -> None:
    requests = serve(accept, plan())
    options = "--log", tmp_path / "log", "--url", URL
    assert send(*options) == 0
    assert send.back(*options, "--base-version", "1") == 0
    first, second = open_log(tmp_path / "log").listing().entries
    assert first.publication is not None
    assert second.publication is not None
    assert second.publication.run == first.publication.run
    assert second.publication.digest_before == first.publication.digest_after
    assert requests == []  # the engine is asked for its plan alone


def test_refusal_of_engine_that_is_asked_is_a_line(
    send: Command, serve: Serve, tmp_path: Path
) -> None:
    assert send("--log", tmp_path / "log") == 0
    requests = serve(accept, {"error": {"type": "Unauthorized", "message": "no"}}, code=401)
    options = ["--log", tmp_path / "log", "--notify", URL, "--base-version", "1"]
    assert send(*options) == 1
    assert "failed: HTTP 401" in send.err
    assert (send.out, requests) == ("", [])  # nobody is asked to look at what is not there
    assert send("--log", tmp_path / "new", "--notify", URL) == 1  # the sync itself fails
    assert "failed: HTTP 401" in send.err
    assert (send.out, requests) == ("", [])


def test_a_damaged_log_is_said_in_a_line(send: Command, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("no folder")
    assert send("--log", tmp_path / "log") == 2
    assert "cannot read the delta log" in send.err


def test_the_state_and_the_log_go_on_with_the_next_run(
    send: Command, tmp_path: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run is given no version, and its base is what the first one sent."""
    requests = serve(accept)
    state, log = tmp_path / "state.json", tmp_path / "log"
    kept = "--url", URL, "--state", state, "--delta-log", log, "--lag-limit", "9"
    assert send(*kept) == 0
    send = Command(send.target, send.base, capsys)
    assert send(*kept) == 0
    assert decoded(requests[-1].content).manifest.current_version == 2
    assert "version 1 -> 2: committed" in send.out
    saved = sorted(log.glob("*/*.safetensors"))
    assert [path.read_bytes() for path in saved] == [request.content for request in requests]
    assert folders(log) == ["weight_v000001", "weight_v000002"]


def test_commit_without_room_for_the_state_is_done(
    send: Command, serve: Serve, tmp_path: Path
) -> None:
    folder = tmp_path / "states"
    folder.mkdir()

    def answer(request: httpx.Request) -> httpx.Response:
        answered = accept(request)
        if answered.json()["status"] == "committed":
            folder.rename(tmp_path / "away")
        return answered

    serve(answer)
    assert send("--url", URL, "--state", str(folder / "state.json")) == 0
    assert "version 0 -> 1: committed" in send.out
    assert "the state file cannot be written" in send.err


def test_the_engine_refuses(send: Command, serve: Serve) -> None:
    error = {"type": "NotUpdatable", "message": "[a.weight] is odd", "engine_state": "unchanged"}
    serve(lambda request: httpx.Response(422, json={"error": error}))
    assert send("--url", URL) == 1
    assert send.out == ""
    assert "failed: HTTP 422: NotUpdatable: [a.weight] is odd" in send.err


def test_interrupted(send: Command, serve: Serve) -> None:
    def interrupt(request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    serve(interrupt)
    assert send("--url", URL) == 130
    assert "interrupted; what was staged" in send.err


OTHER = "http://other:8001"


def test_several_engines(send: Command, serve: Serve) -> None:
    requests = serve(accept, plan())
    assert send("--url", URL, "--url", OTHER) == 0
    bodies: dict[str, list[bytes]] = {}
    for request in requests:
        bodies.setdefault(request.url.host, []).append(request.content)
    assert bodies["engine"] == bodies["other"]
    first, second = send.out.splitlines()
    assert first.startswith(f"{URL}: version 0 -> 1: committed; 3 of 56 elements")
    assert second.startswith(f"{OTHER}: version 0 -> 1: committed; 3 of 56 elements")


def test_one_of_several_engines_refuses(send: Command, serve: Serve) -> None:
    error = {"type": "SpoolFull", "message": "no room", "engine_state": "unchanged"}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "engine":
            return httpx.Response(507, json={"error": error})
        return accept(request)

    serve(answer)
    arguments = ["--url", URL, "--url", OTHER]
    assert send(*arguments) == 1
    assert send.out.startswith(f"{OTHER}: version 0 -> 1: committed")
    assert send.out.count("\n") == 1
    assert f"{URL}: failed: HTTP 507: SpoolFull: no room" in send.err
    assert send(*arguments, "--url", URL) == 2
    assert "each once" in send.err


def commits(request: httpx.Request, digest: str | None = None) -> httpx.Response:
    """Accept, and answer with a digest, by default that of what the engine should hold."""
    digest = digest or decoded(request.content).manifest.digest_after
    return httpx.Response(200, json={**accept(request).json(), "digest": digest})


WRONG = "f" * 32
REFUSAL = {"type": "NotUpdatable", "message": "[a.weight] is odd", "engine_state": "unchanged"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_time", "first", "late", "status", "said"),
    [
        (True, "commits", "commits", 0, f"{OTHER}: version 1: committed late"),
        (False, "commits", "commits", 1, f"{OTHER}: failed: not done within the lag limit"),
        (True, "commits", "differs", 1, f"{OTHER}: failed: version 1 is committed, but the engine"),
        (True, "commits", "refuses", 1, f"{OTHER}: failed: HTTP 422: NotUpdatable: [a.weight]"),
        (True, "differs", "commits", 1, f"{OTHER}: version 1: committed late"),
        (True, "differs", "differs", 1, f"{OTHER}: failed: version 1 is committed, but the engine"),
    ],
)
def test_one_of_several_engines_lags(
    send: Command,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    in_time: bool,
    first: str,
    late: str,
    status: int,
    said: str,
) -> None:
    """It is waited for once more at the end, and what has become of it by then is printed."""
    go = threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        is_late = request.url.host == "other"
        if is_late:
            assert go.wait(20)
        how = late if is_late else first
        if how == "refuses":
            return httpx.Response(422, json={"error": REFUSAL})
        return commits(request, WRONG if how == "differs" else None)

    def close(sender: Publisher) -> None:
        if in_time:
            go.set()
        closes(sender)

    closes = Publisher.close
    monkeypatch.setattr(Publisher, "close", close)
    serve(answer, plan())
    limit = "1" if in_time else "0.02"
    arguments = ["--url", URL, "--url", OTHER]
    found = send(*arguments, "--lag-limit", limit)
    go.set()
    assert found == status
    assert said in send.err
    if first == "commits":
        assert send.out.startswith(f"{URL}: version 0 -> 1: committed")
    else:
        assert f"{URL}: failed: version 1 is committed, but the engine does not hold" in send.err
        assert send.out == ""


@pytest.mark.parametrize("full", [False, True])
def test_digests_and_ignored_tensors(send: Command, serve: Serve, full: bool) -> None:
    new = tensors()
    new["a.weight"].view(-1)[3] = 2.0
    before, after = digest_of(tensors(), "c.scale"), digest_of(new, "c.scale")
    requests = serve(accept, plan(ignored="c.scale"))
    arguments = ["--url", URL]
    arguments += ["--full"] if full else []
    assert send(*arguments) == 0
    (manifest,) = [decoded(request.content).manifest for request in requests]
    assert {entry.name for entry in manifest.params} == (
        {"a.weight", "b.weight"} if full else {"a.weight"}
    )
    assert (manifest.digest_before, manifest.digest_after) == (None if full else before, after)
    assert f"{40 if full else 1} of 40 elements" in send.out
    assert send(*arguments, "--no-digest") == 0
    assert decoded(requests[-1].content).manifest.digest_after is None


@pytest.mark.parametrize("given", ["--url", "--log", "--save"])
def test_engines_that_follow_the_log_are_told(
    send: Command, tmp_path: Path, serve: Serve, naps: list[float], given: str
) -> None:
    """One that is down stops nothing."""

    def look(request: httpx.Request) -> httpx.Response:
        if request.url.host == "down":
            raise httpx.ConnectError("down")
        return httpx.Response(200, json={"status": "caught_up", "version": 1})

    requests = serve(look, plan(ignored="c.scale"))
    log = tmp_path / "log"
    arguments = [given, f"file://{log}"]
    if given != "--url":
        arguments[-1] = str(log)
    told = ["--notify", URL, "--notify", "http://down:8000"]
    assert send(*arguments, *told) == 0
    assert {request.url.path for request in requests} == {"/delta_catch_up"}
    (file,) = (log / "weight_v000001").glob("*.safetensors")
    part = decoded(file.read_bytes())
    assert [delta.name for delta in part.deltas] == ["a.weight"]
    assert part.manifest.digest_before == digest_of(tensors(), "c.scale")
    assert f"saved in {log}/weight_v000001" in send.out
    assert f"{URL}: at version 1" in send.err
    assert "http://down:8000: " in send.err
    assert "finds the version at its next look" in send.err
    assert naps


def test_engines_are_told_though_nobody_reads(
    send: Command, tmp_path: Path, serve: Serve, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*words: object, **options: object) -> None:
        raise BrokenPipeError

    told = httpx.Response(200, json={"status": "caught_up", "version": 1})
    requests = serve(lambda request: told, plan())
    monkeypatch.setattr("builtins.print", unread)
    arguments = ["--log", tmp_path / "log"]
    assert send(*arguments, "--notify", URL) == 0
    assert [request.url.path for request in requests] == ["/delta_catch_up"]


def test_unlike_or_unreadable_checkpoints(send: Command, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    send.target = other
    assert send("--dry-run") == 2
    assert "no tensors" in send.err
    save_file({**tensors(), "b.weight": torch.ones(9)}, other / "model.safetensors")
    assert send("--dry-run") == 2
    assert "b.weight: float32 (9,)" in send.err
    (other / "model.safetensors").write_bytes(b"\0" * 100)
    assert send("--dry-run") == 2
    assert f"{other / 'model.safetensors'}: no safetensors file" in send.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base", "b"], "--target"),
        (["--target", "t", "--url", URL], "--base is needed"),
        (["--base", "b", "--target", "t"], "--url or --log is needed"),
        (["--target", "t", "--full", "--encoding", "bitmap"], "bitmap"),
        (["--target", "t", "--full", "--log", "s", "--url", URL, "--url", OTHER], "one --url"),
        (["--target", "t", "--full", "--url", "logs/run"], "--log"),
        (["--target", "t", "--full", "--url", "s3://b/log", "--url", URL], "the only --url"),
        (["--target", "t", "--full", "--url", "file:///log", "--log", "s"], "not with --log"),
        (["--target", "t", "--full", "--url", "file://host/log"], "no folder of this host"),
        (["--target", "t", "--full", "--url", URL, "--notify", "u"], "--notify is for engines"),
        (["--target", "t", "--full", "--url", "s3://b/log", "--state", "s"], "--state"),
        (["--target", "t", "--full", "--save", "s", "--delta-log", "l"], "cannot be combined with"),
    ],
)
def test_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_runs_as_a_program_and_imports_nothing_unasked(base: Path, target: Path) -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(['numba', 'prometheus_client']))\n"  # not installed
        "try: runpy.run_module('delta_sender', run_name='__main__', alter_sys=True)\n"
        "finally:\n"
        "    import engine_ext.sync.device_table\n"  # Triton is for accelerators, as in the sender
        "    unasked = {'vllm', 'sglang', 'fastapi', 'transformers', 'triton'}\n"
        "    assert not unasked & set(sys.modules)\n"
    )
    arguments = ["--base", str(base), "--target", str(target), "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("version 0 -> 1: dry run; 3 of 56 elements")


def test_a_server_that_is_no_engine_is_named(
    send: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page is not printed, and nothing is tried again."""
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        headers = {"Server": "SimpleHTTP/0.6"}
        return httpx.Response(501, headers=headers, text="<!DOCTYPE HTML>\n<p>Unsupported")

    client = functools.partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    assert send("--url", URL) == 1
    [failed] = [line for line in send.err.splitlines() if "failed" in line]
    assert failed.startswith(f"failed: HTTP 501: no delta endpoint at {URL}/delta_run: the server")
    assert "the server there (SimpleHTTP/0.6) is no engine with" in failed
    assert "--enable-delta-updates" in failed
    assert asked == ["/delta_run"] * 2  # claimed, and released


@pytest.mark.slow
@pytest.mark.parametrize("seconds", ["30", "0.1"])
def test_wait_says_what_it_waits_for(
    send: Command, monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    asked = 0

    def start(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise httpx.ConnectError("all failed") from ConnectionRefusedError(111, "refused")
        if request.url.path in ("/delta_run", "/delta_status"):
            return httpx.Response(404)
        return accept(request)

    client = functools.partial(httpx.Client, transport=httpx.MockTransport(start))
    monkeypatch.setattr(httpx, "Client", client)
    waits = seconds == "30"
    assert send("--url", URL, "--wait", seconds) == (0 if waits else 1)
    waiting = f"{URL}: nothing listens there (connection refused); waiting for {seconds[:2]} s at"
    if waits:
        assert send.err.count(waiting) == 1
        assert send.out.startswith("version 0 -> 1: committed")
    else:
        assert "failed: http://engine:8000/delta_status: no answer in 0 s" in send.err


@pytest.mark.slow
def test_a_bar_names_what_is_waited_for(send: Command, serve: Serve) -> None:
    """On a terminal, while another sync is in the way."""
    busy = {"type": "SyncInProgress", "message": "busy", "engine_state": "unchanged"}
    answers = iter([httpx.Response(409, json={"error": busy}, headers={"Retry-After": "1"})])
    serve(lambda request: next(answers, None) or accept(request))
    terminal, end = pty.openpty()
    shown = os.fdopen(os.dup(end), "w")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stderr", shown)
        patched.setenv("TERM", "xterm")
        patched.setenv("COLUMNS", "120")
        assert send("--url", URL) == 0
    shown.close()
    os.close(end)
    printed = b""
    with contextlib.suppress(OSError):  # EIO: all of it is read
        while piece := os.read(terminal, 1 << 16):
            printed += piece
    os.close(terminal)
    assert b"waiting for another sync to end" in printed
