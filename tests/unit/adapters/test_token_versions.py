"""The weight versions of tokens in the answers of both engines' routes, without the engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from delta_sender import rollouts
from engine_ext.adapters import token_versions
from engine_ext.adapters.sglang import token_versions as sglang
from engine_ext.adapters.token_versions import Spans
from engine_ext.adapters.vllm import token_versions as vllm

OLD_AND_NEW: Spans = [[0, 7], [3, 8]]
NEW: Spans = [[0, 8]]


def event(**body: Any) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def body_of(one: str) -> Any:
    return json.loads(one.removeprefix("data: "))


def test_only_events_that_end_a_choice_change() -> None:
    quoting = event(choices=[{"index": 0, "text": '"finish_reason":"stop"', "finish_reason": None}])
    unchanged = [quoting, event(choices=[], usage={}), "data: [DONE]\n\n", ": keep-alive\n\n"]
    for one in [*unchanged, event(error={"finish_reason": "no"})]:
        assert token_versions.add_to_event(one, {0: NEW}) == one
    ends = event(choices=[{"index": 1, "text": "ä", "finish_reason": "stop"}], id="x")
    body = body_of(token_versions.add_to_event(ends, {0: NEW, 1: OLD_AND_NEW}))
    [choice] = body["choices"]
    assert choice == {
        "index": 1, "text": "ä", "finish_reason": "stop", "weight_spans": OLD_AND_NEW,
    }  # fmt: skip
    assert body["id"] == "x"
    assert token_versions.add_to_event(ends, {0: NEW}).count("weight_spans") == 0


def test_versions_are_numbers_and_other_labels_texts() -> None:
    assert token_versions.spans([(0, "12"), (4, "default")]) == [[0, 12], [4, "default"]]


# vLLM ----------------------------------------------------------------------------------------


def output(index: int, spans: Spans | None, finish: str | None = "stop") -> Any:
    labels = None
    if spans is not None:
        labels = [label(first, int(first) + 1, version) for first, version in spans]
        labels.append(label(9, 9, 9))  # its tokens were behind a stop string
    return SimpleNamespace(index=index, weight_versions=labels, finish_reason=finish)


def label(start: Any, end: Any, version: Any) -> Any:
    return SimpleNamespace(start=start, end=end, version=str(version))


def choices_of(outputs: list[Any]) -> list[Any]:
    return [SimpleNamespace(index=number) for number, _ in enumerate(outputs)]


class VllmServing:
    """vLLM's serving of completions, as far as it passes results on."""

    def request_output_to_completion_response(self, results: Any, request: Any) -> Any:
        outputs = [one for result in results for one in result.outputs]
        return SimpleNamespace(choices=choices_of(outputs))

    async def completion_stream_generator(
        self, request: Any, prompts: Any, results: AsyncIterator[Any]
    ) -> AsyncIterator[str]:
        async for prompt, result in results:
            for one in result.outputs:
                index = prompt * request.n + one.index
                yield event(choices=[{"index": index, "finish_reason": one.finish_reason}])
        yield "data: [DONE]\n\n"


class VllmChat:
    """vLLM's serving of chats, alike."""

    async def chat_completion_full_generator(self, request: Any, results: Any) -> Any:
        last = [result async for result in results][-1]
        return SimpleNamespace(choices=choices_of(last.outputs))

    async def chat_completion_stream_generator(
        self, request: Any, results: Any
    ) -> AsyncIterator[str]:
        async for result in results:
            for one in result.outputs:
                yield event(choices=[{"index": one.index, "finish_reason": one.finish_reason}])


async def each(items: list[Any]) -> AsyncIterator[Any]:
    for one in items:
        yield one


async def listed(items: AsyncIterator[Any]) -> list[Any]:
    return [one async for one in items]


def streamed(events: list[str]) -> dict[int, Any]:
    """The spans of each choice of a stream, by its index."""
    bodies = [body_of(one) for one in events if one != "data: [DONE]\n\n"]
    ended = [choice for body in bodies for choice in body["choices"] if "weight_spans" in choice]
    return {choice["index"]: choice["weight_spans"] for choice in ended}


