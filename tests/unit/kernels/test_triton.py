"""The Triton kernels: what they compute, and that they compile.

The results are tested in a process of its own, because Triton's interpreter must be chosen
before Triton is imported; it needs no accelerator. Where there is one, the same tests run on it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ext.conformance.toy_models.base import DEVICE
from engine_ext.kernels import triton
from engine_ext.kernels.triton import (
    block_sums,
    compact,
    encode_changes,
    gap_expand,
    gather_scatter,
    runs_change_kernels,
    runs_kernels,
    self_test,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# The tests of a GPU leave out what those of the CPU have run.
INTERPRETED = () if DEVICE.type == "cuda" else ("interpreter",)
ON_A_GPU = ("cuda",) if torch.cuda.is_available() else ()
ALONE = ("kernels_alone", "streams_alone")
SANITIZER = shutil.which("compute-sanitizer")
# The conformance suite reads models in host memory.
RUNS = [
    *((place, (*ALONE, "conformance_alone"), "not full") for place in INTERPRETED),
    *((place, (cases,), "not full") for place in ON_A_GPU for cases in ALONE),
    *(
        pytest.param("sanitizer", (cases,), "not full", marks=pytest.mark.full)
        for cases in ALONE
        if ON_A_GPU and SANITIZER
    ),
    pytest.param("interpreter", ("conformance_alone",), "full", marks=pytest.mark.full),
]
BITS = ("*u8", "*i16", "*i32", "*i64")


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("place", "cases", "marked"), RUNS)
def test_the_kernels_do_what_the_host_does(place: str, cases: tuple[str, ...], marked: str) -> None:
    interpreted = place == "interpreter"
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0"}
    environment["DELTA_TEST_DEVICE"] = "cpu" if interpreted else "cuda:0"
    options = "-p", "no:cacheprovider", "-W", "ignore", "-m", marked
    checked: list[str] = []
    if place == "sanitizer":  # an access outside of a tensor must be one outside of any memory
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        checked = [str(SANITIZER), "--error-exitcode", "9"]
    files = [f"tests/unit/kernels/{name}.py" for name in cases]
    run = subprocess.run(
        [*checked, sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200 if checked or interpreted else 480,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert all(f"{name}.py" in run.stdout for name in cases)


def variants() -> list[Any]:
    """Each kernel for one kind of tensors here, and for all kinds in the full run."""
    block, whole = {"BLOCK": 1024}, {"BLOCK": compact.BLOCK}
    expanded = dict.fromkeys(("programs", "items", "before", "rows", "dims"), "*i64")
    expanded["symbols"] = "*u8"
    quick: list[Any] = [
        (gap_expand.sum_symbols, {**expanded, "sums": "*i64"}, block),
        (gap_expand.count_elements, {**expanded, "counts": "*i64"}, block),
    ]
    rest: list[Any] = []
    for bits in BITS:
        own = quick if bits == "*i16" else rest
        for places in ("*i32", "*i64"):
            visited = {"table": "i64", "live_like": bits, "old": "i64", "group": "i32"}
            visited |= {"sums": "*i64", "factors": "*i64"}
            visited |= dict.fromkeys(("keep", "digest", "stored", "write"), "i32")
            wide = {"WIDE": places == "*i64", **block}
            staged = {**expanded, "starts": "*i64", "table": "*i64", "sums": "*i64"}
            staged |= {"values": bits, "old": bits, "offsets": "i64", "new": "i64", "adds": "i32"}
            width = {"WIDTH": 1 << BITS.index(bits)}
            cases: list[Any] = [
                (gather_scatter.visit_elements, visited, {**wide, **width}),
                (gap_expand.stage_elements, staged, {**wide, **width}),
            ]
            (own if places == "*i32" else rest).extend(cases)
        pairs = {"pairs": "*i64", "numbers": "*i64", "like": bits, "counts": "*i32"}
        listed = {"pairs": "*i64", "numbers": "*i64", "ends": "*i32", "base": "i32"}
        listed |= {"listed": "i32", "places": "*i64", "was": bits, "now": bits, "changed": "*i32"}
        for aligned in (True, False):
            shape = {"ALIGNED": aligned, **whole}
            cases = [
                (compact.count_differing, pairs, shape),
                (compact.write_differing, listed, shape),
            ]
            (own if aligned else rest).extend(cases)
        streams = dict.fromkeys(("table", "places", "seeds", "factors", "sums"), "*i64")
        streams |= {"was": bits, "now": bits, "ends": "*i32", "symbols": "*u8"}
        streams |= {"nibbles": "*u8", "escaped": bits, "most": "i32"}
        width = {"WIDTH": 1 << BITS.index(bits), "SKIP": 255, "ESCAPE": 15, **block}
        counted = {"table": "*i64", "places": "*i64", "was": bits, "now": bits, "counts": "*i32"}
        own.append((encode_changes.count_symbols, counted, width))
        own.append((encode_changes.write_symbols, streams, {**width, "DIGEST_BLOCK": 1024}))
        numbers = {"size": "i64", "block": "i64", "lead": "i64"}
        numbers |= dict.fromkeys(("seeds", "table", "sums"), "*i64")
        shape = {"WIDTH": 1 << BITS.index(bits), "ROWS": 32, "ALIGNED": False, **block}
        summed = block_sums.sum_terms, {"values": bits, **numbers}, shape
        own.append(summed)
        rest.append((*summed[:2], {**shape, "ALIGNED": True}))
    marked = [pytest.param(*case, marks=pytest.mark.full) for case in rest]
    return [*(pytest.param(*case) for case in quick), *marked]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # about floats: there are none
@pytest.mark.parametrize(("kernel", "types", "constants"), variants())
@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.full)])
def test_they_compile_for_a_gpu(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To machine code, by Triton's own compiler and assembler, which need no GPU."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert compile_kernel(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_one_compilation_digests_any_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is not aligned must not be compiled for in a pause; one that is loads fast."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel: Any = block_sums.sum_terms
    [values] = [one for one in kernel.params if one.name == "values"]
    assert values.do_not_specialize_on_alignment
    constants = {"WIDTH": 2, "ROWS": 32, "ALIGNED": True, "BLOCK": 1024}
    types = dict.fromkeys(("size", "block", "lead"), "i64") | {"values": "*i16"}
    signature = {
        n: "constexpr" if n in constants else types.get(n, "*i64") for n in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    found = compile_kernel(source, target=GPUTarget("cuda", 80, 32))
    assert "ld.global.v4.b32" in found.asm["ptx"]


@pytest.fixture
def fresh() -> Iterator[None]:
    """No device was tried yet, nor will have been."""
    test: Any = triton._pass_self_test
    test.cache_clear()
    yield
    test.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_only_where_they_were_proven(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[torch.device] = []

    def wrong(where: torch.device) -> list[str]:
        tried.append(where)
        if where.index == 2:
            raise RuntimeError("no compiler")
        return ["decode of 1 byte(s)"] if where.index == 1 else []

    monkeypatch.setitem(self_test.TESTS, "elements", wrong)
    names = ["cuda:0", "cuda:0", "cuda:1", "cuda:2", "cpu", "meta", "xpu"]
    assert [runs_kernels(torch.device(name)) for name in names] == [True, True, *[False] * 5]
    assert tried == [torch.device(name) for name in ("cuda:0", "cuda:1", "cuda:2")]
    tested = {"cuda:0": [], "cuda:1": [], "cuda:3": ["compare of torch.int16"]}
    monkeypatch.setitem(self_test.TESTS, "changes", lambda where: tested[str(where)])
    names = ["cuda:0", "cuda:1", "cuda:3", "cpu"]
    assert [runs_change_kernels(torch.device(name)) for name in names] == [True, *[False] * 3]
    assert "not using Triton kernels on cuda:1" in caplog.text
    assert "RuntimeError: no compiler" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_triton_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not runs_kernels(torch.device("cuda:0"))
