"""The tool: which engine and patches it takes, what it refuses, and what it reports."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_ext.adapters.entry_point import NAME
from scripts import apply_patches
from scripts.apply_patches import PatchSet, State
from tests.patches import fake_engine
from tests.patches.fake_engine import FILES, PATCHED, VERSION, Tool, read, set_version

ROOT = Path(__file__).parents[2]


def test_apply_status_revert_apply(tool: Tool, source: Path) -> None:
    assert tool("--status")[0] == 1
    for _ in range(2):
        code, said = tool()
        assert (code, "applied: 3 of 3 files changed" in said) == (0, True)
        assert f"vllm {VERSION} in {source}" in said
        assert read(source) == PATCHED
        code, said = tool("--status")
        assert (code, said.count(": applied\n")) == (0, 4)
        code, said = tool("--revert")
        assert (code, "reverted: 3 of 3 files changed" in said) == (0, True)
        assert read(source) == FILES


def test_twice_is_once(tool: Tool, source: Path) -> None:
    tool()
    times = [file.stat().st_mtime_ns for file in sorted(source.rglob("*.py"))]
    code, said = tool()
    assert (code, "nothing to do: already applied" in said) == (0, True)
    assert [file.stat().st_mtime_ns for file in sorted(source.rglob("*.py"))] == times
    tool("--revert")
    code, said = tool("--revert")
    assert (code, "nothing to do: the patches are not in" in said) == (0, True)
    assert read(source) == FILES


def test_check_changes_nothing(tool: Tool, source: Path) -> None:
    code, said = tool("--check")
    assert (code, "can be applied: 3 of 3 files would change" in said) == (0, True)
    assert read(source) == FILES
    tool()
    code, said = tool("--check")
    assert (code, "already applied" in said) == (0, True)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("options", [(), ("--check",), ("--revert",)])
def test_a_tampered_file_is_refused(
    tool: Tool, source: Path, patched: bool, options: tuple[str, ...]
) -> None:
    """Even where the patches would fit: a byte outside their context."""
    if patched:
        tool()
    file = source / "vllm" / "one.py"
    file.write_bytes(file.read_bytes() + b"# mine\n")
    before = read(source)
    code, said = tool(*options)
    assert code == 1
    assert "refused, nothing was changed" in said
    assert "vllm/one.py" in said
    assert "two.py" not in said
    assert "Reinstall vllm" in said
    assert read(source) == before
    code, said = tool("--status")
    assert (code, "one.py: neither the released" in said) == (1, True)


def test_a_missing_file_is_refused(tool: Tool, source: Path) -> None:
    (source / "vllm" / "deep" / "two.py").unlink()
    before = read(source)
    code, said = tool()
    assert (code, "vllm/deep/two.py" in said) == (1, True)
    assert read(source) == before


def test_half_applied_is_completed_or_undone(tool: Tool, source: Path) -> None:
    """As after one file was restored by hand: every file's hash is known, so both are safe."""
    for options, wanted in (((), PATCHED), (("--revert",), FILES)):
        tool()
        (source / "vllm" / "one.py").write_bytes(FILES["vllm/one.py"].encode())
        code, said = tool("--status")
        assert (code, "applied to some files only" in said) == (1, True)
        assert tool(*options)[0] == 0
        assert read(source) == wanted


@pytest.mark.parametrize("layout", ["", "vllm", "python", "lib/python3.11/site-packages"])
def test_where_the_engine_may_lie(tool: Tool, source: Path, layout: str, tmp_path: Path) -> None:
    """The folder that holds it, the package, a checkout with a python folder, an environment."""
    target = source / layout if layout == "vllm" else source
    if layout not in ("", "vllm"):
        target = tmp_path / "tree"
        (target / layout).parent.mkdir(parents=True)
        source.rename(target / layout)
        source = target / layout
    assert tool(target=target)[0] == 0
    assert read(source) == PATCHED


def test_no_engine_there(tool: Tool, tmp_path: Path) -> None:
    code, said = tool(target=tmp_path)
    assert (code, "no vllm package there" in said) == (1, True)


