"""Modules of torch on which engines, and tests, hang whatever they like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:

    class OpenModule(nn.Module):
        """A module whose attributes can be anything; torch declares tensors and modules."""

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    OpenModule = nn.Module
