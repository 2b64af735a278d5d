"""Make what intake makes of a part, for tests that have no HTTP process."""

from __future__ import annotations

from engine_ext.format import FrameReader, Limits, read_container, verify_container


def verified_file(body: bytes) -> tuple[str, bytes]:
    """Return a part's identity, and the bytes of the file that ranks map."""
    container = b"".join(FrameReader(Limits().max_part_bytes).feed(body))
    contents = verify_container(read_container(container, Limits())[0], container)
    pieces = [] if contents.replaces else [container]
    return contents.identity, b"".join([*pieces, *contents.pieces])
