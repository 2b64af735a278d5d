"""verl's checkpoint engine `delta_http`: rollout servers get what changed.

Importing this registers it; verl does so for
``rollout.checkpoint_engine.custom_backend_module=delta_sender.integrations.verl_checkpoint_engine``.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from delta_sender.diff.observations import UNCHANGED
from delta_sender.diff.observations import count as count_rounded
from delta_sender.diff.quantize import Quantizer
from delta_sender.models import empty_model, world_failure
from delta_sender.models.model_state import live_buffers
from delta_sender.models.model_sync import on_all_ranks
from delta_sender.models.reader import is_named, refuse_left_out
from delta_sender.options import DEFAULTS
from delta_sender.publish.multi_sender import MultiSender
from delta_sender.results import RankError, SyncError, SyncReport, figures, raising_as_one
from delta_sender.sharded import Shard, ShardedSender, model_shards
from engine_ext.files import read_checkpoint

logger = logging.getLogger(__name__)

BACKEND: Final = "delta_http"
# As verl names the Ray actors that serve, one per replica; not those of reward and teacher models.
_SERVER: Final = re.compile(r"(?:vllm|sglang)_server_\d+_0")
_TIED: Final = "lm_head.weight"
# In names of a model with adapters that are not merged.
_ADAPTER: Final = re.compile(r"\.(base_layer|lora_\w+)\.")
_MERGE: Final = (
    "verl gives the base's weights and not what LoRA has trained: set "
    "actor_rollout_ref.model.lora.merge=True"
)

_LIVE: Final = "send_weights verl's engine, whose module it is then read from"
_WARNS_AFTER: Final = DEFAULTS["unchanged_warning"]


@CheckpointEngineRegistry.register(BACKEND)
class DeltaHTTPCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Sends deltas from the actor's rank 0 to the rollouts' HTTP servers.

    All of the actor's ranks read the weights, since they are gathered by all; rollout workers have
    nothing to do. The servers are started with delta updates enabled. Given verl's engine instead
    of its weights, of an FSDP2 model without adapters, and one server, every rank compares and
    sends its own shards, and nothing is gathered; see `ShardedSender`.

    Args:
        bucket_size: Not used: what changed is far smaller than verl's buckets. See the option
            ``bucket_bytes`` of the senders.
        is_master: Whether this is the rank that sends.
        base: Folder of the checkpoint that the servers are started with. Servers that are started
            with other weights are refused, unless `options` has ``full="allow"``: they get a full
            sync first.
        frozen: Patterns of names, as of `fnmatch`, of tensors that verl leaves out because they are
            not trained; they are then the base's.
        urls: The servers' roots. None: verl's own replicas, found by the names of their Ray actors
            before every sync.
        **options: See `MultiSender`; but all servers are waited for, unless `lag_limit` is given
            or they commit together.

    Attributes:
        wire_format: Makes a rollout's adapter take an empty stream for weights that are unchanged:
            it notes verl's step, and leaves weights and cache alone.
        reports: What the last sync returned, by url; on the ranks that send.
    """

    wire_format = "delta_flush"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        base: str | os.PathLike[str],
        frozen: Sequence[str] = (),
        urls: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self._is_master, self._base, self._frozen = is_master, Path(base), frozen
        self._urls = None if urls is None else list(urls)
        # This class warns of syncs without a change, and names verl's own setting.
        self._warns_after = int(options.get("unchanged_warning", _WARNS_AFTER))
        self._options = {**options, "unchanged_warning": 0}
        if options.get("commit", "each") == "each":
            # For verl every server has the weights once `send_weights` returns, and is resumed.
            self._options.setdefault("lag_limit", None)
        self._opened: list[str] | None = None
        self._run: tuple[str, int] | None = None  # of the sender before
        self._sender: MultiSender | ShardedSender | None = None
        self._dtypes: dict[str, torch.dtype | None] = {}  # None: as it is given
        self._scale_of: dict[str, str] = {}  # of weights to quantise
        self.reports: dict[str, SyncReport] = {}

    def prepare(self) -> dict[str, Any]:
        """Return the urls that were given."""
        return {"urls": self._urls}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the servers' urls for every rank of the actor, and nothing for the rollouts.

        Raises:
            ValueError: No url was given, and no server is found.
        """
        urls = metadata[0]["urls"] or server_urls()
        if not urls:
            raise ValueError(f"{BACKEND}: no urls are given, and Ray has no rollout server")
        return {"urls": [urls] * actor_wg_world_size}, {}

    def init_process_group(self, urls: Sequence[str] | None = None) -> None:
        """Take the urls of `build_topology`; None on rollout workers."""
        if urls is not None:
            self._urls = list(urls)

    def finalize(self) -> None:
        """Do nothing: the sender remembers what the servers hold until the next sync."""

    async def send_weights(
        self, weights: Any, global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Send what changed since the last sync; on every rank of the actor.

        Args:
            weights: Whole tensors by the checkpoint's names, as verl's engines yield them; or an
                engine: its `module`'s shards are sent, if the class can, or else its
                `get_per_tensor_param` is called.
            global_steps: verl's step. Versions count on their own; ranks that send shards check
                that they are at the same one.

        Returns:
            Figures for verl's log, on the actor's rank 0.

        Raises:
            SyncError: A server refused, see `MultiSender.sync` and `ShardedSender.sync`.
            ValueError: The tensors are not the base's, one is left out that `frozen` does not
                name, or adapters are not merged into them.
            RuntimeError: Another rank has failed.
        """
        if self._sends_shards(weights):
            return self._sync_shards(weights.module, global_steps)
        live = getattr(weights, "module", None)
        source = on_all_ranks(lambda: self._tensors_of(weights))
        return on_all_ranks(lambda: self._send(source, live))

    def receive_weights(self, global_steps: int | None = None) -> Iterator[Any]:
        """Return nothing: the server of this worker has the weights."""
        return iter(())

    def close(self) -> None:
        """Close the sender, and release the servers."""
        if self._sender is not None:
            self._run = self._sender.run, self._sender.epoch
            self._sender.close()
        self._sender = self._opened = None

    def _sends_shards(self, weights: Any) -> bool:
        """Return whether this is an engine whose ranks can send their own shards."""
        model = getattr(weights, "module", None)
        common = self._options.keys() <= inspect.signature(ShardedSender).parameters.keys()
        together = self._options.get("commit") == "all_or_none"
        urls = self._urls is not None and (together or len(self._urls) == 1)
        return (
            isinstance(model, FSDPModule) and not hasattr(model, "peft_config") and common and urls
        )

    def _sync_shards(self, model: Any, step: int | None) -> dict[str, float] | None:
        began = time.monotonic()

        def read() -> tuple[dict[str, torch.Tensor], list[Shard]]:
            base = dict(read_checkpoint(self._base))
            return base, model_shards(model, base)

        base, shards = on_all_ranks(read)
        assert self._urls is not None
        if not isinstance(self._sender, ShardedSender) or self._opened != self._urls:
            self.close()
            run = self._run
            self._sender = ShardedSender(self._urls, shards, base, continues=run, **self._options)
            self._opened = list(self._urls)
        try:
            with raising_as_one(len(self._urls)):
                self._sender.sync(shards, step=step)
        except BaseException as error:
            # After a server's refusal, which is the same on all ranks, the sender can continue. In
            # all other cases the ranks might be apart for good, and all of them make a new one.
            if not isinstance(error, SyncError) or isinstance(error, RankError):
                self.close()
            raise
        self.reports = dict(self._sender.reports)
        return self._ended(began) if self._is_master else None

    def _tensors_of(self, weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(self._sender, ShardedSender):
            self.close()  # on all ranks
        if hasattr(weights, "get_per_tensor_param"):
            weights, peft_config = weights.get_per_tensor_param()
            if peft_config is not None:
                raise ValueError(_MERGE)
        return _together(weights)

    def _send(
        self, source: Iterator[tuple[str, torch.Tensor]], live: nn.Module | None
    ) -> dict[str, float] | None:
        try:
            return self._sync(source, live) if self._is_master else None
        finally:
            for _ in source:  # other ranks might be gathering it
                pass

    def _sync(
        self, source: Iterable[tuple[str, torch.Tensor]], live: nn.Module | None
    ) -> dict[str, float]:
        began, sender = time.monotonic(), self._open()
        with raising_as_one(len(sender.versions)):
            with closing(self._checkpoint_tensors(source, live)) as tensors:
                self.reports = sender.sync(tensors)
        return self._ended(began)

    def _ended(self, began: float) -> dict[str, float]:
        """Warn of syncs without a change, and return the figures of the last one."""
        reports = self.reports.values()
        unchanged = max(r.unchanged_in_a_row for r in reports)
        if unchanged and unchanged == self._warns_after:
            # Adapters under Megatron have the names of the base, and verl does not pass them on.
            logger.warning(f"{UNCHANGED}. With LoRA, {_MERGE}", unchanged)
        found = {**figures(reports), "seconds": time.monotonic() - began}
        return {f"{BACKEND}/{name}": value for name, value in found.items()}

    def _open(self) -> MultiSender:
        """Return the sender of the urls; servers that came or went make a new one."""
        if self._urls is None:
            raise RuntimeError("verl has not called init_process_group")
        if not isinstance(self._sender, MultiSender) or self._opened != self._urls:
            self.close()
            stored = {name: tensor.dtype for name, tensor in read_checkpoint(self._base)}
            self._dtypes = {**stored}
            if (form := self._options.get("quantize")) is not None:
                # Given in the trainer's own precision; the sender quantises them.
                self._scale_of = Quantizer(form, stored).scale_of
                for name, scale in self._scale_of.items():
                    del self._dtypes[scale]
                    self._dtypes[name] = None
            continues = self._run if self._options.get("state") is None else None
            self._sender = MultiSender(self._urls, self._base, continues=continues, **self._options)
            self._opened = list(self._urls)
        return self._sender

    def _checkpoint_tensors(
        self, source: Iterable[tuple[str, torch.Tensor]], live: nn.Module | None
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield copies in the base's dtypes: verl frees a tensor when it yields the next.

        Weights to quantise stay as verl gives them. Buffers that it leaves out are those of `live`.
        """
        is_tied = json.loads((self._base / "config.json").read_bytes()).get("tie_word_embeddings")
        absent = set(self._dtypes)
        for name, tensor in source:
            if name in self._dtypes:
                absent.discard(name)
                yield name, self._copied(name, tensor)
            elif _ADAPTER.search(name):
                raise ValueError(f"{name}: {_MERGE}")
            elif not (is_tied and name == _TIED):
                raise ValueError(f"{name}: not in {self._base}")
        if not absent:
            return
        buffers = live_buffers(live) if isinstance(live, nn.Module) else {}
        for name in absent & buffers.keys():
            absent.discard(name)
            yield name, self._copied(name, buffers[name])
        left = sorted(absent & self._buffer_names())
        refuse_left_out(left, left, self._frozen, live=_LIVE)
        stored = dict(read_checkpoint(self._base))
        for name in [name for name in absent if is_named(name, self._frozen)]:
            yield name, stored[name]
            if (scale := self._scale_of.get(name)) is not None:
                yield scale, stored[scale]

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtypes[name]
        if dtype is not None:
            count_rounded(name, tensor, dtype)
        return tensor.detach().to(dtype or tensor.dtype, copy=True)

    def _buffer_names(self) -> set[str]:
        """Return the names of the model's buffers; none if transformers has no such model."""
        try:
            return {name for name, _ in empty_model(self._base).named_buffers()}
        except ValueError:
            return set()


def _together(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights once all ranks ask for them.

    The rank that sends waits for servers before, perhaps longer than a collective of the training's
    group can, in which the others would be.
    """
    world_failure(failed=False)
    yield from weights


def server_urls() -> list[str]:
    """Return the roots of verl's rollout servers, by the names of their Ray actors."""
    import ray

    names = sorted(name for name in ray.util.list_named_actors() if _SERVER.fullmatch(name))
    actors = [ray.get_actor(name) for name in names]
    addresses = ray.get([actor.get_server_address.remote() for actor in actors])
    hosts = [(f"[{host}]" if ":" in host else host, port) for host, port in addresses]
    return [f"http://{host}:{port}" for host, port in hosts]
