"""Which bytes vLLM loads an adapter from, with a stand-in for its managers."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from engine_ext.adapters.vllm.lora_adapters import LoadedAdapters
from engine_ext.errors import AdapterNotLoaded

A = "q_proj.lora_A.weight"


class Request(msgspec.Struct, frozen=True):
    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class Model:
    """vLLM's class of adapters: it scales in place what it is given."""

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.id, self.tensor, self.is_3d_lora_weight = number, tensor, None

    @classmethod
    def from_lora_tensors(
        cls, lora_model_id: int, tensors: dict[str, torch.Tensor], scaling: float
    ) -> Model:
        tensor = tensors[A]
        tensor *= scaling
        return cls(lora_model_id, tensor)


class Cache:
    """The manager of loaded adapters, with room for two of them and one slot."""

    _is_moe = False

    def __init__(self) -> None:
        self.models: dict[int, Model] = {}
        self._active_adapters: list[int] = []
        self._registered_adapters = SimpleNamespace(pinned_items=set())
        self.slot: torch.Tensor | None = None
        self.fails = False

    def remove_adapter(self, number: int) -> bool:
        self._active_adapters = [n for n in self._active_adapters if n != number]
        self._registered_adapters.pinned_items.discard(number)
        return self.models.pop(number, None) is not None

    def add_adapter(self, model: Model) -> None:
        if self.fails:
            raise MemoryError
        self.models[model.id] = model
        while len(self.models) > 2:
            self.remove_adapter(next(iter(self.models)))

    def activate_adapter(self, number: int) -> None:
        self._active_adapters, self.slot = [number], self.models[number].tensor.clone()

    def pin_adapter(self, number: int) -> None:
        self._registered_adapters.pinned_items.add(number)


class Manager:
    """The worker's manager; `folders` are what is on disk."""

    def __init__(self) -> None:
        self._lora_model_cls: Any = Model
        self._adapter_manager = Cache()
        self.folders: dict[str, torch.Tensor] = {}
        self.reads: list[str] = []

    def list_adapters(self) -> set[int]:
        return set(self._adapter_manager.models)

    def _load_adapter(self, request: Any) -> Model:
        self.reads.append(request.lora_path)
        if request.lora_path not in self.folders:
            raise FileNotFoundError(request.lora_path)
        tensors = {A: self.folders[request.lora_path].clone()}
        model: Model = self._lora_model_cls.from_lora_tensors(
            lora_model_id=request.lora_int_id, tensors=tensors, scaling=2.0
        )
        return model

    def add_adapter(self, request: Any) -> None:
        cache = self._adapter_manager
        if request.lora_int_id not in cache.models or request.load_inplace:
            model = self._load_adapter(request)
            cache.remove_adapter(model.id)
            cache.add_adapter(model)
        cache.activate_adapter(request.lora_int_id)

    def _apply_adapters(self, requests: set[Any]) -> None:
        for request in requests:
            self.add_adapter(request)

    def remove_adapter(self, number: int) -> bool:
        return self._adapter_manager.remove_adapter(number)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(gpu_sync_allowed=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "vllm.utils.gpu_sync_debug", module)


@pytest.fixture
def manager() -> Manager:
    manager = Manager()
    manager.folders["/a"] = torch.arange(4.0)
    for name in "bcd":
        manager.folders[f"/{name}"] = torch.full((4,), float(ord(name)))
    return manager


ONE = Request("one", 1, "/a")
OTHERS = [Request(name, 2 + n, f"/{name}") for n, name in enumerate("bcd")]


def sync(adapters: LoadedAdapters, name: str, values: torch.Tensor) -> None:
    """The writes of a commit."""
    store = adapters.find(name)
    store.receiver = store.receiver or SimpleNamespace()  # type: ignore[assignment]
    store.synced = True
    store.tensors[A].copy_(values)
    store.install()


def slot(manager: Manager, request: Request) -> list[float]:
    """The tensors that a step with a request of the adapter computes with."""
    manager._apply_adapters({request})
    assert manager._adapter_manager.slot is not None
    return manager._adapter_manager.slot.tolist()


NEW = torch.tensor([9.0, 8.0, 7.0, 6.0])


