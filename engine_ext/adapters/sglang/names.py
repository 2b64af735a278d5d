"""The name by which SGLang's command line and its requests know this extension."""

from __future__ import annotations

LOAD_FORMAT = "delta"
