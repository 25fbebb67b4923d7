"""Makes torchvision importable with a torch that it was not compiled for. Import this module first.

PyPI's torchvision is compiled for the CUDA torch. With a CPU torch its operators for detection do not load,
and `import torchvision` fails with "operator torchvision::nms does not exist". Classifiers do not use these
operators, so it is enough to declare them. transformers imports torchvision if it is installed, and then
fails in the same way. If torchvision imports without help, or is not installed, this module does nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

DECLARED: list[torch.library.Library] = []  # kept, because the declared operators end with these objects


def _import_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # the failed import has left it half imported
    library = torch.library.Library("torchvision", "FRAGMENT")
    DECLARED.append(library)
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")


if importlib.util.find_spec("torchvision") is not None:
    _import_torchvision()
