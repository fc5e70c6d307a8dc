import pytest
import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_runtime.sharding.elementwise import ELEMENTWISE, WHOLE, _probed, partition_for


def parameters():
    return [nn.Parameter(torch.ones(3, 2))]


class Lion(torch.optim.Optimizer):
    """Elementwise, with a state of its own."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p))
                p.sub_(group["lr"] * (m * group["beta"] + p.grad * 0.1).sign())
                m.mul_(group["beta"]).add_(p.grad)


class TrustRatio(Lion):
    """Scales each update by norms of the whole parameter, as LAMB does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * p.norm() / p.grad.norm())


class FactorsLarge(Lion):
    """Scales updates by row from a size on, as memory-saving optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                scale = p.grad.abs().amax(-1, keepdim=True) if p.dim() == 2 and min(p.shape) >= 128 else 1.0
                p.sub_(p.grad * group["lr"] / scale)


class QuantizesBlocks(Lion):
    """Rounds by blocks of 256 elements, where these divide a large parameter, as optimizers in 8 bits do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.numel() >= 4096 and p.numel() % 256 == 0:
                    blocks = p.grad.reshape(-1, 256)
                    scales = blocks.abs().amax(1, keepdim=True) / 127
                    grad = ((blocks / scales).round() * scales).view_as(p)
                else:
                    grad = p.grad
                p.sub_(grad * group["lr"])


class TreatsKernels(Lion):
    """Scales updates of convolutions by channel."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                scale = p.grad.abs().amax((1, 2, 3), keepdim=True) if p.dim() == 4 else 1.0
                p.sub_(p.grad * group["lr"] / scale)


class TakesMatricesAndVectors(Lion):
    """Elementwise, and knows nothing of further dimensions."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 2:
                    raise ValueError
                p.sub_(p.grad * group["lr"])


class NeedsMatrices(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() != 2:
                    raise ValueError
                p.sub_(p.grad * group["lr"])


class Coupled(Lion):
    """Scales each update by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.sub_(p.grad / norm)


class EstimatesDistance(Lion):
    """Estimates its step size from sums over all parameters, as D-Adaptation does; it grows where gradients agree."""

    def __init__(self, params):
        super().__init__(params)
        for group in self.param_groups:
            group.update(distance=1e-6, gained=0.0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            size, distance = 0.0, group["distance"]
            for p in group["params"]:
                state = self.state[p]
                start = state.setdefault("start", p.clone())
                group["gained"] += distance * float((p.grad * (start - p)).sum())
                size += float(state.setdefault("sum", torch.zeros_like(p)).add_(p.grad, alpha=distance).abs().sum())
                p.sub_(p.grad.sign(), alpha=distance)
            group["distance"] = max(distance, group["gained"] / size)


class RecordsNorm(Lion):
    """Writes a norm into its group, by which nothing is updated yet."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["largest"] = max([group.get("largest", 0.0), *(float(p.grad.norm()) for p in group["params"])])
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=0.1)


class WarmsUp(Lion):
    """Updates nothing in its first steps, and counts them in its group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"] if group["count"] > 5 else ():
                p.sub_(p.grad.sign(), alpha=0.1)


class Stashing(Lion):
    """Remembers the parameters that it was made with."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params)
        self.remembered = params

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.remembered:
            if p.grad is not None:
                p.sub_(p.grad)


class MySGD(torch.optim.SGD):
    pass


class ConstructsState(torch.optim.Optimizer):
    """Makes its state when it is constructed, as torch 2.10's Adagrad does; a step adds to nothing else."""

    factors = False

    def __init__(self, params):
        super().__init__(params, {})
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, 0.1)}

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["step"] += 1
            size = p.grad.square().mean(0, keepdim=True) if self.factors and p.dim() > 1 else p.grad.square()
            state["sum"] += size
            p.addcdiv_(p.grad, state["sum"].sqrt(), value=-0.1 / state["step"].item())


class FactorsConstructedState(ConstructsState):
    factors = True


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_the_probe_agrees_with_the_declared_elementwise_optimizers(kind):
    optimizer = kind(parameters(), lr=0.1)
    assert partition_for(optimizer, "auto") == "flat"
    assert _probed(optimizer, optimizer.param_groups[0]) == "flat"


@pytest.mark.parametrize("kind", sorted(WHOLE, key=lambda kind: kind.__name__))
def test_the_probe_agrees_with_the_declared_matrix_optimizers(kind):
    optimizer = kind(parameters(), lr=0.1)
    assert partition_for(optimizer, "auto") == "parameter"
    assert _probed(optimizer, optimizer.param_groups[0]) == "parameter"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Lion, "flat"),
        (TakesMatricesAndVectors, "flat"),
        (TrustRatio, "parameter"),
        (NeedsMatrices, "parameter"),
        (FactorsLarge, "parameter"),
        (QuantizesBlocks, "parameter"),
        (TreatsKernels, "parameter"),
        (ConstructsState, "flat"),
        (WarmsUp, "flat"),
        (FactorsConstructedState, "parameter"),
    ],
)
def test_a_strange_optimizer_is_tried_out(kind, expected):
    assert partition_for(kind(parameters()), "auto") == expected


