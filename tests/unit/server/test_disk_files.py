"""The files of a disk request: which are found, which are opened, and what can be swapped."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delta_server.request_options import DiskRequest
from delta_server.sources import disk_files as files
from delta_server.sources.disk_files import open_file, resolve_files
from engine_ext.errors import DeltaError, MalformedPart, PathForbidden, TooLarge
from engine_ext.format import Limits
from tests.support.delta_bodies import delta_part
from tests.support.descriptors import open_descriptors
from tests.support.endpoint_rig import DELTA, FROM_DISK, Rig, assert_error

# Which files ---------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder next to the root, whose name starts with the root's."""
    folder = Path(os.path.realpath(tmp_path)) / "root-of-another"
    folder.mkdir()
    (folder / "a.safetensors").touch()
    return folder


def resolve(folder: Path | str, files: list[str] | None, *roots: Path) -> list[Path]:
    return resolve_files(DiskRequest(model_path=str(folder), files=files), [str(r) for r in roots])


def test_named_files(root: Path) -> None:
    (root / "step").mkdir()
    assert resolve(root, ["b", "a", "step/c"], root) == [root / "b", root / "a", root / "step/c"]


def test_a_path_may_leave_its_folder_within_the_root(root: Path) -> None:
    (root / "step").mkdir()
    assert resolve(root / "step", ["../a"], root) == [root / "a"]
    assert resolve(root / "step", [str(root / "b")], root) == [root / "b"]


def test_without_names_all_safetensors_in_order(root: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "readme.txt", "c.safetensors.sig"):
        (root / name).touch()
    assert resolve(root, None, root) == [root / "a.safetensors", root / "b.safetensors"]


def test_several_roots(root: Path, outside: Path) -> None:
    assert resolve(outside, ["a"], root, outside) == [outside / "a"]


@pytest.mark.parametrize("files", [None, [], ["a"]])
def test_without_a_root_nothing_is_served(root: Path, files: list[str] | None) -> None:
    with pytest.raises(PathForbidden, match="no --delta-root"):
        resolve(root, files)


@pytest.mark.parametrize(
    ("folder", "files"),
    [
        ("../root-of-another", None),
        ("../root-of-another", ["a.safetensors"]),
        (".", ["../root-of-another/a.safetensors"]),
        (".", ["a", "../root-of-another/a.safetensors"]),
        (".", ["/etc/passwd"]),
        (".", [".."]),
        ("..", None),
        ("..", ["root/a"]),
        ("link-to-folder", None),
        ("link-to-folder", ["a.safetensors"]),
        (".", ["link-to-folder/a.safetensors"]),
        (".", ["link-to-file.safetensors"]),
        (".", None),
    ],
)
def test_nothing_outside_the_root_is_served(
    root: Path, outside: Path, folder: str, files: list[str] | None
) -> None:
    (root / "link-to-folder").symlink_to(outside)
    (root / "link-to-file.safetensors").symlink_to(outside / "a.safetensors")
    with pytest.raises(PathForbidden) as caught:
        resolve(root / folder, files, root)
    assert str(outside) not in caught.value.message


def test_links_within_the_root_are_followed(root: Path) -> None:
    (root / "a.safetensors").touch()
    (root / "latest.safetensors").symlink_to("a.safetensors")
    assert resolve(root, ["latest.safetensors"], root) == [root / "a.safetensors"]


def test_a_relative_folder_is_below_the_working_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    assert resolve("", ["a"], root) == [root / "a"]
    with pytest.raises(PathForbidden):
        resolve("..", ["a"], root)


@pytest.mark.parametrize(
    ("folder", "files"),
    [
        (".", []),
        ("empty", None),
        ("absent", None),
        (".", ["a", "a"]),
        (".", ["a\0b"]),
        ("a\0b", ["a"]),
    ],
)
def test_what_names_no_files(root: Path, folder: str, files: list[str] | None) -> None:
    (root / "empty").mkdir()
    with pytest.raises(MalformedPart):
        resolve(f"{root}/{folder}", files, root)


def test_a_request_has_no_more_files_than_a_sync_has_parts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files._MAX_FILES == Limits().max_parts == 1 << 16
    monkeypatch.setattr(files, "_MAX_FILES", 20)
    names = [str(number) for number in range(21)]
    assert len(resolve(root, names[1:], root)) == 20
    with pytest.raises(TooLarge) as caught:
        resolve(root, names, root)
    assert caught.value.operands == {"limit": 20}


