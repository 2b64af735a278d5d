"""A bundle for a GPU host: what is packed comes out, without other GPUs' code, in small pieces."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import random
import re
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import tomllib

from scripts.gpu import carriers
from scripts.gpu.bundle import __main__ as program
from scripts.gpu.bundle import device_code, pieces
from scripts.gpu.trees import environment

ROOT = Path(__file__).parents[3]
PTX, MACHINE_CODE = 1, 2
EXTRAS = ("server", "sender", "hosts")
BROUGHT = {"torch", "numpy", "safetensors", "rich"}  # by torch and transformers


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """Entries are (kind, architecture, code)."""
    body = b""
    for kind, arch, code in entries:
        head = struct.pack("<HHIQ", kind, 0, 64, len(code))
        head += struct.pack("<IIHHIII", 0, 0, 0, 0, arch, 0, 0)
        body += head.ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(section: bytes, name: bytes = b".nv_fatbin") -> bytes:
    """An ELF file with the section, and one that has the sections' names."""
    names = b"\0" + name + b"\0.shstrtab\0"
    data = bytearray(b"\x7fELF\x02\x01\x01".ljust(64, b"\0"))
    at = {"names": len(data), "section": len(data) + len(names)}
    data += names + section
    headers = len(data)
    for place, offset, size in (
        (0, 0, 0),
        (1, at["section"], len(section)),
        (len(name) + 2, at["names"], len(names)),
    ):
        data += struct.pack("<IIQQQQ", place, 1, 0, 0, offset, size).ljust(64, b"\0")
    struct.pack_into("<Q", data, 0x28, headers)
    struct.pack_into("<HHH", data, 0x3A, 64, 3, 2)
    return bytes(data)


def test_other_gpus_code_is_blanked(tmp_path: Path) -> None:
    file = tmp_path / "kernels.so"
    own, other, ptx = b"nine-zero" * 8, b"eight-ni" * 8, b"assembly" * 8
    first = fat_binary((MACHINE_CODE, 89, other), (MACHINE_CODE, 90, own), (PTX, 90, ptx))
    second = fat_binary((MACHINE_CODE, 89, other), (PTX, 80, b"old" * 8), (PTX, 89, ptx))
    file.write_bytes(library(first + bytes(8) + second))
    assert device_code.blank(file, 90) == 2 * len(other) + len(ptx) + 24
    left = file.read_bytes()
    assert left.count(own) == 1
    assert left.count(ptx) == 1  # what the second has no machine code for
    assert (other in left, b"old" in left) == (False, False)
    assert len(left) == len(library(first + bytes(8) + second))


@pytest.mark.parametrize("data", [b"INPUT(libc.so)", library(b"text", b".text")])
def test_a_library_without_device_code_stays(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "plain.so"
    file.write_bytes(data)
    assert device_code.blank(file, 90) == 0
    assert file.read_bytes() == data


@pytest.mark.slow
def test_pieces_unpack_to_what_was_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_LARGE", 200_000)
    site = tmp_path / "site"
    (site / "package" / "deep").mkdir(parents=True)
    (site / "package" / "a.py").write_text("a = 1\n")
    (site / "package" / "deep" / "empty").touch()
    large = random.Random(0).randbytes(220_000)
    (site / "package" / "kernels.so").write_bytes(large)
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "old.tar.xz.00").write_bytes(b"of an earlier bundle")
    made = pieces.pack(site, tmp_path / "pieces", threads=2, most=100_000)
    assert max(piece.stat().st_size for piece in made) <= 100_000
    assert len(made) == 4  # the large file is a tar file of its own, in three pieces
    assert {*made} == {*(tmp_path / "pieces").iterdir()}
    out = tmp_path / "out"
    assert pieces.unpack(tmp_path / "pieces", out) == 2
    found = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    packed = {p.relative_to(site): p.read_bytes() for p in site.rglob("*") if p.is_file()}
    assert found == packed


