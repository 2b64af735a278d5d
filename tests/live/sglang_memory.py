"""SGLang servers all of whose memory is compared: it has no checksums of all ranks, or no texts."""

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
        seen: folder for the reports of its ranks; see ``tests/shims/faults``.
        extra_args, python_path: see `EngineProcess`.
        stages: how many pipeline stages there are, of `tp` ranks each. SGLang's own checksums are
            those of the first.
    """

    def __init__(
        self,
        start: Callable[..., EngineProcess],
        model: Path,
        tp: int,
        seen: Path,
        extra_args: Sequence[str] = (),
        python_path: Sequence[Path] = (),
        stages: int = 1,
    ) -> None:
        self.seen = seen
        self.ranks = tp * stages
        cores = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0", "1"] * tp)} if stages > 1 else {}
        self.engine = start(
            "sglang",
            model,
            tp=tp,
            python_path=[SHIM, *python_path],
            extra_args=["--skip-server-warmup", "--pp-size", str(stages), *extra_args],
            extra_env={
                **cores,
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
        for rank in range(self.ranks):
            (self.seen / f"hash_model-{rank}").touch()
        self.engine.get("/delta_digest")
        hashes = []
        for rank in range(self.ranks):
            file = self.seen / f"hashed-{rank}"
            give_up = time.monotonic() + 30
            while not file.exists() and time.monotonic() < give_up:
                time.sleep(0.05)
            hashes.append(json.loads(file.read_text()))
            file.unlink()
        return self.engine.checksums(), hashes
