"""Run by test_sglang.py in SGLang's own Python: what a SGLang has, written as JSON."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path


def main(out: str) -> None:
    """Look at the SGLang that Python finds first.

    Args:
        out: file to write.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Updater,
    )
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    from engine_ext import settings

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = ["--model-path", "m", "--device", "cpu", "--load-format", "delta"]
    args = prepare_server_args([*arguments, "--delta-base-version", "3"])
    chosen = settings.from_environment()
    # As a new process would, that finds the settings.
    load_plugins()
    request = UpdateWeightFromDiskReqInput(model_path="", load_format="delta")
    facts = {
        "package": sglang.__file__,
        "flags": sum("--enable-delta-updates" in a.option_strings for a in parser._actions),
        "base_version": chosen and chosen.base_version,
        "load_format": args.load_format,
        "attaches": inspect.getsource(http_server.lifespan).count("delta_hooks.attach("),
        "wrapped": [
            hasattr(function, "delta_updates") or hasattr(function, "__wrapped__")
            for function in (
                ServerArgs.add_cli_args,
                ModelRunner.load_model,
                Updater.update_weights_from_disk,
            )
        ]
        + [hasattr(http_server.app.router.lifespan_context, "delta_updates")],
        "answer": Updater.update_weights_from_disk(None, request).message,
        "choices": parser._option_string_actions["--load-format"].choices,
    }
    Path(out).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
