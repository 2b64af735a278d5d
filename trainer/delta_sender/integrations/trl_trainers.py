"""Put deltas into TRL's trainers: `DeltaWeightTransfer` and `use_deltas`.

`tests/trainers/test_trl_contract.py` pins the names of TRL that this relies on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from delta_sender import rollouts
from delta_sender.locations import log_location
from delta_sender.models import checkpoint_names, empty_model
from delta_sender.publish.sender import DeltaSender
from delta_sender.results import SyncReport

_EXTRA_FIELDS: Final = 5  # in what `GRPOTrainer._generate` returns


class DeltaWeightTransfer:
    """What ``AsyncGRPOTrainer(weight_transfer=...)`` takes, sending deltas.

    The engine pauses itself while it commits, so `pause` and `resume` do nothing and generation
    continues while weights are compared and sent.

    Args:
        url: The engine's root.
        base: The folder of the checkpoint that the engine was started with; its ``config.json``
            names the model's class. It can be quantised, see `SenderOptions`.
        frozen: Which tensors the trainer leaves out because it does not train them, as
            `AsyncGRPOTrainer` does with parameters that need no gradient; they are then the
            base's. See `checkpoint_names`. Without it, that is an error.
        model: The model that is trained. TRL's trainers send parameters only; persistent buffers
            are read from here.
        **options: See `DeltaSender`.

    Attributes:
        model: As given. `AsyncGRPOTrainer` makes the model of a folder itself: set this to
            ``trainer.model`` then, before training.
        report: What the last sync returned.
    """

    def __init__(
        self,
        url: str,
        base: str | os.PathLike[str],
        *,
        frozen: bool | Sequence[str] = False,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self._frozen, self.model = frozen, model
        self._url, self._base, self._options = url, Path(base), options
        self._sender: DeltaSender | None = None
        self._run: tuple[str, int] | None = None  # of the sender before
        self._names: nn.Module | None = None
        self.report: SyncReport | None = None

    def init_weight_transfer(self) -> None:
        """Read the base, and open the engine's run; after `destroy` the same run again."""
        self.destroy()
        self._names = empty_model(self._base)
        has_file = self._options.get("state") is not None or log_location(self._url) is not None
        continues = None if has_file else self._run
        self._sender = DeltaSender(self._url, self._base, continues=continues, **self._options)

    def pause(self) -> None:
        """Do nothing: committing pauses."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send what changed.

        Raises:
            SyncError: See `DeltaSender.sync`.
            ValueError: The tensors are not the base's, or a tensor is left out.
        """
        if self._sender is None or self._names is None:
            raise RuntimeError("init_weight_transfer was not called")
        try:
            names = checkpoint_names(
                *(iterator, self._names, self._base),
                frozen=self._frozen,
                live=self.model,
                quantize=self._options.get("quantize"),
            )
            with contextlib.closing(names) as given:
                self.report = self._sender.sync(given)
        finally:
            # Other ranks might be gathering what is left.
            for _ in iterator:
                pass

    def resume(self) -> None:
        """Do nothing: the engine has resumed."""

    def destroy(self) -> None:
        """Close the sender, and release the engine."""
        if self._sender is not None:
            self._run = self._sender.run, self._sender.epoch
            self._sender.close()
            self._sender = None


def use_deltas(
    base: str | os.PathLike[str],
    *,
    frozen: bool | Sequence[str] = False,
    **options: Any,
) -> None:
    """Let TRL's trainers in server mode send deltas in place of NCCL broadcasts.

    Call it before the trainer is made. It replaces TRL's client of the vLLM server in this process
    by one that differs only in how weights are sent, and hands it the trainer's model, from which
    buffers are read that TRL does not send. The server is a ``vllm serve`` with
    ``--enable-delta-updates``, and needs no ``--weight-transfer-config``.

    ``trainer.vllm_generation.weight_spans`` has the spans of the completions that were generated
    last, in their order, see `rollouts.spans`. `GRPOTrainer` gives them to reward functions as
    ``weight_spans``, but not with ``tools``, or with a ``rollout_func`` that does not return them.

    Args:
        base: See `DeltaWeightTransfer`.
        frozen: See `DeltaWeightTransfer`.
        **options: See `DeltaSender`.

    Raises:
        ImportError: TRL's client is not where it was in the version that this is written for.
    """
    from trl.generation import vllm_client, vllm_generation
    from trl.trainer.grpo_trainer import GRPOTrainer

    stock = getattr(vllm_client.VLLMClient, "stock_client", vllm_client.VLLMClient)
    client = _client(stock, lambda url: DeltaWeightTransfer(url, base, frozen=frozen, **options))
    for name, module in list(sys.modules.items()):
        if name.startswith("trl."):
            held = vars(module).get("VLLMClient")
            if held is stock or getattr(held, "stock_client", None) is stock:
                module.VLLMClient = client  # type: ignore[attr-defined]
    generation = vllm_generation.VLLMGeneration
    _replace(generation, "sync_weights", _with_model)
    _replace(generation, "generate", _with_spans)
    _replace(GRPOTrainer, "_generate", _with_spans_of)


