"""The table of the survey, from the results in the repository; vLLM is not needed."""

from __future__ import annotations

from collections.abc import Iterable

from scripts.doc_tables.reference import table
from scripts.survey.architectures import ARCHITECTURES
from scripts.survey.results import STATUSES, Result, shown, stored, summary


def stored_table() -> str:
    """Return the table of the documentation."""
    results = stored()
    return f"{markdown(results)}\n\n{summary(results)}."


def markdown(results: Iterable[Result]) -> str:
    """Return a row per architecture."""
    header = ["architecture", "tensors", *map(shown, STATUSES), "remarks"]
    return table(header, ([_name(r), *_numbers(r), _remarks(r)] for r in results))


def _name(result: Result) -> str:
    other = result.implementation not in ("", result.name)
    return f"`{result.name}`" + (f" (`{result.implementation}`)" if other else "")


def _numbers(result: Result) -> list[str]:
    numbers = [sum(result.counts.values()), *(result.counts.get(s, 0) for s in STATUSES)]
    return [str(number or "") for number in numbers]


def _remarks(result: Result) -> str:
    if result.failure:
        return f"not loaded: `{result.failure.replace('`', '')}`"
    accepted = ARCHITECTURES[result.name].accepted
    parts = [f"`{pattern}` is refused: {reason}" for pattern, reason in accepted.items()]
    parts += [f"`{tensor}` is refused: {reason}" for tensor, reason in result.unexplained.items()]
    if result.ignored:
        parts.append("vLLM's loader drops " + ", ".join(f"`{name}`" for name in result.ignored))
    return "; ".join(parts)