def test_vllm_answers_the_spans_of_every_choice() -> None:
    state = SimpleNamespace(openai_serving_completion=VllmServing(), openai_serving_chat=VllmChat())
    vllm.install(state)
    first = SimpleNamespace(outputs=[output(0, OLD_AND_NEW), output(1, NEW)])
    second = SimpleNamespace(outputs=[output(0, NEW), output(1, None)])
    request = SimpleNamespace(n=2)
    completion, chat = state.openai_serving_completion, state.openai_serving_chat
    answer = completion.request_output_to_completion_response([first, second], request)
    assert rollouts.spans(answer) == [OLD_AND_NEW, NEW, NEW, None]
    answer = asyncio.run(chat.chat_completion_full_generator(request, each([first])))
    assert rollouts.spans(answer) == [OLD_AND_NEW, NEW]


def test_vllm_streams_the_spans_of_every_choice() -> None:
    state = SimpleNamespace(openai_serving_completion=VllmServing(), openai_serving_chat=VllmChat())
    vllm.install(state)
    begun = SimpleNamespace(outputs=[output(0, None, finish=None)])
    ended = SimpleNamespace(outputs=[output(0, OLD_AND_NEW), output(1, NEW)])
    other = SimpleNamespace(outputs=[output(1, NEW)])
    request = SimpleNamespace(n=2)
    results = each([(0, begun), (0, ended), (1, other)])
    stream = state.openai_serving_completion.completion_stream_generator(request, [], results)
    assert streamed(asyncio.run(listed(stream))) == {0: OLD_AND_NEW, 1: NEW, 3: NEW}
    stream = state.openai_serving_chat.chat_completion_stream_generator(
        request, each([begun, ended])
    )
    assert streamed(asyncio.run(listed(stream))) == {0: OLD_AND_NEW, 1: NEW}


def test_vllm_models_that_generate_nothing_are_left_alone() -> None:
    vllm.install(SimpleNamespace(openai_serving_completion=None, openai_serving_chat=None))
    vllm.install(SimpleNamespace())


# SGLang --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """SGLang's ``WeightVersionEvent``."""

    old_version: str
    num_output_tokens: int


class Serving(SimpleNamespace):
    """The settings that SGLang keeps the version in."""

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        yield
        self.__dict__.update(before)


class Scheduler:
    """SGLang's scheduler with overlap: what a batch has computed is processed later.

    Attributes:
        answered: the version that a request had when it ended, with its tokens.
    """

    def __init__(self, serving: Serving) -> None:
        self.serving, self.answered = serving, list[tuple[str, int]]()

    def run_batch(self, batch: Any) -> Any:
        return SimpleNamespace()

    def process_batch_result(self, batch: Any, result: Any) -> None:
        for request in batch.reqs:
            request.output_ids.append(1)
            if len(request.output_ids) == request.most:
                self.answered.append((self.serving.weight_version, request.most))

    def change_version(self, version: str, requests: list[Any]) -> None:
        old, self.serving.weight_version = self.serving.weight_version, version
        for request in requests:
            if request.output_ids:
                request.weight_version_events.append(Event(old, len(request.output_ids)))


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    serving = Serving(weight_version="1")

    class Own(Scheduler):
        pass

    names = {
        "sglang.srt.managers.scheduler": SimpleNamespace(Scheduler=Own),
        "sglang.srt.runtime_context": SimpleNamespace(get_serving=lambda: serving),
        "sglang.srt.utils.weight_versions": SimpleNamespace(WeightVersionEvent=Event),
    }
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    sglang.follow_batches()
    sglang.follow_batches()
    return Own(serving)


def request_of(tokens: int, most: int = 100) -> Any:
    return SimpleNamespace(output_ids=[1] * tokens, weight_version_events=[], most=most)


