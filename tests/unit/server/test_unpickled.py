"""Nothing that is received is unpickled, evaluated or loaded by what can run code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import delta_server
import engine_ext

FOLDERS = [Path(package.__file__ or "").parent for package in (delta_server, engine_ext)]
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))

# Modules that make objects of bytes by running what the bytes say.
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib",
           "jsonpickle", "yaml", "xmlrpc", "multiprocessing"}  # fmt: skip
# Called by name, or as an attribute of something.
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {("torch", "load"), ("torch", "package"), ("jit", "load"), ("np", "load"),
           ("numpy", "load"), ("np", "fromfile"), ("np", "lib")}  # fmt: skip
# The engine's own processes among themselves: what a rank says to the others (docs/security.md).
# `torch.distributed.all_gather_object` and the like, and SGLang's `send_pyobj`.
PICKLING = re.compile(r"pickle|pyobj|(gather|broadcast|scatter|send|recv)_object")
# A file that has none of these is not parsed.
WORDS = re.compile(
    rf"\b({'|'.join({*MODULES, *CALLS, *(name for _, name in METHODS)})})\b"
    rf"|{PICKLING.pattern}|allow_pickle|weights_only"
)


def suspicious(path: Path) -> Iterator[str]:
    text = path.read_text()
    if not WORDS.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[-1]}
            if (node.module or "").split(".")[0] in MODULES:
                yield str(node.module)
            yield from (a.name for a in node.names for n in names if (n, a.name) in METHODS)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in CALLS:
                yield node.func.id
        elif isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if (name, node.attr) in METHODS or PICKLING.search(node.attr):
                yield f"{name}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            yield node.arg


def test_nothing_is_unpickled() -> None:
    found = {path: set(suspicious(path)) for path in FILES}
    between = {path for path in FILES if path.as_posix().endswith("engine_ext/ranks/group.py")}
    assert {path: names for path, names in found.items() if names} == {
        path: {"distributed.all_gather_object"} for path in between
    }
    assert len(between) == 1


def test_the_packages_are_there() -> None:
    assert len(FILES) > 50
    assert {path.parent for path in FILES} >= set(FOLDERS)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import yaml.loader",
        "from pickle import loads",
        "from torch import load",
        "torch.load(file)",
        "torch.jit.load(file)",
        "np.load(file)",
        "f(file, allow_pickle=False)",
        "torch.distributed.broadcast_object_list(x)",
        "connection.recv_pyobj()",
        "eval(text)",
    ],
)
def test_the_test_sees_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    assert list(suspicious(tmp_path / "a.py"))
