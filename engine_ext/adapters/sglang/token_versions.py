"""The weight version of every token in SGLang's answers.

SGLang's scheduler notes, when the version changes, how many tokens each request has, and answers
the spans in ``meta_info`` of its own routes. Two things are missing there:

- With overlapped scheduling the newest batch's results are not processed yet, so that its tokens
  would get the version of the weights that come next. They are processed under the version that the
  batch was launched with.
- The OpenAI routes answer the spans of the first choice alone, and none in streams.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Final

from engine_ext.adapters.token_versions import KEY, Spans, add_to_event, spans

_LAUNCHED: Final = "delta_weight_version"


# Scheduler -----------------------------------------------------------------------------------


def follow_batches() -> None:
    """Label the tokens of this process's scheduler as above; safe to call more than once."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_serving

    if hasattr(Scheduler.run_batch, _LAUNCHED):
        return
    run_now, process_now = Scheduler.run_batch, Scheduler.process_batch_result

    @functools.wraps(run_now)
    def run_batch(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = run_now(scheduler, *args, **kwargs)
        if result is not None:
            setattr(result, _LAUNCHED, get_serving().weight_version)
        return result

    @functools.wraps(process_now)
    def process_batch_result(scheduler: Any, batch: Any, result: Any) -> Any:
        serving = get_serving()
        launched = getattr(result, _LAUNCHED, serving.weight_version)
        if launched == serving.weight_version:
            return process_now(scheduler, batch, result)
        with serving.override(weight_version=launched):
            answer = process_now(scheduler, batch, result)
        for request in batch.reqs:
            request.weight_version_events = extended(
                request.weight_version_events, launched, len(request.output_ids)
            )
        return answer

    setattr(run_batch, _LAUNCHED, True)
    Scheduler.run_batch, Scheduler.process_batch_result = run_batch, process_batch_result


def extended(events: Sequence[Any], version: str, tokens: int) -> list[Any]:
    """Return a request's changes of version such that it has `tokens` up to the end of `version`.

    Args:
        events: SGLang's ``WeightVersionEvent``, the earliest first: a version that ended, and how
            many tokens the request had then. A request without tokens has none.
    """
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    ended = [number for number, event in enumerate(events) if event.old_version == version]
    if not ended:
        first = WeightVersionEvent(old_version=version, num_output_tokens=tokens)
        return [*events, first] if tokens else list(events)
    kept = events[: ended[-1]]
    return [*kept, *(replace(one, num_output_tokens=tokens) for one in events[ended[-1] :])]


# HTTP process --------------------------------------------------------------------------------


def install(manager: Any) -> None:
    """Let the OpenAI routes of this process answer the spans of all choices, also in streams.

    SGLang makes the objects behind these routes later.

    Args:
        manager: SGLang's tokenizer manager, which the routes generate with.
    """
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

    followed: dict[int, dict[int, Spans]] = {}
    _follow_requests(manager, followed)
    chat = manager.serving_chat_class
    for serving, build, stream in (
        (OpenAIServingCompletion, "_build_completion_response", "_generate_completion_stream"),
        (chat, "_build_chat_response", "_generate_chat_stream"),
    ):
        _follow_answers(serving, build)
        _follow_streams(serving, stream, followed)
    _allow_spans()


def _spans(meta_info: Any) -> Spans | None:
    found = meta_info.get("weight_versions")
    if found is None:
        return None
    return spans((one["start"], one["version"]) for one in found if one["start"] < one["end"])


def _allow_spans() -> None:
    """Let the choices of answers have the further key; they would drop it."""
    from sglang.srt.entrypoints.openai import protocol

    for choice in (protocol.CompletionResponseChoice, protocol.ChatCompletionResponseChoice):
        choice.model_config["extra"] = "allow"
        choice.model_rebuild(force=True)
    for answer in (protocol.CompletionResponse, protocol.ChatCompletionResponse):
        answer.model_rebuild(force=True)


def _follow_answers(serving: Any, name: str) -> None:
    build_now = getattr(serving, name)

    @functools.wraps(build_now)
    def build(own: Any, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        response = build_now(own, request, results, *args, **kwargs)
        for choice, result in zip(getattr(response, "choices", ()), results, strict=False):
            found = _spans(result["meta_info"])
            if found is not None:
                setattr(choice, KEY, found)
        return response

    setattr(serving, name, build)


def _follow_requests(manager: Any, followed: dict[int, dict[int, Spans]]) -> None:
    """Keep the spans of the streamed requests in `followed`, by the request's `id`."""
    generate_now = manager.generate_request

    async def noting(results: Any, found: dict[int, Spans]) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(results):
            async for result in results:
                known = _spans(result["meta_info"])
                if known is not None:
                    found[result.get("index", 0)] = known
                yield result

    @functools.wraps(generate_now)
    def generate_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        results = generate_now(request, *args, **kwargs)
        found = followed.get(id(request))
        return results if found is None else noting(results, found)

    manager.generate_request = generate_request


def _follow_streams(serving: Any, name: str, followed: dict[int, dict[int, Spans]]) -> None:
    stream_now = getattr(serving, name)

    @functools.wraps(stream_now)
    async def stream(
        own: Any, adapted: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        found = followed[id(adapted)] = {}
        try:
            async with contextlib.aclosing(stream_now(own, adapted, *args, **kwargs)) as events:
                async for event in events:
                    yield add_to_event(event, found)
        finally:
            followed.pop(id(adapted), None)

    setattr(serving, name, stream)
