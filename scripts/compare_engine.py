"""List every name of an engine that this package uses, and what became of it in another release.

    python -m scripts.compare_engine OLD NEW

OLD and NEW are wheels of vLLM or SGLang, or folders that hold the unpacked package. Nothing of them
is imported. A name is used if it is imported, patched, subclassed, read from an imported module or
class, or named in a string such as ``vllm.v1.worker.gpu_worker:Worker``. The exit status is 1 if a
name is gone.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ("engine_ext/adapters", "server", "trainer", "scripts/live_engine")
ENGINES: Final = ("vllm", "sglang")
_NAMED: Final = re.compile(rf"({'|'.join(ENGINES)})((?:\.\w+)+)(?::([\w.]+))?")
_MOST_STEPS: Final = 6  # from a name to where it is defined, over modules that import it
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
# From what breaks to what is only worth reading.
ORDER: Final = ("gone", "signature", "members", "moved", "body", "same")


@dataclass(frozen=True, order=True, slots=True)
class Use:
    """One name of an engine, and where this package uses it.

    Attributes:
        module: Dotted name of the engine's module.
        path: Name in the module, dotted inside of a class; "" for the module itself.
        place: File and line.
        how: ``imported``, ``patched``, ``subclassed`` or ``named``.
    """

    module: str
    path: str
    place: str
    how: str


@dataclass(frozen=True, slots=True)
class Found:
    """A definition: the module that has it, and its syntax tree."""

    module: str
    node: ast.AST


class Package:
    """The sources of one release.

    Args:
        location: A wheel, or a folder that has the package's folder in it.

    Raises:
        FileNotFoundError: There is no engine in it.
    """

    def __init__(self, location: Path) -> None:
        self._texts: Mapping[str, str] = dict(_read(location))
        if not self._texts:
            raise FileNotFoundError(f"{location}: no vllm or sglang in it")
        self._trees: dict[str, ast.Module] = {}

    @property
    def engine(self) -> str:
        """Which of `ENGINES` it is."""
        return next(iter(self._texts)).partition("/")[0]

    def tree(self, module: str) -> ast.Module | None:
        """Return the syntax tree of a module, or None if there is no such module."""
        if module not in self._trees:
            stem = module.replace(".", "/")
            text = self._texts.get(f"{stem}.py", self._texts.get(f"{stem}/__init__.py"))
            if text is None:
                return None
            self._trees[module] = ast.parse(text)
        return self._trees[module]

    def find(self, module: str, path: str) -> Found | None:
        """Return the definition of a name; None if the module has no such name."""
        if not path:
            return None if (tree := self.tree(module)) is None else Found(module, tree)
        first, _, rest = path.partition(".")
        found = self._in_module(module, first, _MOST_STEPS)
        for name in filter(None, rest.split(".")):
            found = None if found is None else self._in_class(found, name, _MOST_STEPS)
        return found

    def _in_module(self, module: str, name: str, steps: int) -> Found | None:
        if not steps:
            return None
        # A folder without ``__init__.py`` has modules all the same.
        tree = self.tree(module) or ast.Module([], [])
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = self._source(module, node)
                        submodule = f"{source}.{alias.name}"
                        there = self._in_module(source, alias.name, steps - 1)
                        return there or self.find(submodule, "")
            elif _defines(node, name):
                return Found(module, node)
        if (inner := self.find(f"{module}.{name}", "")) is not None:
            return inner
        # Modules that import lazily have their names as strings.
        lazy = any(isinstance(n, ast.Constant) and n.value == name for n in ast.walk(tree))
        return Found(module, ast.Constant(name)) if lazy and _is_lazy(tree) else None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._texts
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *filter(None, [node.module])])

    def _in_class(self, found: Found, name: str, steps: int) -> Found | None:
        node = found.node
        if isinstance(node, ast.Module):
            return self._in_module(found.module, name, steps)
        if not isinstance(node, ast.ClassDef):  # an object: its class is not looked up
            return None if isinstance(node, _FUNCTIONS) else found
        if not steps:
            return None
        for inner in ast.walk(node):
            is_set = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
            if _defines(inner, name) or (is_set and getattr(inner, "attr", None) == name):
                return Found(found.module, inner)
        for base in node.bases:
            inherited = self.find(found.module, ast.unparse(base).partition("[")[0])
            if inherited is not None and (there := self._in_class(inherited, name, steps - 1)):
                return there
        return None


def _read(location: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and text of an engine's modules."""

    def wanted(name: str) -> bool:
        return name.endswith(".py") and name.partition("/")[0] in ENGINES

    if location.is_dir():
        for path in sorted(location.rglob("*.py")):
            name = path.relative_to(location).as_posix()
            if wanted(name):
                yield name, path.read_text(encoding="utf-8")
        return
    with zipfile.ZipFile(location) as wheel:
        for name in filter(wanted, wheel.namelist()):
            yield name, wheel.read(name).decode()


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, with those inside of ``if``, ``try`` and ``with``."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(one, ast.Name) and one.id == name for one in targets)


def _is_lazy(tree: ast.Module) -> bool:
    return any(_defines(node, "__getattr__") for node in tree.body) or any(
        _defines(node, "environment_variables") for node in tree.body
    )


