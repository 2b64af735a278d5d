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
from engine_ext.sync import AdapterReceivers, Receiver

PART = PartId(version=2, base_version=1, identity="i", sync_id="s", part=1, num_parts=3)
STATE = ops.RankState(version=1, engine_state="certain", resume_owed=False)
GRANT = ops.LeaseGrant(granted=False, holder="h")
COMMITTED = ops.CommittedSync(
    version=2, base_version=1, run="r", base_run=None, sync_id=None, full=False, apply="scatter",
    parts=1, nnz=2, tensors=1, elements=9, commit_ms=1.5, rollback=True, digest="00",
)  # fmt: skip
SENDER = RunSender(run="r", epoch=2, host="h", pid=3)
OWNER = ops.RunOwner(run="r", epoch=2, host="h", pid=3, since=1.5)
STAGED = ops.StagedSync(
    version=2, base_version=None, sync_id="s", full=True, num_parts=None, parts=[0, 2],
    run="r", owner=OWNER, since=1.5,
)  # fmt: skip
STATUS = ops.RankStatus(
    version=1, engine_state="uncertain", resume_owed=True, asleep=False, foreign=None,
    run="r", owner=OWNER, loaded=False, staged=STAGED, last_sync=COMMITTED, can_roll_back=False,
    apply="scatter", certification={"exact": 3}, uncertified={"w": "why"}, digest="00",
    scrub=ops.ScrubState(passes=2, passed_at=1.5, mismatched=["w"], error=None),
)  # fmt: skip
PAUSE = ops.CallerPause(since=1.5, began=0.5, by="10.0.0.3")
RECORD = ops.SyncRecord(at=1.5, outcome="committed", version=2, timings_ms={"stage_ms": 0.5})
LOOK = ops.LogLook(at=1.5, newest=3, behind=1, problem=None, error={"type": "E"}, asleep=False)

# Each operation with one of its replies.
EXAMPLES: list[tuple[ops.Operation[Any], ops.Reply]] = [
    (ops.GetStatus(), STATUS),
    (ops.GetState(), STATE),
    (
        ops.AcquireLease(holder="h", resumes=True, instead_of=None),
        ops.EngineLease(grant=GRANT, state=STATE),
    ),
    (ops.ReleaseLease(holder="h", owed=True), ops.Reply()),
    (ops.RecordPause(pause=PAUSE, begins=True), ops.CallerPaused(pause=PAUSE)),
    (ops.AcquireLogLease(holder="h", instead_of="d"), GRANT),
    (ops.ReleaseLogLease(holder="h"), ops.Reply()),
    (ops.AcquireFollowLease(holder="h", instead_of="d"), GRANT),
    (
        ops.ShareFollowing(follower="n", look=LOOK, was_read=True, pins=True, pin=3),
        ops.Following(
            name="n", process="p", pin=3, look=LOOK, was_read=True, failures=2, in_a_row=1
        ),
    ),
    (
        ops.ShareLogRecords(version=3, seen={"weight_v000003": "ab"}),
        ops.LogRecords(records={"weight_v000003": "ab"}),
    ),
    (ops.FindUnseen(version=1, run="r", identities=["a", "b"]), ops.Unseen(unseen=["b"])),
    (
        ops.ClaimRun(sender=SENDER, takeover=True, now=1.5, at=2.5),
        ops.RunClaimed(owner=OWNER, highest=4),
    ),
    (ops.ReleaseRun(sender=SENDER), ops.RunReleased(released=True)),
    (
        ops.BeginPart(part=PART, path="/spool/part", now=1.5),
        ops.PartBegun(admission="new"),
    ),
    (ops.PollPart(part=PART), ops.PartProgress(done=True)),
    (ops.SettlePart(part=PART, staged=True), ops.PartSettled(complete=True, prepared=True)),
    (ops.PrepareSync(part=PART), ops.SyncPrepared(done=False, rebuilt=2)),
    (ops.DropSync(version=1, sync_id="s"), ops.Reply()),
    (ops.CommitSync(version=2, sync_id=None), COMMITTED),
    (ops.TakeScrubFindings(), ops.ScrubFindings(mismatched=["w"])),
    (ops.RollBack(), ops.RolledBack(version=1, rolled_back=2, commit_ms=1, digest="00", run="r")),
    (
        ops.RecordPull(checkpoint="/c", pulled=ops.Pulled(source="/s", target=3, sync_id="s")),
        ops.Reply(),
    ),
    (ops.FindPull(checkpoint="/c"), ops.Pulled()),
    (ops.GetPlan(), ops.RankPlan(tensors=[{"name": "w", "live": ["w"]}])),
    (
        ops.GetDigest(scan=True),
        ops.RankDigest(version=1, tensors={"w": "00"}, tracked={"w": "01"}, corrupted=["w"]),
    ),
    (ops.RecordSync(record=RECORD), RECORD),
    (ops.GetHistory(), ops.History(syncs=[RECORD])),
    (ops.UnloadAdapter(adapter="a"), ops.Reply()),
]
NAMES = [request.name for request, _ in EXAMPLES]


def carried(value: Any) -> Any:
    """What arrives of a value that an engine's channel carries as JSON."""
    return json.loads(json.dumps(value))


def test_every_operation_has_an_example_and_a_method() -> None:
    assert {type(request) for request, _ in EXAMPLES} == set(get_args(ops.Request))
    assert len(set(NAMES)) == len(NAMES)
    serving = {name: AdapterReceivers if name == "unload_adapter" else Receiver for name in NAMES}
    assert all(callable(getattr(receiver, name)) for name, receiver in serving.items())


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
    assert "awaits" not in ops.encode_answer(lambda: STATUS)["ok"]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("explode", {}),
        ("serving", {}),  # SGLang's own
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


def test_sglangs_scheduler_takes_one_more() -> None:
    operation, arguments = ops.encode_request(rpc.GetServing())
    call = rpc.Call(call="c", operation=operation, arguments=carried(arguments))
    assert call.request() == rpc.GetServing()
    reply = rpc.Serving(idle=True, weight_version="3")
    answers = carried([ops.encode_answer(lambda: reply)])
    assert ops.decode_answers(rpc.GetServing(), answers) == [reply]


def vllm() -> Any:
    async def collective_rpc(method: str, args: Any) -> list[Any]:
        raise AssertionError("it was sent")

    return VllmEngine(
        SimpleNamespace(
            pause_generation=None,
            resume_generation=None,
            collective_rpc=collective_rpc,
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
