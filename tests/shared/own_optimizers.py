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


class OtherMomentum(torch.optim.Optimizer):
    """Keeps momentum in bf16 for fp32 parameters, as Adafactor with a narrow one, and in fp32 for narrow ones."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        """Step; a momentum of another type than it made raises."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                dtype = torch.bfloat16 if parameter.dtype == torch.float32 else torch.float32
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter, dtype=dtype))
                momentum.lerp_(parameter.grad.to(dtype), 0.3)
                parameter.sub_(momentum.to(parameter.dtype), alpha=group["lr"])