def test_a_bundle_with_a_lost_piece_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "a").write_bytes(random.Random(0).randbytes(1000))
    made = pieces.pack(tmp_path / "site", tmp_path, threads=1, most=400)
    made[-1].unlink()
    with pytest.raises(EOFError):
        pieces.unpack(tmp_path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no pieces"):
        pieces.unpack(tmp_path / "site", tmp_path / "out")


def test_a_bundle_leaves_out_what_no_row_uses(tmp_path: Path) -> None:
    kept = ["vllm/_C.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "tvm_ffi/libtesting.so"]
    left_out = ["vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/third_party/deep_gemm/a.py"]
    left_out += ["vllm/model_executor/layers/fused_moe/configs/E=8,N=9.json"]
    for name in (*kept, *left_out, "zmq/a.pyi"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    program.thin(tmp_path, 90)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {*kept}


def test_a_library_that_needs_one_left_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_qutlass_C.abi3.so").touch()
    (tmp_path / "vllm" / "other.so").write_bytes(library(b"\0_qutlass_C.abi3.so\0", b".dynstr"))
    with pytest.raises(SystemExit, match=r"vllm/other.so needs \['_qutlass_C.abi3.so'\]"):
        program.thin(tmp_path, 90)


def test_a_bundle_has_one_vllm() -> None:
    wheel = Path("there/oss_harmony-1-cp312-cp312-linux_x86_64.whl")
    found, usual = program.wanted("0.33.0", [wheel]), program.wanted(None, [])
    assert found[:2] == [str(wheel), "vllm==0.33.0"]
    assert [one for one in usual if one not in found] == [
        *("vllm==0.32.0", next(one for one in usual if one.startswith("oss_harmony=="))),
    ]


def test_unpacking_needs_the_standard_library_alone() -> None:
    """The host has nothing else before it: isolated Python does not even see this environment."""
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import scripts.gpu.trees, sys"
    code += "; assert not {'torch', 'numpy', 'engine_ext'} & set(sys.modules)"
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    subprocess.run([base, "-I", "-S", "-c", code], check=True, timeout=60)


PROGRAMS = {
    ("scripts.gpu", "nonesuch"): "no rows ['nonesuch']",
    ("scripts.gpu.carriers", "--help"): "columns:",
    ("scripts.bench.device_staging", "--help"): "one line of JSON",
}
# Each in a process of its own, which has imported torch, and nothing of the product.
IN_TURN = f"""
import os, runpy, sys, torch
for program in {[*PROGRAMS]}:
    if os.fork() == 0:
        sys.argv = [*program]
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        sys.exit()
    os.wait()
    print("ended", flush=True)
"""


def test_a_plain_checkout_runs_the_programs() -> None:
    """No part of the product is installed: ``-S`` leaves out what an installation adds."""
    run = subprocess.run(
        [sys.executable, "-S", "-c", IN_TURN],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": sysconfig.get_path("purelib")},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=True,
    )
    *outputs, rest = run.stdout.split("ended\n")
    assert rest == ""
    for (ran, shown), output in zip(PROGRAMS.items(), outputs, strict=True):
        assert shown in output, ran


def test_the_engine_of_the_carriers_finds_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[importlib.metadata.EntryPoint] = []

    def measure(*arguments: Any) -> None:
        for folder in os.environ["PYTHONPATH"].split(os.pathsep):
            for one in importlib.metadata.distributions(path=[folder]):
                found.extend(one.entry_points.select(name="delta_updates"))

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(carriers, "measure", measure)
    logger = logging.getLogger("delta_sender")
    level = logger.level
    assert carriers.main([]) == 0
    logger.setLevel(level)
    assert "engine_ext.adapters.vllm.plugin:register" in [one.value for one in found]


def test_a_bundle_has_what_the_product_needs() -> None:
    """The host has the rest; see docs/gpu.md."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [project["dependencies"], *map(project["optional-dependencies"].get, EXTRAS)]
    names = {normal(re.split(r"[<>=]", one)[0]) for group in needed for one in group} | {"psutil"}
    listed = (ROOT / "requirements" / "gpu-vllm.txt").read_text().splitlines()
    assert names - {normal(line.partition("==")[0]) for line in listed} == BROUGHT


@pytest.mark.slow
def test_a_process_can_use_another_tree(tmp_path: Path) -> None:
    """The product and its entry points are the tree's, the programs are this checkout's."""
    other = tmp_path / "other"
    for package in ("engine_ext", "server/delta_server", "trainer/delta_sender", "scripts"):
        (other / package).mkdir(parents=True)
        (other / package / "__init__.py").touch()
    code = (
        "import importlib.metadata, engine_ext, delta_server, delta_sender, scripts.gpu.trees as t;"
        "points = importlib.metadata.entry_points(group='vllm.general_plugins');"
        "print([p.value for p in points if p.name == 'delta_updates']);"
        "print(*(m.__file__ for m in (engine_ext, delta_server, delta_sender, t)), sep='\\n')"
    )
    names = ["engine_ext", "server/delta_server", "trainer/delta_sender"]
    for tree in (None, other):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(tree, tmp_path),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        points, *files = run.stdout.splitlines()
        assert points == "['engine_ext.adapters.vllm.plugin:register']"
        root = ROOT if tree is None else other
        assert [Path(os.path.realpath(f)) for f in files] == [
            *(root / name / "__init__.py" for name in names),
            ROOT / "scripts/gpu/trees.py",
        ]
