"""Loaded by Python at its start: lets vLLM import its vision models without torchvision.

Torchvision has no build for vLLM's torch on the package index. The models import it for the image
processors of transformers that need it; those that work with Pillow alone are used instead, as
torchvision itself stays missing.
"""

from __future__ import annotations

import sys
from types import ModuleType

_V2 = "torchvision.transforms.v2"

sys.modules[_V2] = ModuleType(_V2)
sys.modules[_V2].functional = ModuleType(f"{_V2}.functional")  # type: ignore[attr-defined]
