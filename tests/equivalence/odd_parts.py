"""Stands for a user's own module. odd_script.py imports it and changes its contents."""

# mypy: ignore-errors

import torch.nn.functional as F
from torch import nn

FACTOR = 1.0
TABLE = {"offset": 0.0}


def offset():
    return TABLE["offset"]


class Gate(nn.Linear):
    slope = 1.0

    def forward(self, value):
        return F.gelu(super().forward(value)) * FACTOR + offset()


class Plain(nn.Linear):
    def forward(self, value):
        return super().forward(value) * type(self).gain(value)

    @staticmethod
    def gain(value):
        return 1.0
