"""Run by test_vllm.py in a process of its own: a vLLM without a server, on the load format delta.

Writes, as JSON, what its worker says of its deltas.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(model: str, out: str) -> None:
    """Load a model and ask its worker.

    Args:
        model: checkpoint folder.
        out: file to write.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(
        model,
        load_format="delta",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        enable_prefix_caching=False,
    )
    (answer,) = llm.collective_rpc("delta_updates", args=("status", {}))
    Path(out).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
