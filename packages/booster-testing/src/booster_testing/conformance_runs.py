"""Functions that `booster_testing.conformance` runs on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from booster_core.plugin import ModelWrapper, OptimizerWrapper, hookimpl, register_hooks, unregister_hooks
from booster_core.ranks import DistCoordinator
from booster_runtime import full_gradient
from booster_runtime.rounding import tolerance_for
from booster_testing.compare import assert_same_tensors
from booster_testing.replicas import look_locally
from booster_testing.training import BoostedRun, PlainRun, logits_of, summed_loss, whole_model

if TYPE_CHECKING:
    from booster_core import Booster
    from booster_testing.replicas import LocalView
    from booster_testing.training import Training


def _boost(training: Training) -> tuple[Booster, Any, Any]:
    booster = training.make_booster()
    model = training.make_model()
    boosted = booster.boost(model, training.make_optimizer(model))
    return booster, boosted.model, boosted.optimizer


def _tokens(booster: Booster, step: int = 0, samples: int = 4) -> torch.Tensor:
    """Return this rank's tokens of a step; the global batch is the same for any number of ranks up to 12."""
    generator = torch.Generator().manual_seed(step)
    coordinator = DistCoordinator()
    every = torch.randint(16, (12 * samples, 6), generator=generator)
    return every[coordinator.rank :: coordinator.world_size].to(booster.device)


def _loss(booster: Booster, model: Any, step: int = 0) -> torch.Tensor:
    """Return the mean loss of this rank's tokens of a step."""
    tokens = _tokens(booster, step)
    return summed_loss(logits_of(model(tokens)), tokens) / len(tokens)


def _step(booster: Booster, model: Any, optimizer: Any, step: int) -> float:
    loss = _loss(booster, model, step)
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def boost_returns_wrappers(training: Training) -> None:
    """Check types, identities and names of the results of ``boost``."""
    booster = training.make_booster()
    model = training.make_model()
    optimizer = training.make_optimizer(model)
    names = list(model.state_dict())
    criterion = nn.MSELoss()
    boosted = booster.boost(model, optimizer, criterion)
    assert isinstance(boosted.model, ModelWrapper)
    assert isinstance(boosted.optimizer, OptimizerWrapper)
    assert isinstance(boosted.optimizer, Optimizer)
    assert boosted.model.unwrap() is model
    assert boosted.criterion is criterion
    assert boosted.dataloader is None
    assert boosted.lr_scheduler is None
    assert list(boosted.model.state_dict()) == names
    assert len(boosted.optimizer.param_groups) == 2


def describe(training: Training) -> str:
    """Return the text of ``describe``."""
    return training.make_booster().describe()


def overflow_skips_the_step(training: Training) -> None:
    """Check that an infinite gradient on the last rank skips the step and halves the loss scale on all ranks."""
    booster, model, optimizer = _boost(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    coordinator = DistCoordinator()
    scale = optimizer.loss_scaler.scale
    loss = _loss(booster, model)
    booster.backward(loss * (float("inf") if coordinator.is_last_process() else 1.0), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scaler.scale == scale / 2, "the scale falls on every rank"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "no step is taken"
    skipped = optimizer.loss_scaler.num_good_steps
    _step(booster, model, optimizer, 1)
    assert optimizer.loss_scaler.num_good_steps == skipped + 1, "the next step is taken"
    after = model.state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items()), "the next step is taken"


def scheduler_steers(training: Training) -> None:
    """Check that a scheduler made before ``boost`` changes the learning rate of the boosted optimizer."""
    booster = training.make_booster()
    model = training.make_model()
    optimizer = training.make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = [group["lr"] for group in optimizer.param_groups]
    boosted_model, boosted_optimizer, _, _, boosted_scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    assert boosted_optimizer is not None
    assert boosted_scheduler is not None
    _step(booster, boosted_model, boosted_optimizer, 0)
    boosted_scheduler.step()
    assert [group["lr"] for group in boosted_optimizer.param_groups] == [rate * 0.5 for rate in before]


def optimizer_state_is_kept(training: Training) -> None:
    """Check that a run with a step before ``boost`` equals one that was boosted from the start."""
    results = []
    for boost_first in (True, False):
        booster = training.make_booster()
        model: Any = training.make_model().to(booster.device)
        optimizer: Any = training.make_optimizer(model)
        if boost_first:
            model, optimizer, *_ = booster.boost(model, optimizer)
        for step in range(2):
            # Every rank gets the whole batch, so that the step before `boost` equals that of one process.
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(16, (4, 6), generator=generator).to(booster.device)
            if step == 1 and not boost_first:
                model, optimizer, *_ = booster.boost(model, optimizer)
            loss = summed_loss(logits_of(model(tokens)), tokens) / len(tokens)
            if boost_first or step == 1:
                booster.backward(loss, optimizer)
            else:
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict())
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-5, atol=1e-6)