def test_a_loop_of_links_does_not_hang(root: Path) -> None:
    (root / "one").symlink_to("two")
    (root / "two").symlink_to("one")
    with pytest.raises(DeltaError):
        resolve(root / "one", None, root)


# Opening them --------------------------------------------------------------------------------


def _directory(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("make", [_directory, os.mkfifo, _socket, lambda path: None])
def test_what_is_no_regular_file_is_refused_at_once(root: Path, make: Any) -> None:
    source = root / "part"
    make(source)
    with pytest.raises(MalformedPart) as caught:
        open_file(source, [str(root)])
    assert caught.value.operands == {"file": "part"}
    assert str(root) not in caught.value.message


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/full"])
def test_devices_are_refused_at_once(device: str) -> None:
    with pytest.raises(MalformedPart, match="not a regular file"):
        open_file(Path(device), ["/dev"])


def test_what_is_opened_is_read_from_its_start(root: Path) -> None:
    (root / "step").mkdir()
    (root / "step" / "a").write_bytes(b"bytes")
    with open_file(root / "step" / "a", [str(root)]) as file:
        assert file.read() == b"bytes"
        assert not os.get_inheritable(file.fileno())


@pytest.mark.slow
def test_no_descriptor_is_left(root: Path) -> None:
    (root / "one" / "two").mkdir(parents=True)
    (root / "one" / "two" / "a").touch()
    (root / "link").symlink_to(root / "one")
    before = open_descriptors()
    open_file(root / "one" / "two" / "a", [str(root)]).close()
    for path in ("one/two", "one/absent/a", "one/two/a/b", "link/two/a", "link"):
        with pytest.raises(DeltaError):
            open_file(root / path, [str(root)])
    with pytest.raises(MalformedPart):
        resolve(root / "one", None, root)
    assert open_descriptors() <= before


def test_nothing_outside_is_opened(root: Path, outside: Path) -> None:
    with pytest.raises(PathForbidden):
        open_file(outside / "a.safetensors", [str(root)])


Swap = Callable[[Path, Path], None]


def _link_to_file(root: Path, outside: Path) -> None:
    (root / "step" / "a.safetensors").unlink()
    (root / "step" / "a.safetensors").symlink_to(outside / "a.safetensors")


def _link_to_folder(root: Path, outside: Path) -> None:
    (root / "step").rename(root / "gone")
    (root / "step").symlink_to(outside)


@pytest.mark.parametrize("swap", [_link_to_file, _link_to_folder])
@pytest.mark.parametrize("named", [["a.safetensors"], None], ids=["named", "all"])
def test_a_link_that_is_swapped_in_is_not_followed(
    disk_rig: Rig,
    root: Path,
    outside: Path,
    monkeypatch: pytest.MonkeyPatch,
    swap: Swap,
    named: list[str] | None,
) -> None:
    """Between the check of a path and its opening."""
    (root / "step").mkdir()
    for folder in (root / "step", outside):
        (folder / "a.safetensors").write_bytes(delta_part())
    swapped: list[Any] = []
    walk = files._open_below

    def open_below(path: Path, roots: Any, flags: int) -> int:
        if path.suffix and not swapped:
            swapped.append(path)
            swap(root, outside)
        return walk(path, roots, flags)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_open_below", open_below)
        response = disk_rig.disk(root / "step", *(named or []), path=DELTA)
    assert swapped == [root / "step" / "a.safetensors"]
    assert_error(response, 403, "PathForbidden")
    assert str(outside) not in response.text
    disk_rig.assert_untouched()


def test_a_folder_that_is_swapped_is_not_listed(
    root: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "step").mkdir()
    walk = files._open_below

    def open_below(path: Path, roots: Any, flags: int) -> int:
        _link_to_folder(root, outside)
        return walk(path, roots, flags)

    monkeypatch.setattr(files, "_open_below", open_below)
    with pytest.raises(PathForbidden):
        resolve(root / "step", None, root)


# By HTTP -------------------------------------------------------------------------------------


def _nothing(root: Path, outside: Path) -> None:
    pass


def _link(name: str, target: str) -> Swap:
    """Puts a link below the root; OUTSIDE in the target is the path of that folder."""

    def make(root: Path, outside: Path) -> None:
        (root / name).symlink_to(target.replace("OUTSIDE", str(outside)))

    return make


def _links_of_links(root: Path, outside: Path) -> None:
    (root / "l").symlink_to("m")
    (root / "m").symlink_to(outside / "a.safetensors")


def _made(name: str, make: Callable[[Path], object]) -> Swap:
    def there(root: Path, outside: Path) -> None:
        make(root / name)

    return there


# The content of the root, the requested folder and files, and the answer. OUTSIDE has a good part,
# a.safetensors; without files, the request is for all of the folder.
GOOD = "a.safetensors"
HOSTILE: dict[str, tuple[Swap, str, list[str], int]] = {
    "a folder above": (_nothing, "..", [f"root-of-another/{GOOD}"], 403),
    "all of a folder above": (_nothing, "../root-of-another", [], 403),
    "a file above": (_nothing, ".", [f"../root-of-another/{GOOD}"], 403),
    "above and down": (_made("x", Path.mkdir), "x/../..", [f"root-of-another/{GOOD}"], 403),
    "an absolute folder": (_nothing, "OUTSIDE", [GOOD], 403),
    "an absolute file": (_nothing, ".", [f"OUTSIDE/{GOOD}"], 403),
    "an absolute device": (_nothing, ".", ["/dev/zero"], 403),
    "a folder of devices": (_nothing, "/", ["dev/zero"], 403),
    "the process": (_nothing, "/proc/self", ["environ"], 403),
    "a link to a file": (_link("l", f"OUTSIDE/{GOOD}"), ".", ["l"], 403),
    "a link to a file among all": (_link("l.safetensors", f"OUTSIDE/{GOOD}"), ".", [], 403),
    "a link to a folder": (_link("l", "OUTSIDE"), "l", [GOOD], 403),
    "a relative link": (_link("l", "../root-of-another"), ".", [f"l/{GOOD}"], 403),
    "links of links": (_links_of_links, ".", ["l"], 403),
    "a link to a device": (_link("l", "/dev/zero"), ".", ["l"], 403),
    "a link to itself": (_link("l", "l"), ".", ["l"], 403),
    "a link to nothing": (_link("l", "gone"), ".", ["l"], 400),
    "a fifo": (_made("f", os.mkfifo), ".", ["f"], 400),
    "a socket": (_made("s", _socket), ".", ["s"], 400),
    "a folder as a file": (_made("d", Path.mkdir), ".", ["d"], 400),
    "the folder itself": (_nothing, ".", ["."], 400),
    "a file as a folder": (_made("f", Path.touch), "f", [GOOD], 400),
    "nothing there": (_nothing, ".", [GOOD], 400),
    "a name too long": (_nothing, ".", ["a" * 5000], 400),
    "a path too long": (_nothing, ".", ["a/" * 2100], 400),
    "a NUL": (_nothing, ".", ["a\0.safetensors"], 400),
    "no Unicode": (_nothing, ".", ["\ud800.safetensors"], 400),
    "a folder of no Unicode": (_nothing, "\udcff\ud800", ["a"], 400),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_paths(disk_rig: Rig, root: Path, outside: Path, case: str) -> None:
    """Refused at once, alone and next to a good file, without a word about what is outside."""
    make, folder, names, status = HOSTILE[case]
    for path in (outside / GOOD, root / "good"):
        path.write_bytes(delta_part())
    make(root, outside)
    folder = os.path.join(str(root), folder.replace("OUTSIDE", str(outside)))
    body: dict[str, Any] = {"model_path": folder, "load_format": "delta"}
    names = [name.replace("OUTSIDE", str(outside)) for name in names]
    bodies = [{**body, "files": [*good, *names]} for good in ([], [str(root / "good")])]
    # Lone surrogates as JSON writes them.
    headers = {"Content-Type": "application/json"}
    for route, asked in itertools.product((DELTA, FROM_DISK), bodies if names else [body]):
        response = disk_rig.post(route, content=json.dumps(asked), headers=headers)
        assert_error(response, status, "PathForbidden" if status == 403 else "MalformedPart")
        assert str(outside) not in response.text
    disk_rig.assert_untouched()
