"""Keep engines at the weights of a Hugging Face `Trainer`: the callback `DeltaSyncCallback`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from delta_sender.models import Checkpoint, any_rank, named_tensors
from delta_sender.models.model_sync import on_all_ranks, sync_model
from delta_sender.options import SenderOptions
from delta_sender.publish.multi_sender import MultiSender
from delta_sender.results import SyncReport, figures, raising_as_one


class DeltaSyncCallback(TrainerCallback):  # type: ignore[misc]
    """Sync engines with the model of `transformers.Trainer`, and of every TRL trainer.

    The first sync is at the beginning of the training, so that an engine that cannot be reached or
    holds another model is found before; then one follows every `every` optimizer steps, and the
    last at the end. The main process sends; on all others the callback takes part in gathering
    sharded parameters. A sync that fails ends the training on all of them.

    All trainings of a callback are of one run, which can replace what it has sent. With the option
    `state` those of later processes are, too: a training that is resumed from a checkpoint needs
    it, or ``full="allow"``, if the engines hold the weights of a later step.

    The figures of a sync are in the trainer's next log, as ``delta/version``, ``delta/bytes``,
    ``delta/density``, ``delta/seconds`` and ``delta/pause_ms``: into ``state.log_history``, and
    into the logs of every callback that comes after this one. Callbacks of ``report_to`` come
    before it, unless it is inserted as the first:
    ``trainer.callback_handler.callbacks.insert(0, callback)``.

    Args:
        url: The engine's root, or those of several.
        base: The checkpoint that the engines hold when the training begins, as a folder or by
            name. None: the folder that the model was loaded from; if it was not, what the model
            holds when the training begins, in `dtype`.
        every: Optimizer steps from one sync to the next.
        dtype: The model is cast to it, if there is no base.
        **options: See `MultiSender`.

    Attributes:
        reports: What the last sync returned, by url.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        base: Checkpoint | None = None,
        every: int = 1,
        *,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}, but must be 1 or more")
        self._urls = [url] if isinstance(url, str) else list(url)
        self._base, self._every, self._dtype = base, every, dtype
        SenderOptions(**options)  # refuses what it does not know
        self._options = options
        self._sender: MultiSender | None = None
        self._run: tuple[str, int] | None = None  # of the training before
        self._synced_step = -1
        self._unlogged: dict[str, float] = {}
        self.reports: Mapping[str, SyncReport] = {}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **others: Any
    ) -> None:
        """Make the sender, and sync."""
        self.close()
        if self._base is None and state.is_world_process_zero:
            loaded_from = Path(str(getattr(model, "name_or_path", "") or "-"))
            self._base = loaded_from if loaded_from.is_dir() else None
        if not any_rank(state.is_world_process_zero and self._base is None):
            on_all_ranks(lambda: self._open(state, self._base))
        else:
            tensors = on_all_ranks(lambda: named_tensors(model, dtype=self._dtype))

            def read() -> None:
                try:
                    if state.is_world_process_zero:
                        self._open(state, tensors)
                    else:
                        tensors.take_part()
                finally:
                    tensors.close()

            on_all_ranks(read, lambda: not tensors.is_broken)
        self._sync(state, model)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: nn.Module, **others: Any
    ) -> None:
        """Sync, if it is time."""
        if state.global_step % self._every == 0:
            self._sync(state, model)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: nn.Module, **others: Any
    ) -> None:
        """Sync the last steps, or the best model if the trainer has loaded it, and close."""
        if state.global_step != self._synced_step or args.load_best_model_at_end:
            self._sync(state, model)
        self.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Add the last sync's figures to the trainer's log."""
        if self._unlogged and logs is not None:
            logs.update(self._unlogged)
            if state.log_history:
                state.log_history[-1].update(self._unlogged)
            self._unlogged = {}

    def close(self) -> None:
        """Close the sender, and release the engines; also done by a sync that fails.

        If a training fails otherwise, call it, or the engines are this run's until the next
        training of this callback or the end of the process.
        """
        if self._sender is not None:
            self._run = self._sender.run, self._sender.epoch
            self._sender.close()
            self._sender = None

    def _open(self, state: Any, base: Any) -> None:
        if state.is_world_process_zero:
            continues = self._run if self._options.get("state") is None else None
            self._sender = MultiSender(self._urls, base, continues=continues, **self._options)

    def _sync(self, state: Any, model: nn.Module) -> None:
        began = time.monotonic()
        base = self._base if self._sender is not None else None
        form = self._options.get("quantize")
        try:
            with raising_as_one(len(self._urls)):
                reports = sync_model(self._sender, model, base, dtype=self._dtype, quantize=form)
        except BaseException:
            self.close()
            raise
        self._synced_step = state.global_step
        if reports is not None:
            self.reports = reports
            self._note(time.monotonic() - began)

    def _note(self, seconds: float) -> None:
        """Add a sync to those that the next log has: bytes and seconds add up."""
        found = {**figures(self.reports.values()), "seconds": seconds}
        for name in ("bytes", "seconds", "pause_ms"):
            found[name] += self._unlogged.get(f"delta/{name}", 0)
        self._unlogged = {f"delta/{name}": value for name, value in found.items()}