def samples_of_a_plain_loader(training: Training) -> list[int]:
    """Return this rank's samples of a plain data loader."""
    samples = list(range(12 * DistCoordinator().world_size))
    loader: Any = DataLoader(samples, batch_size=4, shuffle=True)  # type: ignore[arg-type]  # a list is a data set
    booster = training.make_booster()
    boosted = booster.boost(training.make_model(), dataloader=loader)
    assert boosted.dataloader is not None
    return [int(sample) for batch in boosted.dataloader for sample in batch]


def trains_adapters(training: Training) -> None:
    """Check that low-rank adapters change, and that the base neither changes nor has optimizer state."""
    import peft

    booster = training.make_booster()
    adapted = booster.enable_lora(training.make_model(), lora_config=peft.LoraConfig(target_modules=["repeated"]))
    model, optimizer, *_ = booster.boost(adapted, torch.optim.AdamW(adapted.parameters(), lr=0.1))
    before = whole_model(booster, model)
    for step in range(2):
        _step(booster, model, optimizer, step)
    after = whole_model(booster, model)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"repeated.lora_{side}.default.weight" for side in "AB"}, changed
    states = {shard.name for shard in booster.state_adapter(model, optimizer).optimizer_shards()}
    assert states <= changed, f"optimizer state of frozen parameters: {sorted(states - changed)}"


class _Listener:
    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    @hookimpl
    def after_step(self, metrics: dict[str, Any]) -> None:
        """Store a step's metrics."""
        self.heard.append(metrics)


def after_step_hook_sees_metrics(training: Training) -> None:
    """Check that a registered hook gets each step's metrics, with the gradient norm."""
    listener = _Listener()
    register_hooks(listener)
    try:
        booster, model, optimizer = _boost(training)
        booster.backward(_loss(booster, model), optimizer)
        norm = optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
    finally:
        unregister_hooks(listener)
    assert [(metrics["skipped"], float(metrics["grad_norm"])) for metrics in listener.heard] == [(False, float(norm))]


def evaluates(training: Training) -> None:
    """Check that an evaluation between two steps needs no backward and changes neither parameters nor buffers."""
    booster, model, optimizer = _boost(training)
    _step(booster, model, optimizer, 0)
    before, local = whole_model(booster, model), look_locally(booster, model, probe(booster.device))
    model.eval()
    with torch.no_grad():
        assert not _loss(booster, model, 1).requires_grad
    model.train()
    after, local_after = whole_model(booster, model), look_locally(booster, model, probe(booster.device))
    changed = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    assert not changed, f"the evaluation changed {changed}"
    assert torch.equal(local_after.outputs, local.outputs), "the evaluation changed what this rank computes"
    _step(booster, model, optimizer, 1)


def train_and_view_locally(training: Training) -> LocalView:
    """Train three steps on this rank's own samples and return this rank's shards and outputs."""
    booster, model, optimizer = _boost(training)
    for step in range(3):
        _step(booster, model, optimizer, step)
    return look_locally(booster, model, probe(booster.device))


def boost_and_view_locally(training: Training) -> LocalView:
    """Boost a model that has other values on each rank and return this rank's shards and outputs."""
    booster, model = training.make_booster(), training.make_model()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(DistCoordinator().rank)
    boosted = booster.boost(model, training.make_optimizer(model))
    return look_locally(booster, boosted.model, probe(booster.device))


def probe(device: torch.device) -> torch.Tensor:
    """Return tokens that are the same on every rank."""
    return torch.arange(24, device=device).remainder(16).view(4, 6)


