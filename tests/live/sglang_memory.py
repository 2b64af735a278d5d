"""SGLang servers of models that it cannot generate with on CPU: all of their memory is compared."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.live_engine.process import EngineProcess

SHIM = Path(__file__).parents[1] / "shims" / "faults"
OCTETS = {"Content-Type": "application/octet-stream"}


class Server:
    """A server whose whole model can be hashed.

    Args:
        seen: folder for what its ranks tell; see ``tests/shims/faults``.
        extra_args, python_path: see `EngineProcess`.
    """

    def __init__(
        self,
        start: Callable[..., EngineProcess],
        model: Path,
        tp: int,
        seen: Path,
        extra_args: Sequence[str] = (),
        python_path: Sequence[Path] = (),
    ) -> None:
        self.seen = seen
        self.tp = tp
        self.engine = start(
            "sglang",
            model,
            tp=tp,
            python_path=[SHIM, *python_path],
            extra_args=["--skip-server-warmup", *extra_args],
            extra_env={
                "DELTA_FAULTS": str(seen),
                "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            },
        )

    def post(self, body: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = self.engine.post(
            "/update_weights_delta", content=body, headers=OCTETS
        ).json()
        return answer

    def memory(self) -> tuple[dict[str, str], list[dict[str, str]]]:
        """SGLang's checksums, and a hash of every tensor, by rank and path."""
        for rank in range(self.tp):
            (self.seen / f"hash_model-{rank}").touch()
        self.engine.get("/delta_digest")
        hashes = []
        for rank in range(self.tp):
            file = self.seen / f"hashed-{rank}"
            give_up = time.monotonic() + 30
            while not file.exists() and time.monotonic() < give_up:
                time.sleep(0.05)
            hashes.append(json.loads(file.read_text()))
            file.unlink()
        return self.engine.checksums(), hashes
