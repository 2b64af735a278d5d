"""The operations on their way to the ranks and back."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from engine_ext.adapters.sglang import rpc
from engine_ext.adapters.vllm.engine import VllmEngine
from engine_ext.errors import Conflict, DeltaError
from engine_ext.format.identity import PartId, RunSender
from engine_ext.ranks import operations as ops
from engine_ext.sync import Receiver
from tests.support.present import present

PART = PartId(version=2, base_version=1, identity="i", sync_id="s", part=1, num_parts=3)
STATE = ops.RankState(version=1, engine_state="certain", resume_owed=False)
ITEM = ops.BoardItem(value={"a": [1]}, revision=3, holder="h", written=True, entries=[1, "b"])
COMMITTED = ops.CommittedSync(
    version=2, base_version=1, run="r", base_run=None, sync_id=None, full=False, apply="scatter",
    parts=1, nnz=2, tensors=1, elements=9, commit_ms=1.5, rollback=True, digest="00",
)  # fmt: skip
SERVING = ops.Serving(idle=True, weight_version="3")
SENDER = RunSender(run="r", epoch=2, host="h", pid=3)
OWNER = ops.RunOwner(run="r", epoch=2, host="h", pid=3, since=1.5)
STAGED = ops.StagedSync(
    version=2, base_version=None, sync_id="s", full=True, num_parts=None, parts=[0, 2],
    run="r", owner=OWNER, since=1.5,
    prepared=ops.PreparedSync(group="g", until=1.5, ends=2.5, recorded=True, unreachable=["u"]),
)  # fmt: skip
STATUS = ops.RankStatus(
    version=1, engine_state="uncertain", resume_owed=True, asleep=False, foreign=None,
    run="r", owner=OWNER, loaded=False, staged=STAGED, last_sync=COMMITTED, can_roll_back=False,
    apply="scatter", certification={"exact": 3}, uncertified={"w": "why"}, digest="00",
    scrub=ops.ScrubState(passes=2, passed_at=1.5, mismatched=["w"], error=None),
)  # fmt: skip

# Each operation with one of its replies.
EXAMPLES: list[tuple[ops.Operation[Any], ops.Reply]] = [
    (
        ops.GetStatus(parts=ops.Parts(version=1, run="r", identities=["a", "b"])),
        ops.RankReport(state=STATE, status=STATUS, unseen=["b"], findings=2, serving=SERVING),
    ),
    (ops.GetItem(key="k"), ITEM),
    (ops.PutItem(key="k", value=[1], expected=2, append={"a": 1}, most=3), ITEM),
    (
        ops.LeaseItem(key="k", holder="h", instead_of="d", value={"b": 1}, expected=2),
        ops.BoardLease(granted=True, item=ITEM, state=STATE),
    ),
    (
        ops.ClaimRun(sender=SENDER, releases=True, takeover=True, now=1.5, at=2.5),
        ops.RunClaimed(owner=OWNER, released=True, highest=4),
    ),
    (
        ops.BeginPart(part=PART, path="/spool/part", now=1.5),
        ops.PartBegun(admission="new", search_ms=1.5),
    ),
    (ops.PollPart(part=PART), ops.PartProgress(done=True)),
    (ops.PrepareSync(part=PART, keep=True), ops.SyncPrepared(complete=True, done=False, rebuilt=2)),
    (ops.HoldSync(version=2, sync_id="s", prepared=present(STAGED.prepared)), ops.Reply()),
    (ops.AbortSync(part=PART, version=1, sync_id="s", group="g", unloads=True), ops.Reply()),
    (ops.CommitSync(version=2, sync_id=None, group="g"), COMMITTED),
    (ops.RollBack(), ops.RolledBack(version=1, rolled_back=2, commit_ms=1, digest="00", run="r")),
    (ops.GetPlan(), ops.RankPlan(tensors=[{"name": "w", "live": ["w"]}])),
    (
        ops.GetDigest(scan=True),
        ops.RankDigest(version=1, tensors={"w": "00"}, tracked={"w": "01"}, corrupted=["w"]),
    ),
]
NAMES = [request.name for request, _ in EXAMPLES]


def carried(value: Any) -> Any:
    """What arrives of a value that an engine's channel carries as JSON."""
    return json.loads(json.dumps(value))


