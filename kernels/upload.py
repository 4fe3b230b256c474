"""Lists of numbers from the host to a device, without waiting for what the device is at.

``torch.tensor(..., device=...)`` waits for all that was launched before it: its memory is not pinned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``values``, nested lists or an array, as a tensor on ``device``; what is launched after it finds it there."""
    made = torch.as_tensor(values, dtype=dtype)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
