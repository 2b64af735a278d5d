"""The names by which SGLang's command line and the source patches know this extension."""

from __future__ import annotations

NAME = "delta_hooks"
LOAD_FORMAT = "delta"