def test_the_engine_of_this_python(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = type("Spec", (), {"submodule_search_locations": [str(source / "vllm")]})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert apply_patches.main(["vllm"]) == 0
    assert read(source) == PATCHED
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert apply_patches.main(["vllm"]) == 1
    assert "--target" in capsys.readouterr().err


def test_a_build_label_is_no_other_version(tool: Tool, source: Path) -> None:
    set_version(source, VERSION + "+cu130")
    code, said = tool()
    assert (code, "another version" in said) == (0, False)


def test_a_checkout_without_a_version(tool: Tool, source: Path) -> None:
    """Its files' hashes say what it is."""
    (source / "vllm" / "version.py").unlink()
    code, said = tool()
    assert (code, "no version recorded" in said) == (0, True)
    assert "another version" not in said
    assert tool("--revert")[0] == 0
    (source / "vllm" / "one.py").write_bytes(b"first\n" + FILES["vllm/one.py"].encode())
    code, said = tool()
    assert (code, f"--use {VERSION} applies them" in said) == (1, True)


def test_another_version_where_the_patches_fit(tool: Tool, source: Path) -> None:
    """`--check` says so; they go in only by name, and come out by themselves."""
    original = set_version(source, "1.2.9")
    original["vllm/one.py"] = "new = 1\n" + FILES["vllm/one.py"]
    (source / "vllm" / "one.py").write_bytes(original["vllm/one.py"].encode())
    code, said = tool("--check")
    assert (code, f"can be applied (with --use {VERSION})" in said) == (0, True)
    code, said = tool()
    assert (code, f"--use {VERSION} applies them" in said) == (1, True)
    assert read(source) == original
    assert tool("--use", VERSION)[0] == 0
    one = {"vllm/one.py": "new = 1\n" + PATCHED["vllm/one.py"]}
    assert read(source) == {**PATCHED, "vllm/version.py": original["vllm/version.py"], **one}
    assert tool("--status")[0] == 0
    assert tool("--revert")[0] == 0
    assert read(source) == original


def test_another_version_where_they_do_not_fit(tool: Tool, source: Path) -> None:
    set_version(source, "2.0.0")
    (source / "vllm" / "one.py").write_text("all = 'new'\n")
    before = read(source)
    for options in ((), ("--check",), ("--use", VERSION), ("--revert",)):
        code, said = tool(*options)
        assert (code, "no patches for this version" in said) == (1, True)
        assert f"vllm/one.py: those for {VERSION} do not fit" in said
        assert "two.py" not in said
        assert "patches/README.md" in said
    assert read(source) == before


def test_the_nearest_version_is_taken(tool: Tool, source: Path) -> None:
    folder = apply_patches.PATCHES / "vllm"
    for version in ("0.9.0", "1.2.10", "1.3.0", "2.2.3"):
        fake_engine.write_patches(folder / version, source)
    for version, nearest in [("1.2.8", "1.2.10"), ("1.9.0", "1.3.0"), ("0.1.0", "0.9.0")]:
        set_version(source, version)
        assert f"with --use {nearest}" in tool("--check")[1]


def test_patches_that_nobody_has(tool: Tool) -> None:
    code, said = tool("--use", "9.9.9")
    assert (code, f"there are patches for: {VERSION}" in said) == (1, True)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "0002-second.patch").unlink(), "name different files"),
        (
            lambda folder: (folder / "0002-twice.patch").write_text("x"),
            "expected a name like 0003-what.patch",
        ),
        (
            lambda folder: (folder / "second.patch").write_text("x"),
            "expected a name like 0003-what.patch",
        ),
        (lambda folder: (folder / "0003-third.patch").write_text("x"), "expected '--- a/PATH'"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json"),
        (
            lambda folder: (folder / "manifest.json").write_text(
                (folder / "manifest.json").read_text().replace('"after": "', '"after": "0')
            ),
            "another hash",
        ),
    ],
)
def test_a_broken_patch_set(
    tool: Tool, source: Path, break_it: Callable[[Path], object], message: str
) -> None:
    break_it(apply_patches.PATCHES / "vllm" / VERSION)
    code, said = tool()
    assert (code, message in said) == (1, True)
    assert read(source) == FILES


def test_a_manifest_is_written_from_an_unpatched_source(tool: Tool, source: Path) -> None:
    manifest = apply_patches.PATCHES / "vllm" / VERSION / "manifest.json"
    before = json.loads(manifest.read_text())
    manifest.unlink()
    assert tool("--write-manifest", VERSION)[0] == 0
    assert json.loads(manifest.read_text()) == before
    tool()
    code, said = tool("--write-manifest", VERSION)
    assert (code, "does not fit" in said) == (1, True)
    assert json.loads(manifest.read_text()) == before