def test_the_store_has_what_the_folder_has(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    assert adapters.find("one").tensors[A].tolist() == [0, 1, 2, 3]
    assert slot(manager, ONE) == [0, 2, 4, 6]
    assert [store.name for store in adapters.loaded()] == ["one"]


def test_a_sync_is_in_the_slot_at_once(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    manager._adapter_manager.pin_adapter(1)
    for values in (NEW, NEW + 1):
        sync(adapters, "one", values)
        assert manager._adapter_manager.slot.tolist() == (values * 2).tolist()  # type: ignore[union-attr]
        assert adapters.find("one").tensors[A].tolist() == values.tolist()
    assert manager._adapter_manager._registered_adapters.pinned_items == {1}
    assert manager.reads == ["/a"]


def test_what_is_not_active_does_not_become_so(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    manager.add_adapter(OTHERS[0])
    sync(adapters, "one", NEW)
    assert manager._adapter_manager._active_adapters == [2]
    assert slot(manager, ONE) == (NEW * 2).tolist()


@pytest.mark.parametrize("inference", [False, True])
def test_it_comes_back_from_its_store(manager: Manager, inference: bool) -> None:
    """Also if the folder has other bytes by then, or is gone; vLLM loads within a step."""
    adapters = LoadedAdapters(manager)
    with torch.inference_mode(inference):
        manager.add_adapter(ONE)
    sync(adapters, "one", NEW)
    del manager.folders["/a"]
    for _ in range(2):
        with torch.inference_mode(inference):
            for request in OTHERS:
                slot(manager, request)
            assert 1 not in manager.list_adapters()
            assert slot(manager, ONE) == (NEW * 2).tolist()
    assert adapters.find("one").tensors[A].tolist() == NEW.tolist()
    sync(adapters, "one", NEW + 1)
    assert slot(manager, ONE) == ((NEW + 1) * 2).tolist()


def test_a_sync_of_what_is_not_cached(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    for request in OTHERS:
        manager.add_adapter(request)
    sync(adapters, "one", NEW)  # it was never synced, so it is read again
    assert manager.reads.count("/a") == 2
    assert 1 not in manager.list_adapters()
    assert slot(manager, ONE) == (NEW * 2).tolist()
    assert manager.reads.count("/a") == 2


def test_what_was_never_synced_is_not_kept_for_ever(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    for request in (ONE, *OTHERS):
        manager.add_adapter(request)
    assert {number for number, _ in adapters._adapters} == {2, 3, 4}
    del manager.folders["/a"]
    with pytest.raises(AdapterNotLoaded, match="left vLLM's cache"):
        adapters.find("one")


def test_loading_in_place_begins_anew(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    sync(adapters, "one", NEW)
    anew = Request("one", 1, "/b", load_inplace=True)
    manager.add_adapter(anew)
    assert adapters.find("one").receiver is None
    assert slot(manager, anew) == [2.0 * ord("b")] * 4
    sync(adapters, "one", NEW)
    reads = len(manager.reads)
    assert slot(manager, anew) == (NEW * 2).tolist()
    assert len(manager.reads) == reads


def test_loading_in_place_that_fails_changes_nothing(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    sync(adapters, "one", NEW)
    with pytest.raises(FileNotFoundError):
        manager.add_adapter(Request("one", 1, "/nowhere", load_inplace=True))
    assert adapters.find("one").receiver is not None
    assert slot(manager, ONE) == (NEW * 2).tolist()


def test_a_name_with_another_id_is_another_adapter(manager: Manager) -> None:
    """Unloaded and loaded again. Requests that were running keep what they had."""
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    sync(adapters, "one", NEW)
    adapters.unload("one")
    with pytest.raises(AdapterNotLoaded, match="no adapter one"):
        adapters.find("one")
    again = Request("one", 9, "/a")
    manager.add_adapter(again)
    assert adapters.find("one").receiver is None
    for request in OTHERS:
        slot(manager, request)
    assert slot(manager, ONE) == (NEW * 2).tolist()
    assert slot(manager, again) == [0, 2, 4, 6]
    assert adapters.find("one").tensors[A].tolist() == [0, 1, 2, 3]


def test_an_unloaded_adapter_keeps_its_tensors_alone(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    sync(adapters, "one", NEW)
    store = adapters.find("one")
    adapters.unload("one")
    assert store.receiver is None  # nor what it has staged, nor its undo log
    assert slot(manager, ONE) == (NEW * 2).tolist()


def test_a_request_that_still_runs_does_not_take_the_name(manager: Manager) -> None:
    """Its adapter was unloaded, evicted and read again; another one has the name by now."""
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    adapters.unload("one")
    again = Request("one", 9, "/b")
    manager.add_adapter(again)
    for request in OTHERS:
        slot(manager, request)
    assert slot(manager, ONE) == [0, 2, 4, 6]
    assert adapters.find("one").tensors[A].tolist() == [float(ord("b"))] * 4


def test_a_name_that_is_loaded_under_two_ids(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    manager.add_adapter(Request("one", 9, "/b"))
    with pytest.raises(AdapterNotLoaded, match="several ids"):
        adapters.find("one")


def test_a_removed_adapter_is_forgotten(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    sync(adapters, "one", NEW)
    manager.remove_adapter(1)
    assert adapters.loaded() == []
    with pytest.raises(AdapterNotLoaded):
        adapters.find("one")


def test_an_installation_that_fails_half_way(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    sync(adapters, "one", NEW)
    manager._adapter_manager.fails = True
    with pytest.raises(MemoryError):
        sync(adapters, "one", NEW + 1)
    manager._adapter_manager.fails = False
    store = adapters.find("one")
    store.tensors[A].copy_(NEW)
    store.install()  # the undo
    assert slot(manager, ONE) == (NEW * 2).tolist()


def test_two_adapters_with_one_id(manager: Manager) -> None:
    """vLLM takes one for the other."""
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    sync(adapters, "one", NEW)
    for request in OTHERS:
        slot(manager, request)
    same = Request("same", 1, "/b")
    assert slot(manager, same) == [2.0 * ord("b")] * 4
    for name in ("one", "same"):
        with pytest.raises(AdapterNotLoaded, match="same lora_int_id 1"):
            adapters.find(name)
    for request in OTHERS:
        slot(manager, request)
    assert slot(manager, ONE) == (NEW * 2).tolist()


def test_models_with_experts_are_refused(manager: Manager) -> None:
    adapters = LoadedAdapters(manager)
    manager.add_adapter(ONE)
    manager._adapter_manager._is_moe = True
    with pytest.raises(AdapterNotLoaded, match="experts"):
        adapters.find("one")


def test_a_constructor_that_is_not_called(manager: Manager, monkeypatch: Any) -> None:
    monkeypatch.setattr(manager, "_load_adapter", lambda request: Model(1, torch.ones(4)))
    adapters = LoadedAdapters(manager)
    with pytest.raises(RuntimeError, match="do not know"):
        manager.add_adapter(ONE)
    with pytest.raises(AdapterNotLoaded):
        adapters.find("one")