def test_every_operation_has_an_example_and_a_method() -> None:
    assert {type(request) for request, _ in EXAMPLES} == set(get_args(ops.Request))
    assert len(set(NAMES)) == len(NAMES)
    assert all(callable(getattr(Receiver, name)) for name in NAMES)


@pytest.mark.parametrize(("request_", "reply"), EXAMPLES, ids=NAMES)
def test_there_and_back(request_: ops.Operation[Any], reply: ops.Reply) -> None:
    operation, arguments = carried(ops.encode_request(request_))
    assert operation == request_.name
    assert ops.decode_request(operation, arguments) == request_
    answers = carried([ops.encode_answer(lambda: reply), ops.encode_answer(refuse)])
    found, error = ops.decode_answers(request_, answers)
    assert (type(found), found) == (type(reply), reply)
    assert type(error) is Conflict
    assert error.operands == {"staged_version": 3}


def refuse() -> ops.Reply:
    raise Conflict("not now", staged_version=3)


def test_a_status_without_a_need_does_not_mention_it() -> None:
    report = ops.RankReport(state=STATE, status=STATUS)
    assert "awaits" not in ops.encode_answer(lambda: report)["ok"]["status"]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("explode", {}),
        ("transfer", {}),  # a vLLM worker's own
        ("__init__", {}),
        (None, {}),
        ([], {}),
        ("status", {"extra": 1}),
        ("status", None),
        ("status", []),
        ("poll", {}),
        ("poll", {"part": "1"}),
        ("begin", {"part": {}, "path": "x", "now": 0.0}),
    ],
)
def test_what_is_no_operation_is_refused(operation: Any, arguments: Any) -> None:
    with pytest.raises(DeltaError, match="invalid operation") as caught:
        ops.decode_request(operation, arguments)
    assert caught.value.engine_state == "unchanged"


def test_a_bug_becomes_an_error_of_the_tree() -> None:
    def fail() -> ops.Reply:
        raise KeyError("w")

    [error] = ops.decode_answers(ops.GetPlan(), carried([ops.encode_answer(fail)]))
    assert type(error) is DeltaError
    assert "KeyError" in error.message


def test_sglang_carries_an_operation_in_a_manifest() -> None:
    request = ops.GetItem(key="k")
    operation, arguments = ops.encode_request(request)
    call = rpc.Call(call="c", operation=operation, arguments=carried(arguments))
    assert call.request() == request


def vllm() -> Any:
    async def call_utility_async(method: str, *args: Any) -> Any:
        raise AssertionError("it was sent")

    return VllmEngine(
        SimpleNamespace(
            pause_generation=None,
            engine_core=SimpleNamespace(call_utility_async=call_utility_async),
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(_api_process_count=1, nnodes=1, use_ray=False),
            ),
        )
    )


def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Output:
        pass

    structs = SimpleNamespace(
        UpdateWeightFromDiskReqOutput=Output, UpdateWeightFromDiskReqInput=None
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)
    dispatcher = SimpleNamespace(_mapping={Output: None})
    return rpc.Channel(SimpleNamespace(_result_dispatcher=dispatcher))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("request_", ["status", {"operation": "status"}, None, STATUS])
def test_adapters_send_nothing_else(
    engine: str, request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = vllm() if engine == "vllm" else sglang(monkeypatch)
    with pytest.raises(TypeError, match="not an operation"):
        asyncio.run(sender.call(request_))


def test_an_operation_for_an_adapter_there_and_back() -> None:
    request = ops.GetDigest(scan=False, adapter="tiny")
    operation, arguments = carried(ops.encode_request(request))
    assert (operation, arguments) == ("digest", {"scan": False, "adapter": "tiny"})
    assert ops.decode_request(operation, arguments) == request


def test_an_operation_for_the_model_names_no_adapter() -> None:
    assert ops.encode_request(ops.GetDigest(scan=False)) == ("digest", {"scan": False})