def test_help_needs_no_package() -> None:
    """On any Python: nothing but the standard library."""
    command = [sys.executable, "-E", "-S", apply_patches.__file__, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
    assert shown.startswith("usage: python scripts/apply_patches.py [-h]")
    for word in ("--target", "--check", "--revert", "--status", "--use", "exit status"):
        assert word in shown


@pytest.fixture
def wheel(source: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a copy of the tool that is laid out as in the wheel."""
    installed = tmp_path / "installed"
    package = installed / "delta_patches"
    shutil.copytree(apply_patches.PATCHES, package / "patches")
    shutil.copy(apply_patches.__file__, package / "__main__.py")
    (installed / "patches").mkdir()  # another project's package

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-m", "delta_patches", *arguments]
        env = {**os.environ, "PYTHONPATH": str(installed)}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    return run


@pytest.mark.slow
def test_installed_from_the_wheel(
    wheel: Callable[..., subprocess.CompletedProcess[str]], source: Path, tmp_path: Path
) -> None:
    """It takes the patches next to it."""
    target = ("vllm", "--target", str(source))
    done = wheel(*target)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"patches: {tmp_path}/installed/delta_patches/patches/vllm/{VERSION}\n" in done.stdout
    assert read(source) == PATCHED
    assert wheel(*target, "--status").returncode == 0
    assert wheel(*target, "--revert").returncode == 0
    assert read(source) == FILES
    set_version(source, "9.0.0")
    (source / "vllm" / "one.py").unlink()
    assert f"{tmp_path}/installed/delta_patches/patches/README.md says how" in wheel(*target).stderr


def test_the_help_of_the_wheel_names_its_command(
    wheel: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    shown = wheel("--help").stdout
    assert shown.startswith("usage: python -m delta_patches [-h]")
    assert "    python -m delta_patches vllm --status\n" in shown
    assert "apply_patches.py" not in shown


SETS = sorted(file.parent for file in apply_patches.PATCHES.glob("*/*/manifest.json"))


@pytest.mark.parametrize("folder", SETS, ids=str)
def test_the_patches_of_this_project(folder: Path, tmp_path: Path) -> None:
    """They are read, agree with their manifest, add more than they quote, and touch one engine."""
    patches = PatchSet(folder, tmp_path, by_hash=True)
    assert set(patches.states.values()) == {State.FOREIGN}
    for files in patches.patches.values():
        for path, hunks in files.items():
            assert path.startswith(f"{folder.parent.name}/")
            for hunk in hunks:
                old, new = set(hunk.old.splitlines()), set(hunk.new.splitlines())
                assert len(old & new) <= 4
                assert len(old - new) <= 1


@pytest.mark.parametrize("file", sorted(apply_patches.PATCHES.rglob("*.patch")), ids=str)
def test_the_patches_call_what_is_there(file: Path) -> None:
    engine = file.relative_to(apply_patches.PATCHES).parts[0]
    hooks = importlib.import_module(f"engine_ext.adapters.{engine}.hooks")
    added = [line for line in file.read_text().splitlines() if line.startswith("+")]
    imports = [line for line in added if "engine_ext" in line]
    assert set(imports) <= {f"+from {hooks.__package__} import hooks as {NAME}"}
    for name in re.findall(rf"{NAME}\.(\w+)\(", "\n".join(added)):
        assert callable(getattr(hooks, name))


def message_of(file: Path) -> str:
    return file.read_text().partition("\n--- a/")[0]


def messages(folder: Path) -> list[str]:
    return [message_of(file) for file in sorted(folder.glob("*.patch"))]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_patch_has_commit_message(engine: str) -> None:
    found = messages(apply_patches.PATCHES / engine)
    assert found
    for number, message in enumerate(found, 1):
        subject, blank, *body = message.splitlines()
        match = re.fullmatch(r"Subject: \[PATCH (\d+)/(\d+)\] ([A-Z][a-z]+ .+[^.])", subject)
        assert match is not None, subject
        assert (int(match[1]), int(match[2])) == (number, len(found))
        assert len(match[3]) <= 72
        assert not blank
        assert max(map(len, body)) <= 80
        assert "Signed-off-by" not in message


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_versions_have_one_series(engine: str) -> None:
    """The cover letter names each patch, and the files outside of the sets."""
    letter = (apply_patches.PATCHES / engine / "0000-cover-letter.md").read_text()
    folder = apply_patches.PATCHES / engine
    first, names = messages(folder), [file.name for file in sorted(folder.glob("*.patch"))]
    assert first
    for own in [version for version in SETS if version.parent == folder]:
        series = dict(zip(names, first, strict=True))
        assert series == {**series, **{f.name: message_of(f) for f in own.glob("*.patch")}}
    for message in first:
        assert message.splitlines()[0].partition("] ")[2] in letter
    for file in (apply_patches.PATCHES / engine).rglob("test_*.py"):
        assert str(file.relative_to(apply_patches.PATCHES / engine)) in letter
    for part in ("Motivation", "Patches", "Left to the package", "Testing", "Alternatives"):
        assert f"\n## {part}\n" in letter


def test_the_patches_are_listed_in_their_readme() -> None:
    text = (apply_patches.PATCHES / "README.md").read_text()
    for file in apply_patches.PATCHES.rglob("*.patch"):
        assert file.name in text
