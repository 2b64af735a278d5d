"""The page for troubles has an entry for each error that users meet, and no stale message."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from delta_sender import SyncError
from engine_ext.adapters.refusals import Refusal
from engine_ext.adapters.sglang import refusals as sglang
from engine_ext.adapters.vllm import refusals as vllm
from engine_ext.errors import DeltaError
from scripts.doc_tables.__main__ import DOCS

pytestmark = pytest.mark.slow

ROOT = DOCS.parent
PAGE = (DOCS / "troubleshooting.md").read_text()
ENTRIES = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S))
BLOCKS = re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)
MESSAGES = [
    *(line for block in BLOCKS for line in block.splitlines()),
    *re.findall(r"^\| `(.+?)` \|", ENTRIES["Lines of its log"], re.M),
]
HOLE = "\0"  # for a value in a text of the code; the page has an ellipsis there
# Where the start of an engine, or a command, is refused.
STARTS = ("adapters", "cli", "settings.py", "startup/order.py", "ranks/replicas.py")
RAISED = ("RuntimeError", "ValueError", "CannotFold", "LogDamaged", "parser.error")


def template(node: ast.AST) -> str:
    """Return a text of the code with a hole for each value; "" if it is not a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-.\d]*[sdrgf]", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(one) or HOLE for one in node.values)
    return ""


def nodes(*rooms: str) -> Iterator[ast.AST]:
    """Yield all nodes of the modules below some paths."""
    for room in rooms:
        path = ROOT / room
        for file in [path] if path.suffix == ".py" else sorted(path.rglob("*.py")):
            yield from ast.walk(ast.parse(file.read_text()))


def pattern(message: str) -> re.Pattern[str]:
    """Return what matches the texts that a message of the page stands for."""
    pieces = (re.escape(piece.strip()) for piece in message.split("…"))
    return re.compile(".*".join(pieces), re.S)


def classes(root: type[Exception]) -> list[type[Exception]]:
    found = [root, *(one for child in root.__subclasses__() for one in classes(child))]
    return [one for one in found if not one.__name__.startswith("_")]


def refused_at_start() -> list[str]:
    """Return the texts of the errors that the start of an engine, or a command, raises."""
    rooms = [f"engine_ext/{room}" for room in STARTS] + ["trainer/delta_sender/cli.py"]
    calls = [node for node in nodes(*rooms) if isinstance(node, ast.Call) and node.args]
    texts = {template(call.args[0]) for call in calls if ast.unparse(call.func) in RAISED}
    return sorted(text for text in texts if len(text.replace(HOLE, "")) > 20)


def refusals() -> list[Refusal]:
    """Return the set-ups in both adapters' tables with which an engine does not start."""
    tables = (vllm.ARGUMENTS, vllm.RESOLVED, vllm.LOADED, sglang.ARGUMENTS, sglang.LOADED)
    return [refusal for table in tables for refusal in table]


def test_every_error_has_an_entry() -> None:
    names = {one.__name__ for one in (*classes(DeltaError), *classes(SyncError))}
    headings = " ".join(ENTRIES)
    assert [name for name in sorted(names) if f"`{name}`" not in headings] == []


def test_every_refused_start_has_an_entry() -> None:
    known = [pattern(message) for message in MESSAGES]
    texts = refused_at_start()
    assert len(texts) > 30
    assert [text for text in texts if not any(one.search(text) for one in known)] == []


def test_every_refused_option_has_an_entry() -> None:
    message = "--enable-delta-updates does not work with … yet: …"
    assert message in MESSAGES
    for refusal in refusals():
        assert pattern(message).match(refusal.message)


def test_an_entry_is_short_and_has_a_remedy() -> None:
    for name, entry in ENTRIES.items():
        prose = re.sub(r"^```text\n.*?^```", "", entry, flags=re.M | re.S)
        assert "**Do**" in prose or "| do |" in prose, name
        assert len([line for line in prose.splitlines() if line and line[0] != "|"]) <= 6, name


def test_the_messages_of_the_page_are_in_the_code() -> None:
    assert all(re.search(r"\w", message) for message in MESSAGES)
    texts = sorted({template(node) for node in nodes("engine_ext", "server", "trainer")})
    stale = [one for one in MESSAGES if not any(map(pattern(one).search, texts))]
    assert stale == []
