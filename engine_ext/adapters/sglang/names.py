"""Names that SGLang's command line and source patches know this extension by."""

from __future__ import annotations

NAME = "delta_hooks"


LOAD_FORMAT = "delta"
