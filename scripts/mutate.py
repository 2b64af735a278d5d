"""Sample mutants of some packages and measure which share of them the unit tests kill.

A mutant is one small change of one function: another comparison, constant, boolean or arithmetic
operator, a negated condition, ``return None``, or a deleted statement. It is written into a scratch
copy of the tree, and tests of the room run there with ``-x``: those named like the module, then the
quick ones of the others.

A mutant is known by the function's qualified name, the kind and the ordinal in that function, so
that a stored sample can be repeated after files have moved:

    python -m scripts.mutate format --json before.json
    python -m scripts.mutate format --repeat before.json --json after.json
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
COPIED: Final = (
    *("engine_ext", "server", "trainer", "scripts", "tests", "docs", "examples", "patches"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"),
)
# By room: the packages that are mutated, and the tests that should notice.
ROOMS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "format": (("engine_ext/format",), ("tests/unit/format",)),
    "sync": (("engine_ext/sync",), ("tests/unit/sync",)),
}
_COMPARES: Final[dict[type, type]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: Final[dict[type, type]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One change of one function; `file` is where it was found, as a hint only."""

    function: str
    kind: str
    ordinal: int
    file: str


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every function and method with its qualified name; not the ones inside of functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{prefix}{node.name}.")
        elif isinstance(node, _FUNCTIONS):
            yield prefix + node.name, node


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind, place) of each change that a function allows, in the order of the source."""
    for one in ast.walk(node):
        if isinstance(one, ast.Compare) and type(one.ops[0]) in _COMPARES:
            yield "compare", one
        elif isinstance(one, ast.BoolOp):
            yield "and/or", one
        elif isinstance(one, ast.BinOp | ast.AugAssign) and type(one.op) in _ARITHMETIC:
            yield "arithmetic", one
        elif isinstance(one, ast.If | ast.IfExp | ast.While):
            yield "condition", one
        elif isinstance(one, ast.Constant) and type(one.value) in (int, bool):
            yield "constant", one
        elif isinstance(one, ast.Return) and one.value is not None:
            yield "return", one
        elif _is_deletable(one):
            yield "delete", one


def _is_deletable(node: ast.AST) -> bool:
    """Return whether it is a call, a raise, or an assignment to something other than a name."""
    if isinstance(node, ast.Assign):
        return not isinstance(node.targets[0], ast.Name)
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant | ast.Yield)
    return isinstance(node, ast.Raise)


def change(kind: str, place: Any) -> None:
    """Make a change in the tree."""
    if kind == "compare":
        place.ops[0] = _COMPARES[type(place.ops[0])]()
    elif kind == "and/or":
        place.op = ast.And() if isinstance(place.op, ast.Or) else ast.Or()
    elif kind == "arithmetic":
        place.op = _ARITHMETIC[type(place.op)]()
    elif kind == "condition":
        place.test = ast.UnaryOp(ast.Not(), place.test)
    elif kind == "constant":
        place.value = (not place.value) if isinstance(place.value, bool) else place.value + 1
    elif kind == "return":
        place.value = ast.Constant(None)
    else:  # the node becomes another one in its place
        place.__class__ = ast.Pass
        place._fields = ()


def mutants_of(file: Path, root: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    for name, node in functions_of(ast.parse(file.read_text())):
        seen: dict[str, int] = {}
        for kind, _ in changes(node):
            seen[kind] = seen.get(kind, -1) + 1
            yield Mutant(name, kind, seen[kind], str(file.relative_to(root)))


def mutated(source: str, mutant: Mutant) -> str | None:
    """Return a module's source with the change, or None if it has no such function and place."""
    tree = copy.deepcopy(ast.parse(source))
    for name, node in functions_of(tree):
        if name == mutant.function:
            places = [place for kind, place in changes(node) if kind == mutant.kind]
            if mutant.ordinal < len(places):
                change(mutant.kind, places[mutant.ordinal])
                return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    return None


def find(mutant: Mutant, files: Sequence[Path]) -> Path | None:
    """Return the file that holds the mutant's function now; one of the same name goes first."""
    stem = Path(mutant.file).stem
    for file in sorted(files, key=lambda one: (one.stem != stem, str(one))):
        if mutated(file.read_text(), mutant) is not None:
            return file
    return None


