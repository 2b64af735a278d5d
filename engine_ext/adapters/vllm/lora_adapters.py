"""The own tensors of the LoRA adapters that a vLLM worker has loaded.

vLLM reads an adapter's folder whenever it loads the adapter: if it is asked to, and again on the
next request after the adapter has left the cache of ``--max-cpu-loras``. A sync's values must
outlive that, so every load passes through `LoadedAdapters`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from engine_ext.errors import AdapterNotLoaded
from engine_ext.sync import AdapterStore

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Adapter:
    """One adapter: the contents of its folder, and vLLM's function that makes a model of them."""

    store: AdapterStore
    make: Callable[[], Any]


class LoadedAdapters:
    """Keeps the tensors of every adapter that one worker loads; an `AdapterStores`.

    Once a request of delta sync has named an adapter, it is loaded from its store. Only the caller
    can have its folder read again, by loading it with ``load_inplace``; it starts anew then, at
    version 0. vLLM repeats that flag with each later request, where it is ignored.

    Args:
        manager: vLLM's manager of the worker's adapters; some of its methods are replaced.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._load, self._apply = manager._load_adapter, manager._apply_adapters
        self._remove = manager.remove_adapter
        self._adapters: dict[tuple[int, str], _Adapter] = {}  # by vLLM's id, and by name
        self._requests: dict[str, Any] = {}  # the last one that has loaded an adapter, by name
        self._unloaded: set[tuple[int, str]] = set()  # running requests might still use them
        # The last arguments of the constructor of vLLM's class, and that call with other tensors.
        self._given: list[tuple[Tensors, Callable[[Tensors], Any]]] = []
        manager._lora_model_cls = self._observed(manager._lora_model_cls)
        manager._load_adapter, manager._apply_adapters = self._load_adapter, self._apply_adapters
        manager.remove_adapter = self._remove_adapter

    # For the receivers ------------------------------------------------------------------------

    def find(self, name: str) -> AdapterStore:
        """Return the store of an adapter, read from its folder if it has left vLLM's cache.

        Raises:
            AdapterNotLoaded: no adapter has this name, or it cannot be updated.
        """
        request = self._requests.get(name)
        if request is None:
            raise AdapterNotLoaded(f"no adapter {name} is loaded", adapter=name)
        named = {key for key in self._adapters if key[1] == name} - self._unloaded
        if len(named) > 1:
            raise AdapterNotLoaded(
                f"adapter {name} cannot be updated: it is loaded under several ids", adapter=name
            )
        others = {n for i, n in self._adapters if i == request.lora_int_id} - {name}
        if others:  # several HTTP processes have numbered their adapters independently
            raise AdapterNotLoaded(
                f"adapter {name} cannot be updated: vLLM mistakes it for {', '.join(others)}, "
                f"which has the same lora_int_id {request.lora_int_id}",
                adapter=name,
            )
        if self._manager._adapter_manager._is_moe:
            raise AdapterNotLoaded(
                f"adapter {name} cannot be updated: the model has experts, whose LoRA layers need "
                "a GPU and were not tested",
                adapter=name,
            )
        if _key(request) not in self._adapters:
            try:
                self._load_adapter(request)
            except Exception as error:
                why = f"adapter {name} has left vLLM's cache, and cannot be read again: {error}"
                raise AdapterNotLoaded(why, adapter=name) from error
        return self._adapters[_key(request)].store

    def loaded(self) -> Sequence[AdapterStore]:
        """Return the stores of the adapters that have names."""
        found = map(self._adapters.get, map(_key, self._requests.values()))
        return [adapter.store for adapter in found if adapter is not None]

    def unload(self, name: str) -> None:
        """Take no more syncs for an adapter. Running requests might still need its store."""
        request = self._requests.pop(name, None)
        if request is None:
            return
        self._unloaded.add(_key(request))
        adapter = self._adapters.get(_key(request))
        if adapter is not None:
            adapter.store.receiver = None  # and with it staged parts and the undo log

    # In place of vLLM's methods ---------------------------------------------------------------

    def _load_adapter(self, request: Any) -> Any:
        if self._is_synced(request) and not request.load_inplace:
            return self._adapters[_key(request)].make()
        self._given.clear()
        model = self._load(request)
        if not self._given:
            raise RuntimeError("vLLM has loaded an adapter in a way that delta updates do not know")
        self._keep(request, *self._given.pop())
        # A folder that was never synced can be read again.
        cached = {request.lora_int_id, *self._manager.list_adapters()}
        kept = self._adapters.items()
        self._adapters = {k: a for k, a in kept if k[0] in cached or a.store.synced}
        return model

    def _apply_adapters(self, requests: Any) -> Any:
        """Activate the adapters of a batch; its requests repeat the flags of the first load."""

        def settled(request: Any) -> Any:
            if request and request.load_inplace and self._is_synced(request):
                return msgspec.structs.replace(request, load_inplace=False)
            return request

        return self._apply({settled(request) for request in requests})

    def _remove_adapter(self, number: int) -> Any:
        self._adapters = {key: a for key, a in self._adapters.items() if key[0] != number}
        self._unloaded = {key for key in self._unloaded if key[0] != number}
        self._requests = {n: r for n, r in self._requests.items() if r.lora_int_id != number}
        return self._remove(number)

    def _observed(self, base: Any) -> Any:
        """Return vLLM's class of adapters, whose constructor records its arguments."""

        def from_lora_tensors(
            cls: Any, lora_model_id: int, tensors: Tensors, *args: Any, **options: Any
        ) -> Any:
            def make(values: Tensors) -> Any:
                return base.from_lora_tensors(lora_model_id, values, *args, **options)

            # vLLM changes some in place. Inference tensors could not be written to later.
            with torch.inference_mode(False):
                kept = {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()}
                kept = {name: tensor.contiguous() for name, tensor in kept.items()}
            self._given = [(kept, make)]
            return make(tensors)

        return type(base.__name__, (base,), {"from_lora_tensors": classmethod(from_lora_tensors)})

    # ------------------------------------------------------------------------------------------

    def _is_synced(self, request: Any) -> bool:
        """Return whether a request is for an adapter whose store counts, not its folder."""
        adapter = self._adapters.get(_key(request))
        return adapter is not None and adapter.store.synced

    def _keep(self, request: Any, tensors: Tensors, load: Callable[[Tensors], Any]) -> None:
        number: int = request.lora_int_id

        def make() -> Any:
            model = load({name: tensor.clone() for name, tensor in tensors.items()})
            model.is_3d_lora_weight = request.is_3d_lora_weight
            return model

        store = AdapterStore(request.lora_name, tensors, lambda: self._install(number, make))
        self._adapters[_key(request)] = _Adapter(store, make)
        if _key(request) not in self._unloaded:  # else a request that still runs has read it again
            self._requests[request.lora_name] = request

    def _install(self, number: int, make: Callable[[], Any]) -> None:
        """Replace the adapter that vLLM has cached, if it has one; else it is loaded when needed.

        If this fails half-way, the adapter has left the cache.
        """
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed

        if number not in self._manager.list_adapters():
            return
        cache = self._manager._adapter_manager
        is_active = number in cache._active_adapters
        is_pinned = number in cache._registered_adapters.pinned_items
        with gpu_sync_allowed():
            model = make()
            cache.remove_adapter(number)
            cache.add_adapter(model)
            if is_active:
                cache.activate_adapter(number)
            if is_pinned:
                cache.pin_adapter(number)


def _key(request: Any) -> tuple[int, str]:
    return request.lora_int_id, request.lora_name
