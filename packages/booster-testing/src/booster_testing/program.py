"""Random training programs: run in plain PyTorch and under a plugin on ranks, and compared.

A `Program` is a small model and what a script does with it: forwards, backwards, steps, writes to parameters, frozen
layers, files and so on. Each operation does the same in one process with the batches of all ranks, and boosted on each
rank with its own. A program ends well if gradients, norms, losses, parameters and optimizer state are those of one
process, or if an operation raises a `BoosterError` on every rank; the program is then run again without it.

A plugin's whole test, with Hypothesis, which shrinks what it finds to a few operations::

    @settings(derandomize=True, max_examples=40, deadline=None)
    @given(program=programs())
    def test_programs(program):
        judge(program, MyPlugin, RANKS)  # RANKS = Ranks(2), of booster_testing
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from booster_core import Booster
from booster_core.errors import BoosterError
from booster_core.plugin import unwrap_model
from booster_core.ranks import DistCoordinator
from booster_runtime import full_gradient, set_full_gradient
from booster_runtime.rounding import Tolerance
from booster_testing.compare import assert_same_tensors
from booster_testing.training import assembled, tensors_of, whole_model

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextlib import AbstractContextManager

    from booster_core.plugin import Plugin
    from booster_testing.ranks import Ranks

__all__ = ["LAYERS", "OPERATIONS", "Program", "RandomModel", "judge", "programs"]

_WIDTH = 8
_SAMPLES = 2
_CLOSE = Tolerance(relative=2e-5, reason="sums in another order, over some steps")


@dataclass(frozen=True)
class Program:
    """What is run.

    Args:
        layers: The model's, names in `LAYERS`.
        operations: In their order, names in `OPERATIONS`.
        optimizer: ``"sgd"`` or ``"adamw"``.
    """

    layers: tuple[str, ...]
    operations: tuple[str, ...]
    optimizer: str = "sgd"


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = torch.tanh(self.inner(self.norm(x)))
        return x + added


class _Routed(nn.Module):
    """Uses its layer for samples with a positive first feature alone, and not at all where a batch has none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)
        self.scale = nn.Parameter(torch.ones(_WIDTH))  # so that each rank has a gradient

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        chosen = x[:, :1] > 0
        return x + torch.where(chosen, self.inner(x), 0.0) if bool(chosen.any()) else x


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Linear(_WIDTH, _WIDTH)
        self.outward.weight = self.inward.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outward(torch.tanh(self.inward(x)))
        return out


class _Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(x))))


class _Recomputed(_Residual):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class _Own(nn.Module):
    """Has parameters of its own besides its layer: a scale of one element, and a vector that is frozen."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.full((_WIDTH,), 0.1), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inner(x) * self.scale + self.shift
        return out


class _Pair(nn.Module):
    """Two layers, for subclasses that use them in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)


class _ByFunctions(_Pair):
    """Reads parameters of layers that it never calls: by functions, views, and twice."""

    def forward(self, x: Tensor) -> Tensor:
        half = _WIDTH // 2
        rows = torch.cat([x @ self.one.weight[:half].t(), x @ self.one.weight[half:].t()], dim=1)
        x = torch.tanh(torch.addmm(self.two.bias, rows + self.one.bias, self.two.weight.t()))
        return torch.einsum("ni,oi->no", x, torch.stack([self.two.weight, self.one.weight]).mean(0))


class _Product(torch.autograd.Function):
    """Multiplies by one matrix after the other; backward takes them from what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        ctx.save_for_backward(x, one, two)
        return x @ one.t() @ two.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (gradient,), (x, one, two) = gradients, ctx.saved_tensors
        inner = gradient @ two
        return inner @ one, inner.t() @ x, gradient.t() @ (x @ one.t())


class _Custom(_Pair):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self.one.weight, self.two.weight)  # type: ignore[no-untyped-call]
        return torch.tanh(out) + self.one.bias + self.two.bias


class _Alternating(_Pair):
    """Uses one layer in one call, and the other one in the next."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = torch.tanh((self.one if self.calls % 2 else self.two)(x))
        return out