class Scratch:
    """A copy of the tree in which mutants are tested, one at a time.

    Raises:
        ValueError: there is no test in the folders of `tests`.
    """

    def __init__(self, folder: Path, tests: Sequence[str], cpu_s: int) -> None:
        self.folder, self._cpu_s = folder, cpu_s
        skipped = shutil.ignore_patterns("live", "*.pyc")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=skipped)
            else:
                shutil.copy2(source, folder / name)
        self._tests = [f for one in tests for f in sorted((folder / one).rglob("test_*.py"))]
        if not self._tests:
            raise ValueError(f"no tests in {', '.join(tests)}")

    def outcome(self, file: str, source: str | None) -> str:
        """Return ``killed``, ``survived`` or ``limit`` for a module's new source; None: as it is.

        ``limit``: its tests had not ended after the CPU time that they were given.
        """
        target = self.folder / file
        original = target.read_text()
        target.write_text(original if source is None else source)
        try:
            status = self._tested(Path(file).stem)
        finally:
            target.write_text(original)
        if os.WIFSIGNALED(status):
            over = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
            return "limit" if over else "killed"
        return "survived" if os.WEXITSTATUS(status) == 0 else "killed"

    def _tested(self, stem: str) -> int:
        """Run the tests in a fork, which has torch and pytest already; return its wait status."""
        near = [str(one) for one in self._tests if stem and stem in one.stem]
        others = [str(one) for one in self._tests if str(one) not in near]
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os._exit(self._run(near, others))
        deadline = time.monotonic() + 6 * self._cpu_s
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.05)

    def _run(self, near: list[str], others: list[str]) -> int:
        import pytest

        resource.setrlimit(resource.RLIMIT_CPU, (self._cpu_s, self._cpu_s + 5))
        os.chdir(self.folder)
        paths = [str(self.folder / part) for part in (".", "server", "trainer")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        ours = {str(ROOT), str(ROOT / "server"), str(ROOT / "trainer"), ""}
        sys.path[:] = [*paths, *(one for one in sys.path if one not in ours)]
        for name in [n for n in sys.modules if n.partition(".")[0] in ("scripts", "tests")]:
            del sys.modules[name]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        markers = ("not engine and not full", "not slow and not engine and not full")
        runs = [
            [*options, "-m", chosen, *group]
            for chosen, group in zip(markers, (near, others), strict=True)
            if group
        ]
        try:  # a group of slow tests only is no failure
            return int(any(pytest.main(run) % 5 for run in runs))
        except BaseException:
            return 1


def preload() -> None:
    """Import what every run needs of other packages, once."""
    for name in ("pytest", "torch", "numpy", "numba", "hypothesis", "fastapi", "httpx", "msgspec"):
        with contextlib.suppress(ImportError):
            __import__(name)


def chosen_mutants(arguments: argparse.Namespace, packages: Sequence[str]) -> list[Mutant]:
    """Return the stored sample, or a seeded one; whatever runs is a prefix of it."""
    if arguments.repeat:
        stored = json.loads(arguments.repeat.read_text())["mutants"]
        return [
            Mutant(*(m[key] for key in ("function", "kind", "ordinal", "file"))) for m in stored
        ]
    files = [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]
    every = [mutant for file in files for mutant in mutants_of(file, ROOT)]
    random.Random(arguments.seed).shuffle(every)
    return every[: arguments.count]


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="scripts.mutate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("--count", type=int, default=200, help="mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=150, help="CPU seconds for each mutant")
    parser.add_argument("--seconds", type=float, help="start no further mutant after so long")
    parser.add_argument("--repeat", type=Path, help="JSON of an earlier run: its mutants again")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args(given)
    packages, tests = ROOMS[arguments.room]
    preload()
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Scratch(Path(folder), tests, arguments.limit)
        files = [file for one in packages for file in sorted((ROOT / one).rglob("*.py"))]
        if (unchanged := scratch.outcome(str(files[0].relative_to(ROOT)), None)) != "survived":
            print(f"the tests of the unchanged tree: {unchanged}; nothing can be measured")
            return 1
        for mutant in chosen_mutants(arguments, packages):
            if arguments.seconds and time.monotonic() - start > arguments.seconds:
                break
            file = find(mutant, files)
            if file is None:
                outcome = "gone"
            else:
                outcome = scratch.outcome(
                    str(file.relative_to(ROOT)), mutated(file.read_text(), mutant)
                )
            rows.append({**asdict(mutant), "outcome": outcome})
            print(f"{outcome:9}{mutant.file}:{mutant.function} {mutant.kind} {mutant.ordinal}")
            if arguments.json:
                arguments.json.write_text(json.dumps(summary(arguments.room, rows), indent=1))
    print({key: value for key, value in summary(arguments.room, rows).items() if key != "mutants"})
    return 0


def summary(room: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the share that tests kill, of the mutants that there still are, and every row."""
    counts = dict.fromkeys(("killed", "survived", "limit", "gone"), 0)
    for row in rows:
        counts[row["outcome"]] += 1
    judged = len(rows) - counts["gone"]
    share = counts["killed"] / judged if judged else None
    return {"room": room, **counts, "share_killed": share, "mutants": list(rows)}


if __name__ == "__main__":
    sys.exit(main())