# What this package uses -----------------------------------------------------------------------


def uses_of(engine: str, root: Path = ROOT) -> list[Use]:
    """Return every use of an engine's names in the sources below `root`, without repetition."""
    found: dict[tuple[str, str], Use] = {}
    files = (file for folder in SOURCES for file in sorted((root / folder).rglob("*.py")))
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        place = file.relative_to(root).as_posix()
        for use in _uses_in(tree, engine, place):
            known = found.get((use.module, use.path))
            if known is None or known.how == "imported":
                found[use.module, use.path] = use
    return sorted(found.values())


def _uses_in(tree: ast.Module, engine: str, file: str) -> Iterator[Use]:
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        place = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] == engine:
                for alias in node.names:
                    imported[alias.asname or alias.name] = module, alias.name
                    yield Use(module, alias.name, place, "imported")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == engine:
                    imported[alias.asname or alias.name.partition(".")[0]] = alias.name, ""
                    yield Use(alias.name, "", place, "imported")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = _NAMED.fullmatch(node.value)
            if named is not None and named[1] == engine:
                yield Use(f"{engine}{named[2]}", named[3] or "", place, "named")
    yield from _uses_of_imported(tree, imported, file)


def _uses_of_imported(
    tree: ast.Module, imported: Mapping[str, tuple[str, str]], file: str
) -> Iterator[Use]:
    """Yield attributes of what a file has imported, read, set, or named as a string."""

    def use(owner: ast.expr, attribute: str, how: str) -> Iterator[Use]:
        name, _, more = ast.unparse(owner).partition(".")
        if name in imported and re.fullmatch(r"[\w.]*", more) and attribute[:2] != "__":
            module, path = imported[name]
            parts = ".".join(filter(None, [path, more, attribute]))
            yield Use(module, parts, f"{file}:{owner.lineno}", how)

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            how = "patched" if isinstance(node.ctx, ast.Store) else "imported"
            yield from use(node.value, node.attr, how)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            owner, name, *_ = node.args
            text = name.value if isinstance(name, ast.Constant) else None
            if isinstance(text, str) and text.isidentifier():
                yield from use(owner, text, "patched")
        elif isinstance(node, ast.ClassDef):
            methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            for base in node.bases:
                for method in methods:
                    yield from use(base, method, "subclassed")


# What became of it ----------------------------------------------------------------------------


def changes(use: Use, old: Package, new: Package) -> str | None:
    """Return one of `ORDER`, with what differs; None if the old release has no such name.

    A name that a subclass adds, or an object gets by other ways than its class, is in no release.
    """
    before = old.find(use.module, use.path)
    if before is None:
        return None
    after = new.find(use.module, use.path)
    if after is None:
        return "gone"
    if isinstance(before.node, ast.Module):
        return "same"
    if (then := _signature(before.node)) != (now := _signature(after.node)):
        return f"signature: {then} -> {now}"
    lost = _members(before.node) - _members(after.node)
    if lost and use.how == "subclassed":
        return f"members: without {', '.join(sorted(lost))}"
    if before.module != after.module:
        return f"moved: to {after.module}"
    if ast.dump(before.node) != ast.dump(after.node):
        return "body"
    return "same"


def _signature(node: ast.AST) -> str:
    if isinstance(node, _FUNCTIONS):
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        return f"{prefix}({ast.unparse(node.args)})"
    if isinstance(node, ast.ClassDef):
        made = next((n for n in node.body if _defines(n, "__init__")), None)
        return "class" if made is None else _signature(made)
    return type(node).__name__


def _members(node: ast.AST) -> frozenset[str]:
    if not isinstance(node, ast.ClassDef):
        return frozenset()
    return frozenset(n.name for n in node.body if isinstance(n, ast.FunctionDef))


def compared(old: Package, new: Package, uses: list[Use]) -> list[tuple[str, Use]]:
    """Return the fate of each use, broken ones first."""
    rows = [(changed, use) for use in uses if (changed := changes(use, old, new)) is not None]
    return sorted(rows, key=lambda row: (ORDER.index(row[0].partition(":")[0]), row[1]))


def main() -> int:
    """Print a line for each name; the names that are as before are counted only."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="a wheel, or a folder")
    parser.add_argument("new", type=Path, metavar="NEW", help="a wheel, or a folder")
    parser.add_argument("--all", action="store_true", help="list names that are as before, too")
    chosen = parser.parse_args()
    old, new = Package(chosen.old), Package(chosen.new)
    if old.engine != new.engine:
        parser.error(f"OLD is {old.engine}, NEW is {new.engine}")
    rows = compared(old, new, uses_of(old.engine))
    for changed, use in rows:
        if changed != "same" or chosen.all:
            name = use.module + (f":{use.path}" if use.path else "")
            print(f"{changed.partition(':')[0]:10} {name}  ({use.how}, {use.place})")
            if detail := changed.partition(": ")[2]:
                print(f"{'':10} {detail}")
    counts = [f"{sum(r[0].partition(':')[0] == kind for r in rows)} {kind}" for kind in ORDER]
    print(f"{len(rows)} names of {old.engine}: {', '.join(counts)}")
    return int(any(changed == "gone" for changed, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