def backward_through_an_old_graph(training: Training) -> str:
    """Run backward through a graph that is older than the last step, and train on.

    Returns:
        ``"raised"`` or ``"right"``.
    """
    run, plain = BoostedRun(training), PlainRun(training, DistCoordinator().world_size)
    old = run.loss(0)
    plain.backward(plain.loss(0))
    expected = {name: p.grad.cpu() for name, p in plain.model.named_parameters() if p.grad is not None}
    run.backward(run.loss(1))
    run.optimizer.step()
    run.optimizer.zero_grad()
    outcome = "right"
    try:
        run.backward(old)
    except (RuntimeError, ValueError):  # torch's own error, and ours
        outcome = "raised"
    if outcome == "right":
        found = {name: full_gradient(run.booster, run.model, name) for name in expected}
        assert_same_tensors(
            {name: gradient.cpu() for name, gradient in found.items() if gradient is not None},
            expected,
            tolerance_for(torch.float32),
        )
    run.optimizer.zero_grad()
    run.backward(run.loss(2))
    run.optimizer.step()
    return outcome


def traffic_of_backward(training: Training) -> dict[str, int]:
    """Return how many collectives backward starts, of two models, inside and outside of one's ``no_sync``."""
    booster = training.make_booster()
    models: list[Any] = []
    for _ in range(2):
        model = training.make_model()
        boosted = booster.boost(model, training.make_optimizer(model))
        models.append((boosted.model, boosted.optimizer))
        for step in range(2):  # the first steps may be special
            _step(booster, boosted.model, boosted.optimizer, step)
    (first, its_optimizer), (second, other_optimizer) = models
    counts = {}
    with booster.no_sync(first, its_optimizer):
        counts["inside"] = _num_collectives(booster, first, its_optimizer)
        counts["other model"] = _num_collectives(booster, second, other_optimizer)
    counts["outside"] = _num_collectives(booster, first, its_optimizer)
    return counts


def _num_collectives(booster: Booster, model: Any, optimizer: Any) -> int:
    loss = _loss(booster, model)
    # Without `acc_events`, torch 2.10 warns that a second cycle would drop the events of the first.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        booster.backward(loss, optimizer)
    return sum(event.name.startswith("c10d::") for event in profile.events())


def clip_an_infinite_gradient_strictly(training: Training) -> float:
    """Ask for an error as well."""
    return clip_an_infinite_gradient(training, error_if_nonfinite=True)


def clip_an_infinite_gradient(training: Training, *, error_if_nonfinite: bool = False) -> float:
    """Clip after a backward whose loss is infinite on the last rank, and return the norm."""
    booster, model, optimizer = _boost(training)
    loss = _loss(booster, model)
    booster.backward(loss * (float("inf") if DistCoordinator().is_last_process() else 1.0), optimizer)
    return float(optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=error_if_nonfinite))


def boost_twice(training: Training) -> None:
    """Boost a boosted model."""
    booster, model, _ = _boost(training)
    booster.boost(model)


def boost_with_foreign_optimizer(training: Training) -> None:
    """Boost with an optimizer over a copy of the model."""
    training.make_booster().boost(training.make_model(), training.make_optimizer(training.make_model()))


def boost_with_gradients(training: Training) -> None:
    """Boost a model between backward and step, on the last rank."""
    booster, model = training.make_booster(), training.make_model()
    optimizer = training.make_optimizer(model)
    if DistCoordinator().is_last_process():
        logits_of(model(_tokens(booster).cpu())).square().mean().backward()  # type: ignore[no-untyped-call]
    booster.boost(model, optimizer)


def backward_of_a_vector(training: Training) -> None:
    """Run backward from per-sample losses."""
    booster, model, optimizer = _boost(training)
    booster.backward(logits_of(model(_tokens(booster))).mean((1, 2)), optimizer)


def backward_without_gradient(training: Training) -> None:
    """Run backward from a detached loss."""
    booster, model, optimizer = _boost(training)
    booster.backward(logits_of(model(_tokens(booster))).mean().detach(), optimizer)


def clip_by(training: Training, max_norm: float) -> None:
    """Clip by an invalid norm."""
    _, _, optimizer = _boost(training)
    optimizer.clip_grad_by_norm(max_norm)


def execute_pipeline(training: Training) -> None:
    """Call ``execute_pipeline``."""
    booster, model, optimizer = _boost(training)
    booster.execute_pipeline(iter([]), model, lambda outputs, _: outputs.mean(), optimizer)
