"""Four residual layers of 8 inputs, in a list that policies call ``layers``."""

import torch
from torch import nn

from booster_hybrid import ModuleRule, ShardingPolicy, Style

SPLIT = ShardingPolicy(
    rules=(ModuleRule("layers.*.up", Style.COLUMN), ModuleRule("layers.*.down", Style.ROW)), layers=("layers",)
)
"""Splits the layers over tensor parallel ranks, and cuts between them into stages."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
