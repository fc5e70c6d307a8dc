"""Trainings whose loop a test writes, and which run plainly in one process and under a plugin on ranks.

A loop is a function at the top of a module:

    def accumulates(run):
        for step in range(3):
            with run.no_sync():
                run.backward(run.loss(2 * step))
            run.backward(run.loss(2 * step + 1))
            run.step()

and `assert_same_loop(accumulates, case, setting)` a whole test; `@same_loop(case, setting)` makes the loop itself one.
All ranks have samples of their own.
"""

import contextlib
import functools
import inspect

import torch
from torch import nn

from booster_runtime import full_gradient, to_device
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors
from booster_testing.training import whole_model


class Run:
    """A training of a case: in one process with the samples of all ranks, or of this rank with its own.

    Args:
        case: What is trained; its functions are used, and its settings of a loop are not.
        setting: Under what; ``None`` for one process.
        num_ranks: Number of ranks.
        own: In `step`, note this rank's own gradients as they are, and its own parameters; both are whole.

    Attributes:
        net: The model.
        model: What is called: the same, or what `boost` returned.
        steps: For each `step`, tensors by name.
    """

    def __init__(self, case, setting=None, num_ranks=2, *, own=False):
        self.case, self._own = case, own or setting is None
        self.net, self.optimizer = case.make()
        self.model = self.net
        self._names = [name for name, _ in self.net.named_parameters()]
        self.booster = None if setting is None else setting.make_booster()
        self.ranks = range(num_ranks)
        if self.booster is not None:
            self.ranks = [self.booster.context.coordinator.rank]
            self.model, self.optimizer, *_ = self.booster.boost(self.net, self.optimizer)
        self.steps = []

    def batches(self, number):
        """Return the samples of each rank."""
        batches = [self.case.batch(number, rank) for rank in self.ranks]
        return batches if self.booster is None else to_device(self.booster, batches)

    def mean(self, number, loss_of):
        """Return the mean over ranks of a function of the samples of a rank and its number."""
        return torch.stack([*map(loss_of, self.batches(number), self.ranks)]).mean()

    def loss(self, number, **options):
        """Return the loss of a batch; the model is called with the options, too."""
        return self.mean(number, lambda batch, _: self.case.loss(self.model(batch, **options), batch))

    def backward(self, loss, **options):
        """Run backward by the Booster if there is one."""
        if self.booster is None:
            loss.backward(**options)
        else:
            self.booster.backward(loss, self.optimizer, **options)

    def no_sync(self):
        """Return the context of micro-batches that aren't a step's last."""
        return contextlib.nullcontext() if self.booster is None else self.booster.no_sync(self.model, self.optimizer)

    def clip(self, max_norm):
        """Clip by norm, and return the norm."""
        if self.booster is None:
            return nn.utils.clip_grad_norm_(self.net.parameters(), max_norm)
        return self.optimizer.clip_grad_by_norm(max_norm)

    def gradients(self):
        """Return copies of the gradients that there are, which ranks complete for that. Collective."""
        if self.booster is None:
            return self._own_gradients()
        return self._copies({name: full_gradient(self.booster, self.model, name) for name in self._names})

    def _own_gradients(self):
        return self._copies({name: parameter.grad for name, parameter in self.net.named_parameters()})

    def _copies(self, found):
        return {name: gradient.detach().cpu().clone() for name, gradient in found.items() if gradient is not None}

    def parameters(self):
        """Return copies of the parameters. Collective."""
        if self._own:
            return {name: parameter.detach().cpu().clone() for name, parameter in self.net.named_parameters()}
        whole = whole_model(self.booster, self.model)
        return {name: whole[name].cpu() for name in self._names}

    def step(self, max_norm=None):
        """Clip if asked to, step and drop gradients; note gradients, norm and parameters."""
        gradients = self._own_gradients() if self._own else self.gradients()
        noted = {f"gradient of {name}": gradient for name, gradient in gradients.items()}
        if max_norm is not None:
            noted["norm"] = self.clip(max_norm).clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.append({**noted, **self.parameters()})


def drive(loop, case, setting, num_ranks, options):
    """Run a loop, and return the tensors of each step and the parameters after it."""
    run = Run(case, setting, num_ranks, **options)
    loop(run)
    return [*run.steps, run.parameters()]


def assert_same_loop(loop, case, setting, **options):
    """Assert that a loop leads to the same gradients, norms and parameters in one process and on each rank.

    Args:
        loop: Drives a run.
        case: As for `Run`.
        setting: Under what.
        options: As for `Run`. Where ranks show ``own`` parameters, all must be equal bit by bit.
    """
    expected = drive(loop, case, None, setting.num_ranks, {})
    results = run_on_ranks(drive, setting.num_ranks, loop, case, setting, setting.num_ranks, options)
    assert_same_steps(results, expected, case)
    if options.get("own"):
        first, *others = results
        for other in others:
            for ours, theirs in zip(first, other, strict=True):
                assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


def same_loop(case, setting, **options):
    """Let a test be a loop, whose first parameter is a `Run`, which is compared as by `assert_same_loop`.

    Args:
        case: As for `assert_same_loop`.
        setting: As for `assert_same_loop`, or a function of parameters of pytest, which it names.
        options: As for `assert_same_loop`.
    """
    chosen_by = list(inspect.signature(setting).parameters) if callable(setting) else []

    def decorate(loop):
        own = list(inspect.signature(loop).parameters)[1:]

        @functools.wraps(loop)
        def test(*run, **parameters):
            if run:  # in a process that drives the loop, which found the test under its name
                loop(*run, **parameters)
                return
            chosen = setting(*(parameters[name] for name in chosen_by)) if chosen_by else setting
            bound = functools.partial(test, **{name: parameters[name] for name in own})
            assert_same_loop(bound, case, chosen, **options)

        named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dict.fromkeys([*own, *chosen_by])]
        test.__signature__ = inspect.Signature(named)
        return test

    return decorate


def assert_same_steps(results, expected, case):
    """Assert that what each rank noted is what one process noted."""
    for result in results:
        for step, (ours, theirs) in enumerate(zip(result, expected, strict=True)):
            try:
                assert_same_tensors(ours, theirs, case.tolerance)
            except AssertionError as error:
                msg = f"step {step}: {error}"
                raise AssertionError(msg) from None
