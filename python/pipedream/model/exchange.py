"""How torch's tensors become the core's and back: by torch's table of C functions, by capsules in a torch
that has none."""

from __future__ import annotations

import torch
from torch._C import _from_dlpack  # the public one takes several us to get there
from torch.utils.dlpack import to_dlpack

from pipedream import _core
from pipedream.model.boundary import exportable

__all__ = ["TENSORS"]

TENSORS = _core.TensorExchange(torch.Tensor, to_dlpack, _from_dlpack, exportable)