def test_a_token_of_an_overlapped_batch_keeps_its_version(scheduler: Scheduler) -> None:
    running, begins, ends = request_of(4), request_of(0), request_of(1, most=2)
    batch = SimpleNamespace(reqs=[running, begins, ends])
    result = scheduler.run_batch(batch)
    scheduler.change_version("2", batch.reqs)
    scheduler.change_version("3", batch.reqs)
    scheduler.process_batch_result(batch, result)
    assert running.weight_version_events == [Event("1", 5), Event("2", 5)]
    assert begins.weight_version_events == [Event("1", 1)]
    assert scheduler.answered == [("1", 2)]
    assert scheduler.serving.weight_version == "3"


def test_other_batches_are_processed_as_ever(scheduler: Scheduler) -> None:
    running = request_of(4)
    batch = SimpleNamespace(reqs=[running])
    scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    scheduler.process_batch_result(batch, SimpleNamespace())
    assert running.weight_version_events == []
    scheduler.change_version("2", batch.reqs)
    scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    assert running.weight_version_events == [Event("1", 6)]


def test_a_version_that_returns_is_the_last_one(scheduler: Scheduler) -> None:
    running = request_of(2)
    batch = SimpleNamespace(reqs=[running])
    scheduler.change_version("2", batch.reqs)
    result = scheduler.run_batch(batch)
    scheduler.change_version("1", batch.reqs)
    scheduler.process_batch_result(batch, result)
    assert running.weight_version_events == [Event("1", 2), Event("2", 3)]


def meta_info(spans: Spans | None) -> dict[str, Any]:
    if spans is None:
        return {"finish_reason": None}
    labels = [{"version": str(version), "start": first, "end": 9} for first, version in spans]
    labels.append({"version": "9", "start": 9, "end": 9})
    return {"finish_reason": {"type": "stop"}, "weight_versions": labels}


def serving_type(build: str, stream: str) -> Any:
    """SGLang's serving of completions or chats, by the names of its two methods."""

    class Serving:
        def __init__(self, manager: Any) -> None:
            self.manager = manager

    def built(own: Any, request: Any, results: Any, created: int) -> Any:
        return SimpleNamespace(choices=choices_of(results))

    async def streamed(own: Any, adapted: Any, request: Any) -> AsyncIterator[str]:
        async for result in own.manager.generate_request(adapted):
            finish = result["meta_info"]["finish_reason"]
            named = finish and finish["type"]
            yield event(choices=[{"index": result["index"], "finish_reason": named}])
        yield "data: [DONE]\n\n"

    setattr(Serving, build, built)
    setattr(Serving, stream, streamed)
    return Serving


class Choice:
    model_config: ClassVar[dict[str, Any]] = {}

    @classmethod
    def model_rebuild(cls, *, force: bool) -> None:
        pass


def test_sglang_answers_the_spans_of_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("CompletionResponse", "ChatCompletionResponse")
    names = [f"{kind}{what}" for kind in kinds for what in ("", "Choice")]
    package = "sglang.srt.entrypoints.openai"
    protocol = SimpleNamespace(**dict.fromkeys(names, Choice))
    methods = {
        "completion": ("_build_completion_response", "_generate_completion_stream"),
        "chat": ("_build_chat_response", "_generate_chat_stream"),
    }
    types = {kind: serving_type(*names) for kind, names in methods.items()}
    completions = SimpleNamespace(OpenAIServingCompletion=types["completion"])
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(protocol=protocol))
    monkeypatch.setitem(sys.modules, f"{package}.serving_completions", completions)
    results = [
        {"index": 0, "meta_info": meta_info(None)},
        {"index": 1, "meta_info": meta_info(NEW)},
        {"index": 0, "meta_info": meta_info(OLD_AND_NEW)},
    ]
    manager = SimpleNamespace(
        generate_request=lambda request: each(results), serving_chat_class=types["chat"]
    )
    sglang.install(manager)
    for kind, (build, stream) in methods.items():
        serving = types[kind](manager)
        answer = getattr(serving, build)(None, [results[2], results[1]], 0)
        assert rollouts.spans(answer) == [OLD_AND_NEW, NEW]
        events = asyncio.run(listed(getattr(serving, stream)(object(), None)))
        assert streamed(events) == {0: OLD_AND_NEW, 1: NEW}
    # Requests of other routes pass as they are.
    assert asyncio.run(listed(manager.generate_request(object()))) == results