def test_a_scheduler_and_state_do_not_disturb_the_probe_nor_it_them():
    params = parameters()
    optimizer = MySGD(params, lr=0.1, momentum=0.9)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    params[0].grad = torch.ones(3, 2)
    optimizer.step()
    before = params[0].detach().clone()
    assert partition_for(optimizer, "auto") == "flat"
    assert torch.equal(params[0], before)
    assert len(called) == 1
    assert len(optimizer.state) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Coupled(parameters()), "lets one parameter influence the update of another"),
        (lambda: EstimatesDistance(parameters()), "lets one parameter influence the update of another"),
        (lambda: RecordsNorm(parameters()), "computes 'largest' of its groups from gradients or parameters"),
        (lambda: Stashing(parameters()), "does not update parameters that its `param_groups` list"),
        (lambda: torch.optim.LBFGS(parameters()), "LBFGS can't be sharded"),
        (lambda: torch.optim.SparseAdam(parameters()), "SparseAdam takes sparse gradients"),
    ],
    ids=["coupled", "estimates", "records", "stashing", "lbfgs", "sparse"],
)
def test_what_cannot_be_sharded_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        partition_for(make(), "auto")


def test_a_choice_overrides_the_probe():
    assert partition_for(Lion(parameters()), "parameter") == "parameter"
    assert partition_for(Coupled(parameters()), "flat") == "flat"


class TrustRatioOnDemand(Lion):
    """Scales updates by norms of the whole parameter where its group asks for it, as LARS does."""

    def __init__(self, params, lr=0.1, **defaults):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "trust": False, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm() / p.grad.norm() if group["trust"] else 1.0
                p.sub_(p.grad * group["lr"] * ratio)


class MuonAndAdam(Lion):
    """Orthogonalizes matrices in some groups, and treats elements in others."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad.sign()
                if group.get("use_muon"):
                    left, _, right = torch.linalg.svd(p.grad.view(len(p.grad), -1), full_matrices=False)
                    update = (left @ right).view_as(p)
                p.sub_(update, alpha=group["lr"])


class Projected(Lion):
    """Takes gradients of low rank where a group names one, as GaLore does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad
                if "rank" in group and p.dim() == 2:
                    left, values, right = torch.linalg.svd(p.grad, full_matrices=False)
                    update = (left[:, : group["rank"]] * values[: group["rank"]]) @ right[: group["rank"]]
                p.sub_(update, alpha=group["lr"])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(TrustRatioOnDemand, {"trust": True}), (MuonAndAdam, {"use_muon": True}), (Projected, {"rank": 1})],
    ids=["lars", "muon", "galore"],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_each_group_with_settings_of_its_own_is_tried_out(kind, settings, position):
    groups = [{"params": parameters()} for _ in range(3)]
    assert partition_for(kind(groups), "auto") == "flat"
    groups[position] = {**groups[position], **settings}
    optimizer = kind(groups)
    assert partition_for(optimizer, "auto") == "parameter"
    assert partition_for(optimizer, "auto", optimizer.param_groups[position : position + 1]) == "parameter"


def test_a_group_that_cannot_be_tried_out_is_named():
    class Breaks(TrustRatioOnDemand):
        def step(self, closure=None):
            if self.param_groups[0]["trust"]:
                raise NotImplementedError
            super().step(closure)

    groups = [{"params": parameters()}, {"params": parameters(), "trust": True}]
    with pytest.raises(ConfigError, match="Breaks, with the settings of parameter group 1, could not be tried"):
        partition_for(Breaks(groups), "auto")


def test_groups_that_differ_in_learning_rate_and_parameters_alone_are_tried_out_once(monkeypatch):
    tried = []
    monkeypatch.setattr(
        "booster_runtime.sharding.elementwise._probed", lambda _, group: tried.append(group["trust"]) or "flat"
    )
    groups = [{"params": [(f"{n}.{k}", p) for k, p in enumerate(parameters())], "lr": 0.1 * n} for n in range(8)]
    optimizer = TrustRatioOnDemand([*groups, {"params": [("last", *parameters())], "trust": torch.tensor(1.0)}])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert partition_for(optimizer, "auto") == "flat"
    assert tried == [False, torch.tensor(1.0)]


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize(("kind", "expected"), [(Lion, "flat"), (TrustRatio, "parameter")])
def test_a_scheduler_may_begin_with_a_learning_rate_of_zero(kind, expected, lr):
    optimizer = kind(parameters(), lr)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1))
    assert float(optimizer.param_groups[0]["lr"]) == 0.0
    assert partition_for(optimizer, "auto") == expected
    assert float(optimizer.param_groups[0]["lr"]) == 0.0
