"""Every package names its public interface, and other packages import from it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.parent.name for path in (ROOT / "engine_ext").glob("*/__init__.py"))
PACKAGES = [*(f"engine_ext.{room}" for room in ROOMS), "delta_server", "delta_sender"]
FOLDERS = ("engine_ext", "server/delta_server", "trainer/delta_sender", "scripts")
# Modules that are an interface of their own: structs for both ends of a call, and optional kernels.
OWN = {"engine_ext.ranks.operations", "engine_ext.kernels.triton"}


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of every ``from`` import of a room of `engine_ext`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.count(".") > 0:
            yield from ((node.module, alias.name) for alias in node.names)


def room_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "engine_ext" and len(parts) > 2 else None


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_says_what_it_is_for_and_what_it_exports(name: str) -> None:
    package = importlib.import_module(name)
    assert len((package.__doc__ or "").splitlines()) > 2
    assert "import" in (package.__doc__ or "").lower()
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(hasattr(package, exported) for exported in package.__all__)


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
