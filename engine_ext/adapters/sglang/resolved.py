"""SGLang's settings as it serves with them.

They are more than the command line: SGLang derives some from the model, from other settings and
from the environment, and publishes the result in every process.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from engine_ext.adapters.sglang.refusals import RESOLVED

# SGLang's namespaces of settings.
_NAMESPACES: Final = ("spec", "memory", "disagg", "exec", "model")


def resolved_settings() -> argparse.Namespace:
    """Return the settings that `RESOLVED` asks for; those that this release lacks are left out."""
    from sglang.srt import runtime_context

    names = {condition.name for refusal in RESOLVED for condition in refusal.conditions}
    found: dict[str, Any] = {}
    for namespace in _NAMESPACES:
        get = getattr(runtime_context, f"get_{namespace}", None)
        if get is not None:
            _collect(get(), names, found)
    return argparse.Namespace(**found)


def _collect(bag: Any, names: set[str], found: dict[str, Any]) -> None:
    """Add the settings of these names that are in a namespace, or in one inside of it."""
    for name, value in vars(bag).items():
        if name in names:
            found[name] = value
    for inner in (getattr(bag, "_subs", None) or {}).values():
        _collect(inner, names, found)
