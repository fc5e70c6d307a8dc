"""Optimizers as users and libraries write them, which torch does not have."""

import torch


class CountsByGroup(torch.optim.Optimizer):
    """Averages gradients, and counts steps for a group, so that a step in parts counts too often."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        """Step, and count it."""
        del closure
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.5)
                parameter.sub_(mean, alpha=group["lr"] / group["steps"])
