"""Signatures against a known answer, and what a verifier refuses."""

from __future__ import annotations

import pytest

from engine_ext.errors import Unauthorized
from engine_ext.format.signature import Verifier, sign
from engine_ext.settings import HMAC_KEY_ENVIRONMENT

# RFC 4231, test case 2.
KEY, DATA = "Jefe", b"what do ya want for nothing?"
SIGNATURE = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"


def verify(key: str, given: str | None, *pieces: bytes) -> None:
    verifier = Verifier(key, given)
    for piece in pieces:
        verifier.feed(piece)
    verifier.finish()


def test_the_known_answer() -> None:
    assert sign(KEY, DATA) == SIGNATURE
    assert sign("schl\u00fcssel", memoryview(bytearray(DATA))) != SIGNATURE
    with pytest.raises(Unauthorized):
        verify("schl\u00fcssel", SIGNATURE, DATA)


@pytest.mark.parametrize("given", [SIGNATURE, SIGNATURE.upper(), f" {SIGNATURE}\n"])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_right_signature(given: str, size: int) -> None:
    verify(KEY, given, *(DATA[i : i + size] for i in range(0, len(DATA), size)))


@pytest.mark.parametrize(
    "given",
    [
        SIGNATURE[:-1],
        SIGNATURE + "0",
        "0" * 64,
        "x",
        f"sha256={SIGNATURE}",
        "\udcff",
        "\u0665" * 64,
    ],
)
def test_other_signatures(given: str) -> None:
    with pytest.raises(Unauthorized, match=HMAC_KEY_ENVIRONMENT) as caught:
        verify(KEY, given, DATA)
    assert SIGNATURE not in caught.value.message
    assert KEY not in caught.value.message


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"\0", b"", DATA.swapcase()])
def test_other_bytes(data: bytes) -> None:
    with pytest.raises(Unauthorized):
        verify(KEY, SIGNATURE, data)


@pytest.mark.parametrize(
    ("key", "given"), [(KEY, None), (KEY, ""), (KEY, " "), ("", sign("", DATA))]
)
def test_none_at_all(key: str, given: str | None) -> None:
    with pytest.raises(Unauthorized, match="X-Delta-Signature"):
        Verifier(key, given)
