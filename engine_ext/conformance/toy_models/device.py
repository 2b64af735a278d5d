"""Where the toy models are: on the CPU, or as ``DELTA_TEST_DEVICE=cuda:0`` says."""

from __future__ import annotations

import os
from typing import Final

import torch

DEVICE: Final = torch.device(os.environ.get("DELTA_TEST_DEVICE", "cpu"))
