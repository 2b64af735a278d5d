"""Run by test_vllm.py in a process of its own: what a vLLM has, written as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(out: str) -> None:
    """Look at the vLLM that Python finds first.

    Args:
        out: file to write.
    """
    import vllm
    from fastapi import FastAPI
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.plugins import load_general_plugins
    from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.worker.worker_base import WorkerBase

    from engine_ext import settings
    from engine_ext.adapters.vllm import plugin

    load_general_plugins()
    plugin.register()
    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = ["--model", ".", "--load-format", "Delta", "--delta-base-version", "3"]
    args = parser.parse_args(arguments)
    AsyncEngineArgs.from_cli_args(args)
    chosen = settings.from_environment()
    app = FastAPI()
    attach_endpoint_plugins(app, ("generate",))
    facts = {
        "package": vllm.__file__,
        "flags": sum("--enable-delta-updates" in a.option_strings for a in parser._actions),
        "asked_for": args.enable_delta_updates,
        "base_version": chosen and chosen.base_version,
        "routes": [getattr(route, "path", "") for route in app.routes],
        "wrapped": [
            hasattr(function, "__wrapped__")
            for function in (EngineArgs.add_cli_args, WorkerBase.__init__)
        ],
    }
    Path(out).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
