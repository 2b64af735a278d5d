"""Which weights have computed each token of an engine's answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def spans(response: Any) -> list[list[list[Any]] | None]:
    """Return the spans ``[first_token, version]`` of every choice of a response, in their order.

    The version of a span has computed its tokens up to the next span's first. It is an int, or the
    text with which something else than a sync has labelled the weights.

    Args:
        response: An answer of an OpenAI route, as a dict or as an OpenAI client's object, also the
            last chunk of a choice's stream; one of vLLM's ``/inference/v1/generate`` or SGLang's
            ``/generate``; a ``RequestOutput`` of vLLM; or a list of such.

    Returns:
        None for a choice that has none: it is not finished, or the engine has no delta updates.
    """
    if isinstance(response, list | tuple):
        return [found for one in response for found in spans(one)]
    choices = _get(response, "choices")
    if choices is None:
        choices = _get(response, "outputs")
    return [_of(choice) for choice in ([response] if choices is None else choices)]


def joined(pieces: Iterable[tuple[int, list[list[Any]] | None]]) -> list[list[Any]] | None:
    """Return the spans of an answer that was generated in several requests.

    Args:
        pieces: The number of tokens that each has added, and its spans.

    Returns:
        None if a piece with tokens has none.
    """
    found, first = list[list[Any]](), 0
    for tokens, spans_of_piece in pieces:
        if tokens and spans_of_piece is None:
            return None
        for start, version in (spans_of_piece or ()) if tokens else ():
            if not found or found[-1][1] != version:
                found.append([first + start, version])
        first += tokens
    return found


def _of(choice: Any) -> list[list[Any]] | None:
    found = _get(choice, "weight_spans")
    if found is not None:
        return [list(span) for span in found]
    labels = _get(_get(choice, "meta_info") or choice, "weight_versions")
    if labels is None:
        return None
    named = [(_get(label, "start"), str(_get(label, "version"))) for label in labels]
    return [[first, int(text) if text.isdecimal() else text] for first, text in named]


def _get(thing: Any, key: str) -> Any:
    return thing.get(key) if isinstance(thing, Mapping) else getattr(thing, key, None)
