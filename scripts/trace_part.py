"""Trace one changed weight through the sender, and one part through HTTP endpoint and receiver.

Two adjacent elements get a pattern of 8 bytes that is nowhere else, sent in an encoding that keeps
values as they are. A function is on the way if an argument of it, or what it returns, holds the
pattern: bytes, arrays, tensors, mapped files, the path of a file in the spool, or an object of this
project with one of them. `self` does not count, nor do lambdas and comprehensions. The way ends
when the pattern is in the live weight, or in a request of the HTTP client.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import httpx
import msgspec
import numpy as np
import torch
import xxhash
from fastapi import FastAPI

ROOT: Final = Path(__file__).parents[1]
PATTERN: Final = b"\xef\xbe\xad\xde" * 2
PRODUCT: Final = tuple(
    str(ROOT / part) + "/" for part in ("engine_ext", "server/delta_server", "trainer/delta_sender")
)
_OWN: Final = ("engine_ext", "delta_server", "delta_sender")
_NAME: Final = "model.marker.weight"


def weights() -> dict[str, torch.Tensor]:
    """Return a base of two tensors."""
    generator = torch.Generator().manual_seed(3)
    names = ("model.first.weight", _NAME)
    return {name: torch.randn(64, 32, generator=generator) for name in names}


def marked(base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with the pattern in two adjacent elements of one of them."""
    found = {name: tensor.clone() for name, tensor in base.items()}
    raw = found[_NAME].view(-1)[700:702].view(torch.uint8)
    raw.copy_(torch.frombuffer(bytearray(PATTERN), dtype=torch.uint8))
    return found


