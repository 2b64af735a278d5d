"""Sparse weight updates: where SGLang calls the delta-updates package.

The package's own repository tests what it does with a loaded model.
"""

import argparse
import inspect
import os
import unittest
from types import SimpleNamespace
from unittest.mock import patch

from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager,
)
from sglang.srt.model_executor import model_runner
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SETTINGS = "DELTA_UPDATES_SETTINGS"
MODEL = ["--model-path", "m", "--device", "cpu"]


class TestDeltaUpdates(CustomTestCase):
    def setUp(self):
        environment = patch.dict(os.environ, {SETTINGS: ""})
        environment.start()
        self.addCleanup(environment.stop)

    def test_flag_is_in_parser_once(self):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        options = [action.option_strings for action in parser._actions]
        self.assertEqual(sum("--enable-delta-updates" in one for one in options), 1)
        self.assertEqual(
            parser._option_string_actions["--load-format"].choices.count("delta"), 1
        )

    def test_nothing_is_enabled_without_flag(self):
        prepare_server_args(MODEL)
        self.assertEqual(os.environ[SETTINGS], "")

    def test_flag_exports_settings(self):
        prepare_server_args([*MODEL, "--enable-delta-updates"])
        self.assertTrue(os.environ[SETTINGS])

    def test_load_format_enables_and_becomes_auto(self):
        """It is the default of later updates from disk, which must keep their meaning."""
        args = prepare_server_args([*MODEL, "--load-format", "delta"])
        self.assertEqual(args.load_format, "auto")
        self.assertTrue(os.environ[SETTINGS])

    def test_options_need_flag(self):
        with self.assertRaisesRegex(ValueError, "needs --enable-delta-updates"):
            prepare_server_args([*MODEL, "--delta-base-version", "3"])

    def test_endpoints_are_attached_by_every_http_process(self):
        source = inspect.getsource(http_server.lifespan)
        self.assertEqual(source.count("delta_hooks.attach("), 1)

    def test_model_is_loaded_by_runner_without_flag(self):
        loaded = []
        runner = SimpleNamespace(load_model=lambda: loaded.append("model"))
        model_runner.delta_hooks.load_model(runner)
        self.assertEqual(loaded, ["model"])

    def test_rank_without_receiver_refuses_call(self):
        request = UpdateWeightFromDiskReqInput(model_path="", load_format="delta")
        answer = SchedulerWeightUpdaterManager.update_weights_from_disk(None, request)
        self.assertFalse(answer.success)
        self.assertIn("deltas are sent to the delta endpoints", answer.message)


if __name__ == "__main__":
    unittest.main()
