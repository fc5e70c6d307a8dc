import copy
import pickle

import pytest
import torch
from torch import nn

from booster_core.errors import GradientError
from booster_core.plugin import GradientScaling, ModelWrapper, OptimizerWrapper
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_testing.models import TinyMixedBag, TinyMLP


def make(precision=None, **changes):
    torch.manual_seed(0)
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **changes)
    policy = None if precision is None else PrecisionPolicy.parse(precision)
    return ModelWrapper(model, precision=policy), OptimizerWrapper(optimizer, scaling=GradientScaling(policy))


def test_model_wrapper_forwards_attributes_and_state():
    model, _ = make()
    inner = model.unwrap()
    assert model.first is inner.first
    assert list(model.state_dict()) == list(inner.state_dict())
    model.load_state_dict({name: torch.zeros_like(t) for name, t in inner.state_dict().items()})
    assert not inner.first.weight.any()
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


class Sized(nn.Module):
    """Has a length, and nothing else of a container."""

    def __len__(self):
        return 0


def test_truth_of_a_wrapper_is_that_of_the_own_model():
    assert bool(ModelWrapper(TinyMLP())) is True
    assert bool(ModelWrapper(nn.Sequential())) is False
    assert bool(ModelWrapper(Sized())) is False
    with pytest.raises(TypeError, match="'Sized' object is not iterable"):
        list(ModelWrapper(Sized()))


def test_model_wrapper_lists_each_parameter_once():
    wrapper = ModelWrapper(TinyMixedBag())
    assert len(list(wrapper.parameters())) == len(list(wrapper.unwrap().parameters()))


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


def test_metrics_are_handed_on():
    heard = []
    model = TinyMLP()
    optimizer = OptimizerWrapper(
        torch.optim.SGD(model.parameters(), lr=0.1), scaling=GradientScaling(PrecisionPolicy.parse("fp16"))
    )
    optimizer.on_step.append(lambda opt, metrics: heard.append((opt, metrics)))
    optimizer.backward(model(torch.randn(2, 8)).mean())
    norm = optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    assert heard[0][0] is optimizer
    assert heard[0][1] == {"skipped": False, "grad_norm": norm, "loss_scale": 2.0**16}


@pytest.mark.parametrize(
    ("loss", "error", "match"),
    [
        (1.5, TypeError, "got `float`"),
        (torch.ones(3, requires_grad=True), GradientError, r"shape \(3,\)"),
        (torch.ones(()), GradientError, "no gradient"),
    ],
)
def test_backward_refuses_what_is_no_loss(loss, error, match):
    _, optimizer = make()
    with pytest.raises(error, match=match):
        optimizer.backward(loss)


def test_nonfinite_norm_raises_where_asked():
    model, optimizer = make()
    model.unwrap().first.weight.grad = torch.full_like(model.unwrap().first.weight, float("inf"))
    with pytest.raises(GradientError, match="error_if_nonfinite"):
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)


def run_fp16(optimizer_calls, *, micro_batches):
    """Return the gradients that the optimizer steps with after several backward calls under a loss scale."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    policy = PrecisionPolicy(
        compute_dtype=torch.float16, loss_scale=LossScaleConfig(initial_scale=16.0), param_dtype=None
    )
    optimizer = OptimizerWrapper(torch.optim.SGD(model.parameters(), lr=0.0), scaling=GradientScaling(policy))
    for number in range(micro_batches):
        torch.manual_seed(number)
        optimizer.backward(model(torch.randn(3, 4).double()).square().mean())
        for call in optimizer_calls:
            call(optimizer)
    optimizer.unscale_gradients()
    return [gradient.clone() for gradient in optimizer.gradients()]


def test_gradients_are_unscaled_once():
    plain = run_fp16([], micro_batches=1)
    clipped_twice = run_fp16([lambda o: o.clip_grad_by_norm(1e9), lambda o: o.clip_grad_by_norm(1e9)], micro_batches=1)
    for a, b in zip(plain, clipped_twice, strict=True):
        torch.testing.assert_close(a, b)


def test_backward_adds_rightly_to_gradients_that_were_unscaled():
    plain = run_fp16([], micro_batches=3)
    clipped_between = run_fp16([lambda o: o.clip_grad_by_norm(1e9)], micro_batches=3)
    for a, b in zip(plain, clipped_between, strict=True):
        torch.testing.assert_close(a, b)


def test_backward_after_a_step_without_zero_grad_adds_rightly():
    plain = run_fp16([], micro_batches=2)
    stepped = run_fp16([lambda o: o.step()], micro_batches=2)
    for a, b in zip(plain, stepped, strict=True):
        torch.testing.assert_close(a, b)
