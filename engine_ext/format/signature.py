"""Sign and verify parts: HMAC-SHA256 of a part's bytes as they are sent, in hex."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING, Final

from engine_ext.errors import Unauthorized
from engine_ext.settings import HMAC_KEY_ENVIRONMENT

if TYPE_CHECKING:
    from typing_extensions import Buffer

SIGNATURE_HEADER: Final = "X-Delta-Signature"
SIGNATURE_SUFFIX: Final = ".sig"  # appended to the name of a part's file on disk


def sign(key: str, part: Buffer) -> str:
    """Return the signature of a part as it is sent, after any compression: 64 hex digits."""
    return hmac.new(_bytes(key), memoryview(part), hashlib.sha256).hexdigest()


def signing_key() -> str | None:
    """Return the key from the environment; None if parts need no signature."""
    return os.environ.get(HMAC_KEY_ENVIRONMENT)


class Verifier:
    """Verifies the signature that came with a part while the part arrives.

    Raises:
        Unauthorized: there is no signature, or the key is empty, which is a misconfiguration.
    """

    def __init__(self, key: str, given: str | None) -> None:
        if not key or not (given or "").strip():
            raise Unauthorized(
                f"this engine accepts signed parts only: send {SIGNATURE_HEADER}, or write a file "
                f"named like the part with {SIGNATURE_SUFFIX} appended, with the HMAC-SHA256 of "
                f"the part in hex; the key is in {HMAC_KEY_ENVIRONMENT} and must not be empty"
            )
        self._given = (given or "").strip().lower()
        self._mac = hmac.new(_bytes(key), digestmod=hashlib.sha256)

    def feed(self, data: Buffer) -> None:
        """Take the next bytes."""
        self._mac.update(memoryview(data))

    def finish(self) -> None:
        """Verify the signature of all bytes; Unauthorized if it is of others or by another key."""
        if not hmac.compare_digest(_bytes(self._given), _bytes(self._mac.hexdigest())):
            raise Unauthorized(
                f"the part does not have this signature with the key in {HMAC_KEY_ENVIRONMENT}"
            )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
