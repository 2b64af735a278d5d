"""Every package names its public interface, and other packages import from it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.parent.name for path in (ROOT / "engine_ext").glob("*/__init__.py"))
PACKAGES = [*(f"engine_ext.{room}" for room in ROOMS), "delta_server", "delta_sender"]
FOLDERS = ("engine_ext", "server/delta_server", "trainer/delta_sender", "scripts")
# Modules that are an interface of their own: structs for both ends of a call, and optional kernels.
OWN = {"engine_ext.ranks.operations", "engine_ext.ranks.status", "engine_ext.kernels.triton"}
# Read as attributes of the package.
AS_ATTRIBUTES = {"removable"}


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of every ``from`` import of a room of `engine_ext`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.count(".") > 0:
            yield from ((node.module, alias.name) for alias in node.names)


def room_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "engine_ext" and len(parts) > 2 else None


@pytest.mark.parametrize("name", PACKAGES)
def test_package_lists_only_names_it_has(name: str) -> None:
    package = importlib.import_module(name)
    assert len((package.__doc__ or "").splitlines()) > 2
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(hasattr(package, exported) for exported in package.__all__)


def test_every_exported_name_has_user_elsewhere() -> None:
    """A name that nothing imports from its package belongs in the module that defines it alone."""
    used = {
        (module, name)
        for folder in (*FOLDERS, "tests")
        for path in (ROOT / folder).rglob("*.py")
        for module, name in imports(path)
        if module != f"engine_ext.{room_of(path)}"
    }
    unused = {
        f"{room}.{name}"
        for room in ROOMS
        for name in importlib.import_module(f"engine_ext.{room}").__all__
        if (f"engine_ext.{room}", name) not in used and name not in AS_ATTRIBUTES
    }
    assert unused == set()


def test_other_rooms_are_imported_through_their_interface() -> None:
    past = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for module, name in imports(path):
                parts = module.split(".")
                if parts[0] != "engine_ext" or parts[1] not in ROOMS or parts[1] == room_of(path):
                    continue
                if parts[1] == "adapters" or module in OWN or module.startswith(tuple(OWN)):
                    continue
                package = importlib.import_module(f"engine_ext.{parts[1]}")
                is_module = (ROOT / "/".join([*parts, f"{name}.py"])).exists()
                own = f"{module}.{name}" in OWN
                if len(parts) > 2 or not (name in package.__all__ or is_module or own):
                    past.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert past == []
