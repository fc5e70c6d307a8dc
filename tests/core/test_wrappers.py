import copy
import pickle

import pytest
import torch
from torch import nn

from booster_core.errors import GradientError
from booster_core.plugin import GradientScaling, ModelWrapper, OptimizerWrapper
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_testing.models import TinyMLP


def make(precision=None, **changes):
    torch.manual_seed(0)
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **changes)
    policy = None if precision is None else PrecisionPolicy.parse(precision)
    return ModelWrapper(model, precision=policy), OptimizerWrapper(optimizer, scaling=GradientScaling(policy))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deepcopy", "pickle"]
)
def test_wrappers_can_be_copied(copied):
    model, optimizer = make(momentum=0.9)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    twin_model, twin_optimizer = copied(model), copied(optimizer)
    assert torch.equal(twin_model(torch.ones(1, 8)), model(torch.ones(1, 8)))
    assert twin_optimizer.param_groups[0]["lr"] == 0.1
    assert twin_optimizer.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]


def test_outputs_under_autocast_are_widened():
    model, _ = make("bf16")
    assert model(torch.randn(2, 8)).dtype == torch.float32
    narrow = ModelWrapper(TinyMLP(), precision=PrecisionPolicy(compute_dtype=torch.bfloat16, output_dtype=None))
    assert narrow(torch.randn(2, 8)).dtype == torch.bfloat16


def test_optimizer_wrapper_is_an_optimizer_to_schedulers():
    _, optimizer = make()
    assert isinstance(optimizer, torch.optim.Optimizer)
    for make_scheduler in (
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=4),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ):
        make_scheduler(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = optimizer.unwrap().param_groups[0]["lr"]
    optimizer.step()
    scheduler.step()
    assert optimizer.unwrap().param_groups[0]["lr"] == before * 0.5


def test_optimizer_wrapper_serves_grad_scaler():
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.unwrap().first.weight.detach().clone()
    scaler.scale(model(torch.randn(4, 8)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.unwrap().first.weight, before)


def test_step_hooks_of_torch_fire():
    model, optimizer = make()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
    assert calls == ["post"]


def test_closure_reaches_the_optimizer():
    torch.manual_seed(0)
    model = TinyMLP()
    optimizer = OptimizerWrapper(torch.optim.LBFGS(model.parameters(), max_iter=4))
    inputs = torch.randn(16, 8)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    first = float(closure().detach())
    optimizer.step(closure)
    assert float(closure().detach()) < first


def test_closure_is_refused_under_a_loss_scale():
    _, optimizer = make("fp16")
    with pytest.raises(GradientError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_backward_takes_a_tensor():
    _, optimizer = make()
    with pytest.raises(TypeError, match="got `float`"):
        optimizer.backward(1.5)


@pytest.mark.parametrize(
    ("call", "micro_batches"),
    [
        (lambda optimizer: [optimizer.clip_grad_by_norm(1e9) for _ in range(2)], 1),
        (lambda optimizer: optimizer.clip_grad_by_norm(1e9), 3),
        (lambda optimizer: optimizer.step(), 2),
    ],
    ids=["clipped twice", "clipped between", "stepped without zero_grad"],
)
def test_gradients_are_unscaled_once(call, micro_batches):
    policy = PrecisionPolicy(
        compute_dtype=torch.float16, loss_scale=LossScaleConfig(initial_scale=16.0), param_dtype=None
    )
    found = []
    for between in (lambda _: None, call):
        torch.manual_seed(0)
        model = nn.Linear(4, 1).double()
        optimizer = OptimizerWrapper(torch.optim.SGD(model.parameters(), lr=0.0), scaling=GradientScaling(policy))
        for _ in range(micro_batches):
            optimizer.backward(model(torch.randn(3, 4).double()).square().mean())
            between(optimizer)
        optimizer.unscale_gradients()
        found.append([gradient.clone() for gradient in optimizer.gradients()])
    torch.testing.assert_close(*found)
