"""Bundle vLLM for CUDA with what it needs, for a GPU host without network.

``make gpu-bundle`` runs it.
The host has Python with what ``docs/gpu.md`` lists, and no engine. ``requirements/gpu-vllm.txt``
lists what it lacks: wheels of the package index for that Python. Device code of other GPUs is
blanked, and what the rows do not use is left out. The product does not travel in the bundle but as
the checkout that ``python -m scripts.gpu`` runs in.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from engine_ext.resources import usable_cores
from scripts.gpu.bundle import device_code, pieces

_REQUIREMENTS: Final = Path(__file__).resolve().parents[3] / "requirements" / "gpu-vllm.txt"
_PLATFORMS: Final = ("2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_5")

# Patterns of paths that no row needs.
_LEFT_OUT: Final = (
    "vllm/vllm-rs",
    "vllm/third_party/fmha_sm100",
    "vllm/third_party/deep_gemm",  # needs symbols that torch 2.11 lacks, as qutlass does
    "vllm/**/*deep_gemm*.so",
    "vllm/**/*qutlass*.so",
    "vllm/**/*deepselect*.so",
    "vllm/**/*flashkda*.so",
    "vllm/vllm_flash_attn/_vllm_fa2_C*.so",  # 65 MB; FlashAttention 3 serves on Hopper
    "vllm/**/swagger-ui*",
    "vllm/benchmarks",
    "vllm/model_executor/layers/**/configs/*.json",  # tuned sizes of kernels; there are defaults
    "**/__pycache__",
    "**/*.pyi",
    "bin",
    "mistral_common/data/*",
    "tvm_ffi/3rdparty/libbacktrace",
    "vllm/kernels/helion/configs",
    "zstandard/_cffi*",
    "cryptography",
    "cryptography-*",
    "outlines_core",
    "outlines_core-*",
    "anthropic/types",
    "anthropic/resources",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a bundle; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.bundle", description=__doc__)
    parser.add_argument("--vllm", metavar="VERSION", help="other than the one in the list")
    parser.add_argument("--python", default="3.12", help="of the GPU host (%(default)s)")
    parser.add_argument("--arch", type=int, default=90, help="90: H100 and H200 (%(default)s)")
    parser.add_argument("--into", type=Path, default=Path("build/gpu-vllm"), help="(%(default)s)")
    parser.add_argument(
        "--wheel",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a wheel that is here already, instead of the one in the list; repeatable",
    )
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gpu-bundle-") as folder:
        site = Path(folder) / "site"
        _install(wanted(chosen.vllm, chosen.wheel), chosen.python, site)
        thin(site, chosen.arch)
        made = pieces.pack(site, chosen.into, threads=usable_cores())
    for piece in made:
        print(f"{piece.stat().st_size / 1e6:8.1f} MB  {piece}")
    print(f"{sum(piece.stat().st_size for piece in made) / 1e6:8.1f} MB")
    return 0


def thin(site: Path, arch: int) -> None:
    """Remove what the rows do not use, and the device code of other GPUs than `arch`.

    Raises:
        SystemExit: a library that stays needs one that is removed.
    """
    before = {library.name for library in site.rglob("*.so")}
    for pattern in _LEFT_OUT:
        for path in [*site.glob(pattern)]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    debugged = [*site.glob("zstandard/*.so")]  # ten times as large as what runs
    if debugged and shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", *map(str, debugged)], check=True)
    libraries = sorted(site.rglob("*.so"))
    removed = before.difference(library.name for library in libraries)
    for library in libraries:
        named = library.read_bytes()
        if needed := [name for name in sorted(removed) if name.encode() + b"\0" in named]:
            raise SystemExit(f"{library.relative_to(site)} needs {needed}, which are left out")
        if blanked := device_code.blank(library, arch):
            print(f"{library.relative_to(site)}: {blanked / 1e6:.0f} MB blanked", flush=True)


def wanted(vllm: str | None, wheels: Sequence[Path]) -> list[str]:
    """Return what to install: the list, with another version of vLLM and wheels that are here."""
    listed = _REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    if vllm is not None:
        listed = [f"vllm=={vllm}" if line.startswith("vllm==") else line for line in listed]
    own = {_normal(wheel.name.partition("-")[0]) for wheel in wheels}
    rest = [line for line in listed if line and not line.startswith("#")]
    return [*map(str, wheels), *(o for o in rest if _normal(o.partition("==")[0]) not in own)]


def _install(wheels: Sequence[str], python: str, site: Path) -> None:
    """Install wheels for another Python; raises CalledProcessError if one cannot be had."""
    platforms = [f"--platform=manylinux_{one}_x86_64" for one in _PLATFORMS]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms),
        *("--disable-pip-version-check", "--target", str(site), *wheels),
    ]
    subprocess.run(command, check=True)


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


if __name__ == "__main__":
    sys.exit(main())