def _replace(cls: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
    """Replace a method, once."""
    stock = getattr(cls, name)
    if not hasattr(stock, "stock"):
        replacement = wrapped(stock)
        replacement.stock = stock
        setattr(cls, name, replacement)


def _with_model(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return TRL's `sync_weights`, which gives the client the model whose weights it sends."""

    @functools.wraps(stock)
    def sync_weights(generation: Any) -> None:
        client = getattr(generation, "vllm_client", None)  # on the main process, in server mode
        if (transfer := getattr(client, "weight_transfer", None)) is not None:
            transfer.model = generation.model
        stock(generation)

    return sync_weights


def _with_spans(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return TRL's `generate`, which keeps the spans of this process's completions."""

    @functools.wraps(stock)
    def generate(generation: Any, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        from accelerate.utils import broadcast_object_list

        generation.weight_spans = None
        found = stock(generation, prompts, *args, **kwargs)
        if generation.mode == "server":  # the main process has generated for all
            shared = [getattr(getattr(generation, "vllm_client", None), "weight_spans", None)]
            broadcast_object_list(shared, from_process=0)
            first = generation.accelerator.process_index * len(prompts)
            generation.weight_spans = (shared[0] or [])[first : first + len(prompts)]
        return found

    return generate


def _with_spans_of(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the trainer's `_generate`, which passes the spans on to reward functions."""

    @functools.wraps(stock)
    def generate(trainer: Any, prompts: list[Any]) -> Any:
        result = stock(trainer, prompts)
        spans = getattr(getattr(trainer, "vllm_generation", None), "weight_spans", None) or []
        is_one_turn = trainer.rollout_func is None and not trainer.tools
        if is_one_turn and any(spans) and len(spans) == len(result[1]):
            result[_EXTRA_FIELDS]["weight_spans"] = spans
        return result

    return generate


def _client(stock: Any, connect: Callable[[str], DeltaWeightTransfer]) -> type:
    """Return TRL's client with another way of sending weights."""

    class DeltaVLLMClient(stock):  # type: ignore[misc]
        stock_client = stock

        weight_spans: list[Any] | None = None  # of the completions that were generated last
        _found: dict[int, tuple[Any, Any]] | None = None  # while completions are generated
        _collected: list[tuple[str, torch.Tensor]] | None = None  # inside `weight_update`

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            found: dict[int, tuple[Any, Any]] = {}
            self._found = found
            try:
                output = super().generate(*args, **kwargs)
            finally:
                self._found = None
            ids = output["completion_ids"]
            self.weight_spans = [found.get(id(one), (one, None))[1] for one in ids]
            return {**output, "weight_spans": self.weight_spans}

        def _post(self, url: str, **kwargs: Any) -> Any:
            answer = super()._post(url, **kwargs)
            if (found := self._found) is None:  # a chat has no place for spans
                return answer
            choices = answer.get("choices") or []
            # By the very lists that the completions are; several threads can be at it.
            for choice, spans in zip(choices, rollouts.spans({"choices": choices}), strict=True):
                if (ids := choice.get("token_ids")) is not None:
                    found[id(ids)] = ids, spans
            return answer

        def init_communicator(self, device: object = 0) -> None:
            self.weight_transfer = connect(self.base_url)
            self.weight_transfer.init_weight_transfer()

        def update_named_params(
            self, metadata: object, named_params: Iterator[tuple[str, torch.Tensor]]
        ) -> None:
            if self._collected is not None:  # one of several calls: sent together
                self._collected += [(name, t.detach().clone()) for name, t in named_params]
            else:
                self.weight_transfer.send_weights(named_params)

        @contextlib.contextmanager
        def weight_update(self) -> Iterator[None]:
            """Send together what is given inside the block; nothing if that raises."""
            collected: list[tuple[str, torch.Tensor]] = []
            self._collected = collected
            try:
                yield
            finally:
                self._collected = None
            self.weight_transfer.send_weights(iter(collected))

        def reset_prefix_cache(self) -> None:
            """Do nothing: committing drops what was computed with old weights."""

        def close_communicator(self) -> None:
            if (transfer := getattr(self, "weight_transfer", None)) is not None:
                transfer.destroy()

    return DeltaVLLMClient
