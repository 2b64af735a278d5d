"""Signed parts: HMAC-SHA256 over the bytes of a part as they are sent, in hex."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING, Final

from engine_ext.errors import Unauthorized

if TYPE_CHECKING:
    from typing_extensions import Buffer

HMAC_KEY_ENVIRONMENT: Final = "DELTA_HMAC_KEY"
SIGNATURE_HEADER: Final = "X-Delta-Signature"
SIGNATURE_SUFFIX: Final = ".sig"  # of the file that lies beside a part on disk


def sign(key: str, part: Buffer) -> str:
    """The signature of a part: 64 lower-case hex digits.

    Args:
        key: shared with the receiver; its UTF-8 bytes count.
        part: the bytes that are sent, compressed where they are.
    """
    return hmac.new(_bytes(key), memoryview(part), hashlib.sha256).hexdigest()


def signing_key() -> str | None:
    """The key that this receiver's parts must be signed with; None: they need no signature."""
    return os.environ.get(HMAC_KEY_ENVIRONMENT)


class Verifier:
    """Compares a part with its signature, while it arrives.

    Args:
        key: shared with the sender.
        given: the signature that came with the part, or None.

    Raises:
        Unauthorized: there is none, or the key is empty, which is a mistake.
    """

    def __init__(self, key: str, given: str | None) -> None:
        if not key or not (given or "").strip():
            raise Unauthorized(
                f"this engine takes signed parts only: send {SIGNATURE_HEADER}, or put a file "
                f"with {SIGNATURE_SUFFIX} added to its name beside the part; the HMAC-SHA256 of "
                f"the part, in hex, with the key in {HMAC_KEY_ENVIRONMENT}, which is not empty"
            )
        self._given = (given or "").strip().lower()
        self._mac = hmac.new(_bytes(key), digestmod=hashlib.sha256)

    def feed(self, data: Buffer) -> None:
        """Take the next bytes."""
        self._mac.update(memoryview(data))

    def finish(self) -> None:
        """Say that the part has ended.

        Raises:
            Unauthorized: its sender has signed other bytes, or with another key.
        """
        if not hmac.compare_digest(_bytes(self._given), _bytes(self._mac.hexdigest())):
            raise Unauthorized(
                f"the signature is not that of the part with the key in {HMAC_KEY_ENVIRONMENT}"
            )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