@dataclass
class Way:
    """The functions that were seen to hold the pattern, as (file, qualified name), in order."""

    spool: Path | None = None
    ended: Callable[[], bool] = lambda: False
    hops: list[tuple[str, str]] = field(default_factory=list)
    hashes: int = 0
    header_parses: int = 0
    is_on: bool = False

    @property
    def files(self) -> list[str]:
        """The files, each once, in order."""
        return list(dict.fromkeys(file for file, _ in self.hops))

    @property
    def revisits(self) -> int:
        """How often the way comes back into a room that it had left."""
        rooms = [_room(file) for file, _ in self.hops]
        entered = [r for n, r in enumerate(rooms) if n == 0 or rooms[n - 1] != r]
        return len(entered) - len(set(entered))

    def profile(self, frame: Any, event: str, value: Any) -> None:
        """Take an event of `sys.setprofile`."""
        if not self.is_on or event not in ("call", "return"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(PRODUCT) or code.co_name.startswith("<"):
            return
        hop = (str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname)
        if hop in self.hops:
            return
        if self.ended():
            self.is_on = False
        elif event == "return":
            if self.holds(value):
                self.hops.append(hop)
        else:
            count = code.co_argcount + code.co_kwonlyargcount
            names = [n for n in code.co_varnames[:count] if n not in ("self", "cls")]
            if any(self.holds(frame.f_locals.get(name)) for name in names):
                self.hops.append(hop)

    def holds(self, value: Any, depth: int = 4) -> bool:
        """Return whether an object holds the pattern."""
        if isinstance(value, (bytes, bytearray, memoryview, mmap.mmap)):
            return PATTERN in bytes(value)
        if isinstance(value, np.ndarray):
            return value.dtype != object and PATTERN in value.tobytes()
        if isinstance(value, torch.Tensor):
            if value.is_meta or value.is_sparse:
                return False
            flat = value.detach().contiguous().view(-1)
            return flat.numel() > 0 and PATTERN in flat.view(torch.uint8).numpy().tobytes()
        if isinstance(value, (str, Path)):
            return self.spool is not None and self._in_spool(str(value))
        if depth == 0:
            return False
        if isinstance(value, (list, tuple)):
            return any(self.holds(one, depth - 1) for one in value[:64])
        if isinstance(value, dict):
            return any(self.holds(one, depth - 1) for one in list(value.values())[:64])
        if type(value).__module__.partition(".")[0] in _OWN and not isinstance(value, type):
            fields = getattr(value, "__dict__", {})
            slots = [s for c in type(value).__mro__ for s in _slots(c) if hasattr(value, s)]
            parts = [*fields.values(), *(getattr(value, slot) for slot in slots)]
            return any(self.holds(one, depth - 1) for one in parts)
        return False

    def _in_spool(self, path: str) -> bool:
        if not path.startswith(str(self.spool)):
            return False
        file = Path(path)
        return file.is_file() and PATTERN in file.read_bytes()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count hashes that read the pattern, and parses of a header, while the way is traced."""

        def one_shot(original: Any) -> Any:
            def count(data: Any, *args: Any, **kwargs: Any) -> Any:
                self.hashes += self.is_on and self.holds(data)
                return original(data, *args, **kwargs)

            return count

        def hasher(original: Any) -> Any:
            way = self

            class Hasher:
                def __init__(self, data: Any = b"", *args: Any, **kwargs: Any) -> None:
                    self._hash, self._counted = original(*args, **kwargs), False
                    self.update(data)

                def update(self, data: Any) -> None:
                    if way.is_on and not self._counted and way.holds(data):
                        way.hashes, self._counted = way.hashes + 1, True
                    self._hash.update(data)

                def __getattr__(self, name: str) -> Any:
                    return getattr(self._hash, name)

            return Hasher

        def parser(original: Any) -> Any:
            def count(data: Any, *args: Any, **kwargs: Any) -> Any:
                text = data if isinstance(data, str) else bytes(data).decode("utf-8", "replace")
                self.header_parses += self.is_on and '"__metadata__"' in text
                return original(data, *args, **kwargs)

            return count

        with mock.patch.multiple(
            xxhash,
            xxh3_128=hasher(xxhash.xxh3_128),
            xxh3_64=hasher(xxhash.xxh3_64),
            xxh3_128_hexdigest=one_shot(xxhash.xxh3_128_hexdigest),
        ):
            with (
                mock.patch.object(hashlib, "sha256", hasher(hashlib.sha256)),
                mock.patch.object(msgspec.json, "decode", parser(msgspec.json.decode)),
                mock.patch.object(json, "loads", parser(json.loads)),
            ):
                yield

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Trace this thread, and those that are started from now on."""
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            self.is_on = False
            sys.setprofile(None)
            threading.setprofile(None)


def _slots(cls: type) -> tuple[str, ...]:
    found = getattr(cls, "__struct_fields__", None) or vars(cls).get("__slots__", ())
    return tuple(found) if isinstance(found, tuple | list) else (str(found),)


def _room(file: str) -> str:
    parts = Path(file).parts
    return "/".join(parts[:2]) if parts[0] == "engine_ext" else parts[1]


def sent() -> tuple[Way, bytes]:
    """Trace the sender from the trainer's tensor to the HTTP client; return the posted part too."""
    from delta_sender import DeltaSender
    from scripts.freeze.bodies import Sink

    base = weights()
    sink, way, bodies = Sink(base), Way(), list[bytes]()

    def answer(request: httpx.Request) -> httpx.Response:
        if PATTERN in request.content:
            way.is_on = False
            bodies.append(request.content)
        return sink.mock(request)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    with way.counting(), way.traced():
        with DeltaSender("http://engine", base.items(), client=client, encoding="indices") as one:
            new = marked(base)
            way.is_on = True
            one.sync(new.items())
            way.is_on = False
    return way, bodies[0]


def received(body: bytes) -> Way:
    """Trace a part from the HTTP endpoint to the live weight of a rank in this process."""
    from delta_server.routes import attach
    from delta_server.service import DeltaService
    from engine_ext.settings import Settings
    from scripts.bench.pipeline_receiver import PlainEngine, make_receiver

    with tempfile.TemporaryDirectory() as folder:
        way = Way(Path(folder))

        async def run() -> int:
            settings = Settings(spool_dir=folder)
            others = _models()  # of whatever else this process has done
            receiver = make_receiver(weights(), settings)
            [model] = [one for one in _models() if all(one is not other for other in others)]
            way.ended = _in_live_weight(model)
            service = DeltaService(PlainEngine(receiver), settings)
            app = FastAPI()
            attach(app)
            app.state.delta_service = service
            await service.start()
            transport = httpx.ASGITransport(app, client=("127.0.0.1", 9))
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                headers = {"Content-Type": "application/octet-stream"}
                way.is_on = True
                answer = await client.post("/update_weights_delta", content=body, headers=headers)
                way.is_on = False
            service.intake.close()
            if answer.json().get("status") != "committed":
                raise RuntimeError(answer.text)
            return 0

        with way.counting(), way.traced():
            asyncio.run(run())
    return way


def _models() -> list[torch.nn.Module]:
    """Return the models that receivers in this process write to."""
    import gc

    from scripts.bench.pipeline_receiver import PlainModel

    return [one for one in gc.get_objects() if type(one) is PlainModel]


def _in_live_weight(model: torch.nn.Module) -> Callable[[], bool]:
    """Return a function that says whether the live weight has the pattern."""
    [live] = [one for name, one in model.named_parameters() if "marker" in name]
    raw = live.detach().view(-1).view(torch.uint8).numpy()
    return lambda: PATTERN in raw.tobytes()
