"""Make types ready to be decoded by several threads.

msgspec looks at the fields of a `Struct` when it is decoded for the first time. It notes that this
is done before it is (so that a type can contain itself), and a thread that decodes the type
meanwhile reads a null pointer: the process gets SIGSEGV (msgspec 0.20 to 0.22). A type that was
looked at while its module is imported, which one thread does, is safe.
"""

from __future__ import annotations

from typing import Any

import msgspec


def prepare(*types: Any) -> None:
    """Let msgspec look at types and at all that they contain; call it where they are defined."""
    for one in types:
        msgspec.json.Decoder(one)
