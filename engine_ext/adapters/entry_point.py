"""The first steps of both plugins: an engine's own flags, and whether its source is patched."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

NAME: Final = "delta_hooks"
"""The name of an adapter's `hooks` in the modules of an engine that ``patches/`` has changed."""


def is_in_source(module: str) -> bool:
    """Return whether a module of an engine imports the hooks itself."""
    return hasattr(importlib.import_module(module), NAME)


def is_patched(engine: str, modules: Sequence[str]) -> bool:
    """Return whether an engine's source has the hooks.

    Args:
        modules: those that the patches let import them.

    Raises:
        ValueError: only some have them, so that some of the hooks would be missing.
    """
    unpatched = [module for module in modules if not is_in_source(module)]
    if unpatched and len(unpatched) < len(modules):
        raise ValueError(
            f"this {engine} is patched only in part, {', '.join(unpatched)} not at all; "
            f"run python -m delta_patches {engine.lower()} --status (in a checkout, "
            "scripts/apply_patches.py)"
        )
    return not unpatched


def add_flags(
    arguments: Any,
    add: Callable[[argparse.ArgumentParser], None],
    read: Callable[[argparse.Namespace], bool],
    install: Callable[[], None],
) -> None:
    """Add the flags to an engine's own parser; safe to call more than once.

    Args:
        arguments: the engine's class of parsed arguments, which makes the parser.
        add: adds the flags to it.
        read: returns whether parsed arguments enable delta updates; `install` is called then.
    """
    if hasattr(arguments.add_cli_args, "delta_updates"):
        return
    original_add = arguments.add_cli_args
    original_from = arguments.from_cli_args.__func__

    @functools.wraps(original_add)
    def add_cli_args(parser: Any) -> Any:
        found = original_add(parser)
        add(parser)
        return found

    @functools.wraps(original_from)
    def from_cli_args(cls: type[Any], args: Any) -> Any:
        if read(args):
            install()
        return original_from(cls, args)

    add_cli_args.delta_updates = True  # type: ignore[attr-defined]
    arguments.add_cli_args = staticmethod(add_cli_args)
    arguments.from_cli_args = classmethod(from_cli_args)
