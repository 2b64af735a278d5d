"""SGLang's pipeline stages carry out a delta operation together, when nothing is between them.

Every stage runs the same loop on the same lists of requests, one list per iteration: it handles a
list, sends it to the next stage, launches a micro-batch, and takes the results of an older one. So
all stages schedule alike without asking each other. A stage that asks the others would deadlock for
two reasons: it has not sent the list on yet, and the next stage might wait for results that pass
this stage only in its next iteration.

So a delta operation, and everything behind it, is held until the list is sent, and nothing is
scheduled while it is held. After as many iterations as there are micro-batches, all results have
passed all stages. Then no stage waits for a neighbour's message, and every stage carries out the
operation in the same iteration.

SGLang's loop for stages keeps scheduling when the engine is paused, and its retraction knows only
one micro-batch. So a pause is held too, and nothing is scheduled until generation continues.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from engine_ext.adapters.sglang.names import LOAD_FORMAT


def hold_operations() -> None:
    """Let this process's scheduler, one of a pipeline's, hold operations and pauses as above.

    Call it before the scheduler serves.
    """
    from sglang.srt.managers.io_struct import PauseGenerationReqInput, UpdateWeightFromDiskReqInput
    from sglang.srt.managers.schedule_batch import NextBatchPlan
    from sglang.srt.managers.scheduler import Scheduler

    handle_now = Scheduler.process_input_requests
    plan_now = Scheduler.get_next_batch_to_run
    pause_now = Scheduler.pause_generation
    drained_now = Scheduler._pp_microbatches_drained
    held: list[Any] = []

    def must_wait(request: Any) -> bool:
        if isinstance(request, UpdateWeightFromDiskReqInput):
            return bool(request.load_format == LOAD_FORMAT)
        return isinstance(request, PauseGenerationReqInput)

    @functools.wraps(handle_now)
    def process_input_requests(scheduler: Any, requests: Sequence[Any]) -> None:
        count = 0
        while not held and count < len(requests) and not must_wait(requests[count]):
            count += 1
        held.extend(requests[count:])
        handle_now(scheduler, requests[:count])

    @functools.wraps(plan_now)
    def get_next_batch_to_run(scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
        # Here the list has been sent on.
        if held and all(batch is None for batch in scheduler.mbs):
            requests = held[:]
            held.clear()
            handle_now(scheduler, requests)
            running_batch, last_batch = scheduler.running_batch, scheduler.last_batch
        if held or scheduler._engine_paused:
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return plan_now(scheduler, running_batch=running_batch, last_batch=last_batch)

    @functools.wraps(pause_now)
    def pause_generation(scheduler: Any, request: Any) -> Any:
        if request.mode == "retract":
            _gather_requests(scheduler)
        return pause_now(scheduler, request)

    @functools.wraps(drained_now)
    def microbatches_drained(scheduler: Any) -> bool:
        # A prefill's requests join the running ones only when its micro-batch is scheduled again.
        prefilled = filter(None, scheduler.last_mbs)
        finished = all(request.finished() for batch in prefilled for request in batch.reqs)
        return finished and bool(drained_now(scheduler))

    Scheduler.process_input_requests = process_input_requests
    Scheduler.get_next_batch_to_run = get_next_batch_to_run
    Scheduler.pause_generation = pause_generation
    Scheduler._pp_microbatches_drained = microbatches_drained


def _gather_requests(scheduler: Any) -> None:
    """Move the requests of all micro-batches to the one whose turn it is, for SGLang's retraction.

    No micro-batch must be in flight.
    """
    prefilled = [batch for batch in scheduler.last_mbs if batch and batch.forward_mode.is_extend()]
    # A prompt in chunks can be in several batches.
    found = {id(r): r for batch in [*scheduler.running_mbs, *prefilled] for r in batch.reqs}
    for batch in scheduler.running_mbs:
        batch.reqs = []
        batch.batch_is_full = False
    scheduler.running_batch.reqs = list(found.values())
    scheduler.last_mbs = [None] * len(scheduler.last_mbs)
    scheduler.last_batch = None