class _Elsewhere(_Pair):
    """Keeps what backward needs where a context of its own puts it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(self.two(torch.tanh(self.one(x))))


class _Derived(_Pair):
    """Returns derivatives of what it computes, as models of atoms return forces."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.two(torch.tanh(self.one(x))).square().sum()
            (forces,) = torch.autograd.grad(energy, x, create_graph=self.training)
        found: Tensor = torch.tanh(forces)
        return found


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(_WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        several = torch.stack([x, x.flip(1), 2 * x])
        found: Tensor = self.inner(several, several, several, need_weights=False)[0].mean(0)
        return x + found


class _Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(_WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class _Formats(nn.Module):
    """Has parameters in two formats, an empty one, and a table of which a batch touches some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(_WIDTH, _WIDTH, dtype=torch.float64)
        self.table = nn.Embedding(6, _WIDTH)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table((x[:, :4] > 0).sum(1))
        return torch.tanh(self.wide(x.double()).float()) + rows + self.empty.sum()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()),
    "residual": _Residual,
    "routed": _Routed,
    "tied": _Tied,
    "repeated": _Repeated,
    "recomputed": _Recomputed,
    "unused": _Unused,
    "own": _Own,
    "by functions": _ByFunctions,
    "custom function": _Custom,
    "alternating": _Alternating,
    "kept elsewhere": _Elsewhere,
    "derived": _Derived,
    "attention": _Attention,
    "parametrized": _Parametrized,
    "formats": _Formats,
}
"""What a model is made of."""


class RandomModel(nn.Module):
    """Layers one after the other, and a head. Takes ``(N, 8)``, returns ``(N, 4)``.

    Args:
        layers: Names in `LAYERS`.
    """

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[name]() for name in layers)
        self.head = nn.Linear(_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the head makes of the last layer's output."""
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class Run:
    """A program's objects in one process, with plain PyTorch. An operation calls its methods.

    Args:
        program: What is run.
        num_ranks: Number of ranks of the boosted run.
        folder: For files.

    Attributes:
        model: What is called.
        optimizer: What steps.
        losses: Those whose backward is still to come.
        noted: What is compared, by name.
    """

    def __init__(self, program: Program, num_ranks: int, folder: Path) -> None:
        self.program, self.num_ranks, self.folder = program, num_ranks, folder
        self.number = 0
        self.losses: list[Tensor] = []
        self.noted: dict[str, Tensor] = {}
        self.model: Any
        self.optimizer: Any
        self.start()

    def objects(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return model and optimizer, the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = RandomModel(self.program.layers)
        matrices = [each for each in model.parameters() if each.requires_grad and each.dim() > 1]
        others = [each for each in model.parameters() if each.requires_grad and each.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.05}]
        if self.program.optimizer == "sgd":
            return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return model, torch.optim.AdamW(groups, lr=0.01, eps=1e-2)  # so that rounding of small gradients stays small

    def start(self) -> None:
        """Make the objects."""
        self.model, self.optimizer = self.objects()

    @property
    def net(self) -> nn.Module:
        """The model itself."""
        return unwrap_model(self.model)

    def batch(self) -> Tensor:
        """Return the next samples, those of rank r being ``r::num_ranks``."""
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        return torch.randn(_SAMPLES * self.num_ranks, _WIDTH, generator=generator)

    def forward(self, *, other: bool = False) -> None:
        """Keep the loss of the next batch for a backward; ``other`` keeps two losses of one output."""
        out = self.model(self.batch())
        self.losses.append(out.square().mean())
        if other:
            self.losses.append(out.sin().mean())

    def backward(self, *, directly: bool = False, retain_graph: bool = False) -> None:
        """Run backward from each loss that is there, of a forward if there is none."""
        if not self.losses:
            self.forward()
        losses, self.losses = self.losses, []
        for index, loss in enumerate(losses):
            self.note("loss", self.mean(loss.detach()))
            keeps = retain_graph or index + 1 < len(losses)
            self.backward_of(loss, directly=directly, retain_graph=keeps)

    def backward_of(self, loss: Tensor, *, directly: bool, retain_graph: bool) -> None:
        """Run backward from a loss."""
        del directly
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over ranks."""
        return value

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for all but the last micro-batch."""
        return contextlib.nullcontext()

    def clip_by_norm(self, max_norm: float) -> None:
        """Clip, and note the norm."""
        trained = [each for group in self.optimizer.param_groups for each in group["params"]]
        self.note("norm", nn.utils.clip_grad_norm_(trained, max_norm))

    def clip_by_value(self, value: float) -> None:
        """Clip each element."""
        trained = [each for group in self.optimizer.param_groups for each in group["params"] if each.grad is not None]
        if trained:  # torch's own call fails where there are no gradients
            nn.utils.clip_grad_value_(trained, value)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that there are, whole."""
        return {name: each.grad.clone() for name, each in self.net.named_parameters() if each.grad is not None}

    def parameters(self) -> dict[str, Tensor]:
        """Return parameters and buffers, whole."""
        return tensors_of(self.net.state_dict())

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state, whole."""
        found = {}
        for name, parameter in self.net.named_parameters():
            for key, value in tensors_of(self.optimizer.state.get(parameter, {})).items():
                if value.numel() > 1:
                    found[f"{name}/{key}"] = value
        return found

    def note(self, name: str, value: Tensor) -> None:
        """Keep a value for the comparison."""
        self.noted[f"{len(self.noted)} {name}"] = value.detach().cpu().clone()

    def note_all(self, what: str, values: Mapping[str, Tensor]) -> None:
        """Keep tensors by name for the comparison."""
        for name in sorted(values):
            self.note(f"{what} of {name}", values[name])

    def whole_parameters(self) -> AbstractContextManager[Any]:
        """Return a context in which parameters are whole, and may be written."""
        return contextlib.nullcontext()

    def save_and_load(self, *, fresh: bool) -> None:
        """Write model and optimizer, train another step, and load them, into fresh objects or into these."""
        saved = copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict()))
        self.train()
        if fresh:
            self.start()
        self.net.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def double_gradient(self, name: str) -> None:
        """Double a gradient by name, if there is one."""
        gradient = self.net.get_parameter(name).grad
        if gradient is not None:
            gradient.mul_(2)

    def train(self) -> None:
        """Take a whole step."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class BoostedRun(Run):
    """The same on this rank. Collective: every rank of the world, in step.

    Args:
        program: As for `Run`, as are the others.
        num_ranks: As for `Run`.
        folder: The same on every rank.
        make_plugin: Returns the plugin.
    """

    def __init__(
        self, program: Program, num_ranks: int, folder: Path, make_plugin: Callable[[], Plugin | None]
    ) -> None:
        self._make_plugin = make_plugin
        self._rank = DistCoordinator().rank
        super().__init__(program, num_ranks, folder)

    def start(self) -> None:
        """Make the objects and boost them."""
        self.booster = Booster("cpu", None, self._make_plugin())
        model, optimizer = self.objects()
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)

    def batch(self) -> Tensor:
        """Return this rank's samples."""
        return super().batch()[self._rank :: self.num_ranks]

    def backward_of(self, loss: Tensor, *, directly: bool, retain_graph: bool) -> None:
        """Run backward by the Booster, or by the loss's own method."""
        if directly:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        else:
            self.booster.backward(loss, self.optimizer, retain_graph=retain_graph)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over ranks."""
        return torch.stack(DistCoordinator().all_gather_object(value)).mean()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the Booster's context."""
        return self.booster.no_sync(self.model, self.optimizer)

    def clip_by_norm(self, max_norm: float) -> None:
        """Clip, and note the norm."""
        self.note("norm", self.optimizer.clip_grad_by_norm(max_norm))

    def clip_by_value(self, value: float) -> None:
        """Clip each element."""
        self.optimizer.clip_grad_by_value(value)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that there are, whole."""
        found = {name: full_gradient(self.booster, self.model, name) for name, _ in self.net.named_parameters()}
        return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}

    def parameters(self) -> dict[str, Tensor]:
        """Return parameters and buffers, whole."""
        return whole_model(self.booster, self.model)

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state, whole."""
        found = assembled(self.booster.state_adapter(self.model, self.optimizer).optimizer_shards())
        return {key: value for key, value in found.items() if value.numel() > 1}

    def whole_parameters(self) -> AbstractContextManager[Any]:
        """Return the model's context."""
        context: AbstractContextManager[Any] = self.model.whole_parameters(writes=True)
        return context

    def double_gradient(self, name: str) -> None:
        """Double a gradient by name, if there is one."""
        gradient = full_gradient(self.booster, self.model, name)
        if gradient is not None:
            set_full_gradient(self.booster, self.model, name, 2 * gradient)

    def save_and_load(self, *, fresh: bool) -> None:
        """Write model and optimizer, train another step, and load them, into fresh objects or into these."""
        place = self.folder / str(len(self.noted))
        self.booster.save_model(self.model, place / "model", shard=True)
        self.booster.save_optimizer(self.optimizer, place / "optimizer", shard=True)
        self.train()
        if fresh:
            self.start()
        self.booster.load_model(self.model, place / "model")
        self.booster.load_optimizer(self.optimizer, place / "optimizer")


