"""Importing this makes torchvision importable beside a torch that it was not compiled for.

PyPI's torchvision is compiled for the CUDA torch. Beside a CPU torch its operators (for detection) do not
load, and `import torchvision` ends with "operator torchvision::nms does not exist". Classifiers use none of
them, so it is enough that they are declared. transformers imports torchvision wherever it is installed, so
its users meet this too. Where torchvision imports as it is, or is not installed, nothing is done.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

DECLARED: list[torch.library.Library] = []  # what they declare lasts as long as they do


def _import_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # half imported
    library = torch.library.Library("torchvision", "FRAGMENT")
    DECLARED.append(library)
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")


if importlib.util.find_spec("torchvision") is not None:
    _import_torchvision()
