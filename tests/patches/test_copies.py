"""The patch tool on copies of the engines themselves, never on the installed ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import apply_patches
from scripts.apply_patches import PatchSet, State
from tests.patches import copies

pytestmark = [pytest.mark.engine, pytest.mark.versions]

ENGINES = ("vllm", "sglang")
START = {
    "vllm": (
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "args = parser.parse_args(['--model', '.', '--enable-delta-updates'])\n"
        "AsyncEngineArgs.from_cli_args(args)\n"
    ),
    "sglang": (
        "from sglang.srt.server_args import prepare_server_args\n"
        "arguments = ['--model-path', '.', '--device', 'cpu', '--enable-delta-updates']\n"
        "prepare_server_args(arguments)\n"
    ),
}
MISSING = [
    ("vllm", "vllm/v1/worker/worker_base.py"),
    ("sglang", "sglang/srt/model_executor/model_runner.py"),
    pytest.param(
        "sglang",
        "sglang/srt/managers/scheduler_components/weight_updater.py",
        marks=pytest.mark.full,
    ),
]


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    engine: str = request.param
    return engine


def test_apply_status_revert_apply(
    name: str, patched_copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A reverted copy equals the installed engine, byte for byte."""
    folder = patched_copy(name)
    released = copies.touched(name, copies.installed(name).parent)
    patched = copies.touched(name, folder)
    assert all(released[path] != patched[path] for path in released)

    def tool(*options: str) -> int:
        return apply_patches.main([name, "--target", str(folder), *options])

    assert (tool(), tool("--status")) == (0, 0)
    assert "nothing to do: already applied" in capsys.readouterr().out
    assert tool("--revert") == 0
    assert copies.touched(name, folder) == released
    assert (tool("--status"), tool("--check")) == (1, 0)
    assert tool() == 0
    assert copies.touched(name, folder) == patched


@pytest.mark.parametrize("revert", [False, True])
def test_a_tampered_file_is_refused_and_nothing_is_changed(
    name: str, revert: bool, patched_copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = patched_copy(name)
    command = [name, "--target", str(folder)]
    if not revert:
        assert apply_patches.main([*command, "--revert"]) == 0
    before = copies.touched(name, folder)
    path = sorted(before)[-1]
    tampered = {**before, path: before[path] + b"# mine\n"}
    (folder / path).write_bytes(tampered[path])
    try:
        capsys.readouterr()
        assert apply_patches.main([*command, *(["--revert"] if revert else [])]) == 1
        said = capsys.readouterr().err
        assert "refused, nothing was changed" in said
        assert path in said
        assert copies.touched(name, folder) == tampered
    finally:
        (folder / path).write_bytes(before[path])
    copies.patch(name, folder)


@pytest.mark.parametrize(("name", "path"), MISSING)
def test_half_patched_does_not_start(
    name: str, path: str, patched_copy: Callable[[str], Path]
) -> None:
    """Whichever file is missing: never a server with some of the hooks."""
    folder = patched_copy(name)
    with copies.half_patched(name, folder, path):
        done = copies.run(name, folder, "-c", START[name])
    assert done.returncode == 1
    module = path.removesuffix(".py").replace("/", ".")
    assert f"patched only in part, {module} not at all" in done.stderr
    assert f"run python -m delta_patches {name} --status" in done.stderr


def test_hunks_fit_only_one_place(name: str) -> None:
    """So that on another version they go in where they belong, or not at all."""
    engine = apply_patches.find(name, copies.installed(name))
    folder = apply_patches.PATCHES / name / engine.version
    patches = PatchSet(folder, engine.root, by_hash=False)
    assert set(patches.states.values()) == {State.ORIGINAL}
