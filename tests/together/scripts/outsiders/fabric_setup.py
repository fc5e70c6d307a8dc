"""Call `setup`, as in Fabric."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
model = nn.Linear(8, 3)
fabric = Booster(plugin=plugin_named(plugin))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