def _no_sync(run: Run) -> None:
    with run.no_sync():
        run.backward()


def _in_no_sync(run: Run) -> None:
    with run.no_sync():
        run.backward(directly=True)


def _step(run: Run) -> None:
    run.note_all("gradient", run.gradients())
    run.optimizer.step()
    run.optimizer.zero_grad()


def _step_clipped(run: Run) -> None:
    run.clip_by_norm(0.05)
    run.optimizer.step()
    run.optimizer.zero_grad()


def _evaluate(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.note("evaluation", run.mean(run.model(run.batch()).square().mean()))
    run.model.train()


def _first(run: Run) -> nn.Parameter:
    return next(iter(run.net.parameters()))


def _freeze(run: Run, *, is_trained: bool) -> None:
    for parameter in run.net.get_submodule("head").parameters():
        parameter.requires_grad_(is_trained)


def _set_lr(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


def _write(run: Run, change: Callable[[Tensor], Any]) -> None:
    with torch.no_grad():
        change(_first(run))


def _assign_data(run: Run) -> None:
    first = _first(run)
    first.data = first.data * 0.5


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-0.5, 0.5, tensor.numel(), dtype=tensor.dtype).view(tensor.shape)


def _lerp(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.net.parameters():
            parameter.lerp_(parameter * 2, 0.25)


def _initialize(module: nn.Module) -> None:
    if type(module) is nn.Linear:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(_other_values(parameter))


def _write_whole(run: Run) -> None:
    with run.whole_parameters(), torch.no_grad():
        for parameter in run.net.parameters():
            parameter.mul_(0.9)


def _hook(run: Run) -> None:
    _first(run).register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]


def _scale_gradients(run: Run) -> None:
    if not run.losses:
        run.forward()
    run.backward()
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def _load_own_state(run: Run) -> None:
    run.model.load_state_dict({name: value * 0.9 if value.is_floating_point() else value
                               for name, value in run.model.state_dict().items()})  # fmt: skip


class _PlannedError(Exception):
    """Raised by an operation that shows what comes after an error."""


def _raise(*_: Any) -> None:
    raise _PlannedError


def _forward_that_raises(run: Run) -> None:
    handle = run.net.get_submodule("head").register_forward_pre_hook(_raise)
    with contextlib.suppress(_PlannedError):
        run.model(run.batch())
    handle.remove()


def _backward_that_raises(run: Run) -> None:
    handles = []
    last = run.net.get_submodule("layers")[-1]  # type: ignore[index]
    handle = last.register_forward_hook(lambda _, __, output: handles.append(output.register_hook(_raise)))
    loss = run.model(run.batch()).square().mean()
    handle.remove()
    with contextlib.suppress(_PlannedError):
        run.backward_of(loss, directly=False, retain_graph=False)
    run.optimizer.zero_grad()


def _penalty(run: Run) -> None:
    x = run.batch().requires_grad_()
    out = run.model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    run.losses.append(gradient.square().mean() + out.mean())


def _closure_step(run: Run) -> None:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        run.backward()
        return torch.zeros(())

    run.optimizer.step(closure)


def _evaluate_a_part(run: Run) -> None:
    with torch.no_grad():
        run.note("part", run.mean(run.net.get_submodule("head")(run.batch()).square().mean()))


def _evaluate_a_copy(run: Run) -> None:
    with torch.no_grad():
        run.note("copy", run.mean(copy.deepcopy(run.model)(run.batch()).square().mean()))


def _drop_gradient(run: Run) -> None:
    for parameter in run.net.get_submodule("head").parameters():
        parameter.grad = None


def _zero_gradients(run: Run) -> None:
    for parameter in run.net.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def _assign_gradient(run: Run) -> None:
    first = _first(run)
    first.grad = torch.ones_like(first)


def _train_more(run: Run) -> None:
    held = {id(each) for group in run.optimizer.param_groups for each in group["params"]}
    frozen = [each.shift for each in run.net.modules() if isinstance(each, _Own) and not each.shift.requires_grad]
    if frozen and not any(id(each) in held for each in frozen):
        run.optimizer.add_param_group({"params": [each.requires_grad_() for each in frozen], "lr": 0.02})


def _inference(run: Run) -> None:
    run.model.eval()
    with torch.inference_mode():
        run.note("inference", run.mean(run.model(run.batch()).square().mean()).clone())
    run.model.train()


def _another_model(_: Run) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        other = nn.Linear(_WIDTH, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(2, _WIDTH)).square().mean().backward()
    optimizer.step()


OPERATIONS: dict[str, Callable[[Run], Any]] = {
    "forward": Run.forward,
    "two losses": lambda run: run.forward(other=True),
    "backward": Run.backward,
    "loss.backward": lambda run: run.backward(directly=True),
    "retained graph": lambda run: run.backward(retain_graph=True),
    "no_sync": _no_sync,
    "loss.backward in no_sync": _in_no_sync,
    "step": _step,
    "step clipped": _step_clipped,
    "step alone": lambda run: run.optimizer.step(),
    "clip by norm": lambda run: run.clip_by_norm(0.1),
    "clip by value": lambda run: run.clip_by_value(0.01),
    "zero_grad": lambda run: run.optimizer.zero_grad(),
    "zero_grad(False)": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda run: run.model.zero_grad(),
    "evaluate": _evaluate,
    "eval mode": lambda run: run.model.eval(),
    "to where it is": lambda run: run.model.to("cpu").cpu(),
    "freeze": partial(_freeze, is_trained=False),
    "unfreeze": partial(_freeze, is_trained=True),
    "learning rate": _set_lr,
    "read gradients": lambda run: run.note_all("gradient", run.gradients()),
    "read parameters": lambda run: run.note_all("parameter", run.parameters()),
    "mul_": lambda run: _write(run, lambda weight: weight.mul_(0.5)),
    "clamp_": lambda run: _write(run, lambda weight: weight.clamp_(-0.1, 0.1)),
    "copy_": lambda run: _write(run, lambda weight: weight.copy_(_other_values(weight))),
    "element": lambda run: _write(run, lambda weight: weight.view(-1)[0].fill_(0.5)),
    "lerp_": _lerp,
    "apply(init)": lambda run: run.model.apply(_initialize),
    "data.mul_": lambda run: _first(run).data.mul_(0.5),
    "data = x": _assign_data,
    "write whole": _write_whole,
    "hook": _hook,
    "scale gradients": _scale_gradients,
    "state_dict": _load_own_state,
    "deepcopy": lambda run: copy.deepcopy(run.model) and None,
    "AveragedModel": lambda run: torch.optim.swa_utils.AveragedModel(run.model) and None,
    "save and load": lambda run: run.save_and_load(fresh=False),
    "save and load fresh": lambda run: run.save_and_load(fresh=True),
    "another model": _another_model,
    "inference mode": _inference,
    "forward that raises": _forward_that_raises,
    "backward that raises": _backward_that_raises,
    "penalty": _penalty,
    "closure": _closure_step,
    "part": _evaluate_a_part,
    "copy": _evaluate_a_copy,
    "drop gradient": _drop_gradient,
    "zero gradients": _zero_gradients,
    "assign gradient": _assign_gradient,
    "double a gradient": lambda run: run.double_gradient("head.weight"),
    "train more": _train_more,
}
"""What a program does. Each may come at any moment: what it needs, such as a loss, it makes."""


_WRITES = (
    "mul_",
    "clamp_",
    "copy_",
    "element",
    "lerp_",
    "apply(init)",
    "data.mul_",
    "data = x",
    "write whole",
    "scale gradients",
    "hook",
    "assign gradient",
    "drop gradient",
    "zero gradients",
)
_ENDING = ("backward", "step", "read parameters", "backward", "step", "read parameters")


@dataclass
class _Outcome:
    """What became of a program.

    Args:
        noted: What is compared, of each operation that was run to its end.
        error: What the next one raised.
    """

    noted: list[dict[str, Tensor]] = field(default_factory=list)
    error: Exception | None = None


def _execute(run: Run, operations: tuple[str, ...]) -> _Outcome:
    outcome = _Outcome()
    for name in operations:
        run.noted = {}
        try:
            OPERATIONS[name](run)
        except Exception as error:  # noqa: BLE001 - every kind is judged
            outcome.error = error
            return outcome
        outcome.noted.append(run.noted)
    return outcome


def _judged(program: Program, folder: str, make_plugin: Callable[[], Plugin | None]) -> tuple[list[int], str]:
    """Return the places of the operations that were refused, and what was wrong on this rank. Collective.

    A program with an operation that is refused is run again without it.
    """
    num_ranks = DistCoordinator().world_size
    places = [*range(len(program.operations))]
    refused: list[int] = []
    while True:
        operations = (*(program.operations[place] for place in places), *_ENDING)
        plain = Run(program, num_ranks, Path(folder))
        expected = _execute(plain, operations)
        try:
            run = BoostedRun(program, num_ranks, Path(folder) / str(len(places)), make_plugin)
        except BoosterError as error:
            return refused, f"`boost` raised {type(error).__name__}: {error}"
        found = _execute(run, operations)
        wrong = _difference(operations, found, expected)
        if wrong or found.error is None:
            return refused, wrong or ("" if expected.error else _state_difference(run, plain))
        if not places:
            return refused, f"{operations} were refused: {found.error}"
        count = len(found.noted)
        # A later call may refuse what a write has left.
        writes = [index for index, name in enumerate(operations[: min(count + 1, len(places))]) if name in _WRITES]
        refused.append(places.pop(writes[-1] if writes else min(count, len(places) - 1)))


def _difference(operations: tuple[str, ...], found: _Outcome, expected: _Outcome) -> str:
    """Return what differs up to the first error, or what is wrong with that."""
    for name, ours, theirs in zip(operations, found.noted, expected.noted, strict=False):
        try:
            assert_same_tensors(ours, theirs, _CLOSE)
        except AssertionError as error:
            return f"after '{name}' of {operations}: {error}"
    if found.error is None and expected.error is not None:
        return f"'{operations[len(expected.noted)]}' of {operations} did not raise {expected.error!r}"
    if found.error is None or isinstance(found.error, BoosterError) or expected.error is not None:
        return ""
    return f"'{operations[len(found.noted)]}' of {operations} raised {found.error!r}"


def _state_difference(run: Run, plain: Run) -> str:
    try:
        assert_same_tensors(run.state(), plain.state(), _CLOSE)
    except AssertionError as error:
        return f"the optimizer's state: {error}"
    return ""


def judge(program: Program, make_plugin: Callable[[], Plugin | None], ranks: Ranks) -> list[str]:
    """Run a program in one process and under a plugin, and compare all that it notes.

    Args:
        program: What is run.
        make_plugin: Returns the plugin; a function or class at a module's top level.
        ranks: Those of `booster_testing.open_ranks`.

    Returns:
        The names of the operations that were refused by a `BoosterError` on every rank.

    Raises:
        AssertionError: If something differs, a rank raises something else than a `BoosterError`, or ranks refuse
            different operations.
        RankError: As for `run_on_ranks`.

    Collective: none; called in the test's process.
    """
    folder = tempfile.mkdtemp(prefix="program-")
    try:
        found = ranks.call(_judged, program, folder, make_plugin)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    refused = [places for places, _ in found]
    problems = [f"rank {rank}: {wrong}" for rank, (_, wrong) in enumerate(found) if wrong]
    if problems or refused.count(refused[0]) < len(refused):
        ranks.close()  # they may be at different calls, which the next program would meet
    assert not problems, " ".join(problems)
    assert all(places == refused[0] for places in refused), f"ranks refuse other operations of {program}: {refused}"
    return [program.operations[place] for place in refused[0]]


def programs(
    *, most: int = 12, layers: Collection[str] = tuple(LAYERS), operations: Collection[str] = tuple(OPERATIONS)
) -> Any:
    """Return a strategy of Hypothesis that draws programs.

    Args:
        most: Of operations.
        layers: Names of the layers that models are made of.
        operations: Names of the operations.
    """
    from hypothesis import strategies

    return strategies.builds(
        Program,
        layers=strategies.lists(strategies.sampled_from([*layers]), min_size=1, max_size=4).map(tuple),
        operations=strategies.lists(strategies.sampled_from([*operations]), min_size=1, max_size=most).map(tuple),
        optimizer=strategies.sampled_from(["sgd", "adamw"]),
    )
