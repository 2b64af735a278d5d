"""The weight version of every token in the answers of vLLM's OpenAI routes.

An engine core labels the tokens of every step with its weights' version, which changes only while
no step runs. vLLM itself answers the spans on ``/inference/v1/generate`` and in Python alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from engine_ext.adapters.token_versions import KEY, Spans, add_to_event, spans


def install(state: Any) -> None:
    """Let the completion routes of an app's state answer the spans of their choices."""
    completion = getattr(state, "openai_serving_completion", None)
    if completion is not None:
        _follow_completions(completion)
    chat = getattr(state, "openai_serving_chat", None)
    if chat is not None:
        _follow_chats(chat)


def _note(result: Any, first: int, found: dict[int, Spans]) -> None:
    """Keep the spans of the finished outputs of a `RequestOutput`.

    Args:
        first: number of the choice that is its first output.
    """
    for output in result.outputs:
        labels = getattr(output, "weight_versions", None)
        if labels is not None:
            known = ((one.start, one.version) for one in labels if one.start < one.end)
            found[first + output.index] = spans(known)


def _add(response: Any, found: dict[int, Spans]) -> None:
    """Add the spans to the choices of an answer, which allow further keys; errors have none."""
    for choice in getattr(response, "choices", ()):
        if choice.index in found:
            setattr(choice, KEY, found[choice.index])


def _follow_completions(serving: Any) -> None:
    answer_now = serving.request_output_to_completion_response
    stream_now = serving.completion_stream_generator

    @functools.wraps(answer_now)
    def answer(results: Any, *args: Any, **kwargs: Any) -> Any:
        found: dict[int, Spans] = {}
        first = 0
        for result in results:
            _note(result, first, found)
            first += len(result.outputs)
        response = answer_now(results, *args, **kwargs)
        _add(response, found)
        return response

    @functools.wraps(stream_now)
    async def stream(
        request: Any, prompts: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        found: dict[int, Spans] = {}

        async def noted() -> AsyncGenerator[Any, None]:
            async for prompt, result in results:
                _note(result, prompt * (request.n or 1), found)
                yield prompt, result

        inner = noted()
        events = stream_now(request, prompts, inner, *args, **kwargs)
        async with contextlib.aclosing(inner), contextlib.aclosing(events):
            async for event in events:
                yield add_to_event(event, found)

    serving.request_output_to_completion_response = answer
    serving.completion_stream_generator = stream


def _follow_chats(serving: Any) -> None:
    answer_now = serving.chat_completion_full_generator
    stream_now = serving.chat_completion_stream_generator

    async def noting(
        results: AsyncIterator[Any], found: dict[int, Spans]
    ) -> AsyncGenerator[Any, None]:
        async for result in results:
            _note(result, 0, found)
            yield result

    @functools.wraps(answer_now)
    async def answer(request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        found: dict[int, Spans] = {}
        async with contextlib.aclosing(noting(results, found)) as inner:
            response = await answer_now(request, inner, *args, **kwargs)
        _add(response, found)
        return response

    @functools.wraps(stream_now)
    async def stream(
        request: Any, results: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        found: dict[int, Spans] = {}
        inner = noting(results, found)
        events = stream_now(request, inner, *args, **kwargs)
        async with contextlib.aclosing(inner), contextlib.aclosing(events):
            async for event in events:
                yield add_to_event(event, found)

    serving.chat_completion_full_generator = answer
    serving.chat_completion_stream_generator = stream
