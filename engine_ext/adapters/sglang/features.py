"""The supported versions of SGLang, and features that some of them lack."""

from __future__ import annotations

from typing import Final

from engine_ext.adapters.versions import Feature, Versions

VERSIONS: Final = Versions("SGLang", ("0.5.22", "0.5.23"))
FEATURES: Final = (
    Feature(
        what="checksums of all weights (`/weights_checker`) on CPU",
        owner="sglang.srt.utils.weight_checker",
        name="current_platform",
        since="0.5.23",
        without="on CPU the engine has none; `GET /delta_digest?scan=true` compares the weights",
    ),
)


def require_supported_version() -> None:
    """Refuse to start with another version of SGLang; ValueError."""
    import sglang

    VERSIONS.require(sglang.__version__)
