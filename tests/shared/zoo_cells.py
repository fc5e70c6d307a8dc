"""Measure a cell of the zoo's matrix: what a plugin does with a model, compared with one process.

The model trains under the plugin on two ranks and is saved; one process loads that, saves it again, and takes a step;
the plugin loads what that one has saved into a model that is built lazily, and takes the step, too.

A tensor may differ from that of one process by the tolerance of its dtype, or by a few times the rounding error of
that process, which is its distance to the same training in fp64. Of gradients that is the largest of all steps: in one
step errors may happen to cancel, as in WavLM's third, where plain torch that computes the batch in two halves is
farther from one that computes it whole than four times that step's distance.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import warnings
from fnmatch import fnmatch
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from cases import Setting, call, train_boosted, train_plainly, zoo_case
from model_zoo import MATRIX, get_model
from torch import Tensor
from zoo_results import Cell

from booster_core.errors import ConfigError
from booster_runtime import LazyInitContext, full_gradient
from booster_testing import RankError, run_on_ranks
from booster_testing.compare import largest_difference, tolerance_for
from booster_testing.rank_pool import RankDiedError, RankTimeoutError
from booster_testing.training import Trained, whole_model

PLUGINS = {
    "ddp": ("booster_ddp.TorchDDPPlugin", {}),
    "fsdp": ("booster_fsdp.TorchFSDPPlugin", {}),
    "zero": ("booster_zero.LowLevelZeroPlugin", {"stage": 2, "bucket_bytes": 2**16}),
    "gemini": ("booster_gemini.GeminiPlugin", {"min_chunk_bytes": 2**14}),
    "hybrid": ("booster_hybrid.HybridParallelPlugin", {"tp_size": 2}),
}
"""Classes and options, such that the small models fill several buckets and chunks."""
WITHOUT_POLICY = {"zero_stage": 1}
"""The hybrid plugin's options for a model without a tensor parallel policy."""
WORLD_SIZE = 2
STEPS = 3
"""Steps before the checkpoint; one more follows it."""
_LIMITS = {"timeout_seconds": 240.0, "group_timeout_seconds": 60.0}
_NO_EFFECT = 1e-6
"""Rounding error of a zero gradient, relative to the model's largest gradient: a few times fp32's 2**-24."""
_ZERO = 1e-9
"""Largest gradient, in fp64 and relative to the model's largest, of a parameter without effect on the loss."""
_ROUNDINGS = 4.0
"""Allowed error relative to that of one process: two ranks round as often, but in another order."""


def measure(name, plugin, folder):
    """Measure a cell, with checkpoints in a folder."""
    options = PLUGINS[plugin][1]
    findings = []
    first, second = str(folder / "first"), str(folder / "second")
    try:
        if plugin == "hybrid" and not _on_ranks(1, _has_policy, name):
            options = WITHOUT_POLICY
        gradients, parameters, replicas, state = _on_ranks(WORLD_SIZE, _train, name, plugin, options, first)
        plain = _plain(name, replicas)
        for step, found in enumerate(gradients):
            findings = findings or plain.gradient_findings(found, step)
        findings = findings or plain.parameter_findings(parameters, 0)
        for world_size, where, *given in (
            (1, "one process", None, {}, first, second),
            (WORLD_SIZE, "a lazy model", plugin, options, second, None),
        ):
            start, loaded, gradient, parameters = _on_ranks(world_size, _go_on, name, replicas, *given)
            findings += [f"{where} begins otherwise: {each}" for each in same_bits(start, plain.start)]
            findings += [f"loaded by {where}: {each}" for each in same_bits(loaded, state)]
            later = plain.gradient_findings(gradient, STEPS) or plain.parameter_findings(parameters, 1)
            findings += [f"loaded by {where}, then {each}" for each in later]
    except (RankError, RankDiedError, RankTimeoutError) as error:
        return _cell_of_error(error, MATRIX[name].refused.get(plugin), options, findings)
    return Cell(state="fault" if findings else "ok", options=options, findings=findings)


def _on_ranks(world_size, function, *given):
    return run_on_ranks(function, world_size, *given, **_LIMITS)[0]


def _cell_of_error(error, refusal, options, findings):
    """Return a refusal if every rank raised the error of which the zoo has a pattern, and nothing was found before."""
    raised = [each for each in getattr(error, "exceptions", {}).values() if each is not None]
    texts = sorted({text_of(each) for each in raised}) or [text_of(error)]
    is_refusal = refusal is not None and len(raised) == WORLD_SIZE and len(texts) == 1 and not findings
    state = "refused" if is_refusal and re.search(refusal, texts[0]) else "fault"
    return Cell(state=state, options=options, findings=[*findings, *texts])


def text_of(error):
    """Return the class and the first line of an error; those of the first of several."""
    inner = [each for each in getattr(error, "exceptions", {}).values() if each is not None]
    return text_of(inner[0]) if inner else f"{type(error).__name__}: {first_line(error)}"


def first_line(error):
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "")


@contextlib.contextmanager
def quiet():
    """Ignore the warnings of libraries about their own models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- on ranks


def _has_policy(name):
    from booster_hybrid.policy.find import policy_for

    with quiet():
        model = get_model(name).seeded()
    try:
        policy_for(model)
    except ConfigError:
        return False
    return True


def _case(name, steps, *, double=False):
    is_double = double or get_model(name).double
    return zoo_case(name, double=is_double, optimizer=partial(_optimizer, name), steps=steps, max_norm=None)


def _optimizer(name, model):
    """Return AdamW with an epsilon above most gradients, so that rounding errors of tiny ones stay tiny.

    This tests the plugin, not the conditioning of Adam. It is SGD for sparse gradients, which AdamW refuses.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if get_model(name).sparse_gradients:
        return torch.optim.SGD(trained, lr=1e-2)
    return torch.optim.AdamW(trained, lr=1e-3, eps=1e-2, weight_decay=0.0)


def _setting(name, plugin, options):
    if plugin is None:
        return Setting(lambda: None)
    home, _, kind = PLUGINS[plugin][0].rpartition(".")
    # Encoder-decoders and others don't show without a batch how their layers are called.
    example = {"example_batch": get_model(name).share(0, 0, 2)} if "tp_size" in options else {}
    return Setting(getattr(importlib.import_module(home), kind), {**options, **example})


def _trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _filled(gradients, model):
    """Return dense gradients of the parameters that are trained: a plugin may return zeros where there is none."""
    found = {}
    for name, parameter in _trained(model).items():
        gradient = gradients.get(name)
        gradient = torch.zeros(parameter.shape, dtype=parameter.dtype) if gradient is None else gradient
        found[name] = gradient.to_dense() if gradient.is_sparse else gradient
    return found


def _train(name, plugin, options, folder):
    """Train under the plugin and save; return gradients, parameters, the number of replicas, and what was saved."""
    case = _case(name, STEPS)

    def save(booster, model, optimizer):
        _save(booster, model, optimizer, folder)
        return saved_state(booster, model)

    with quiet():
        found = train_boosted(case, _setting(name, plugin, options), save)
        net, _ = case.make()
    gradients = [_filled(each, net) for each in found.trained.gradients]
    _agree(gradients)
    return gradients, {each: found.trained.parameters[each] for each in _trained(net)}, found.num_replicas, found.told


def _agree(gradients):
    """Raise if ranks have different gradients."""
    sums = [complex(value.to(torch.complex128).sum()) for step in gradients for value in step.values()]
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, sums)
    assert everyones == [sums] * len(everyones), "ranks disagree on gradients"


def _save(booster, model, optimizer, folder):
    booster.save_model(model, f"{folder}/model", shard=True)
    booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)


def _go_on(name, replicas, plugin, options, source, target):
    """Load a checkpoint in new objects, save it again, and step; a model under a plugin is built lazily.

    Returns:
        The state before the checkpoint was loaded, what was loaded, the gradients of the step, and the parameters.
    """
    case = _case(name, STEPS + 1)
    booster = _setting(name, plugin, options).make_booster()
    with quiet():
        with contextlib.nullcontext() if plugin is None else LazyInitContext():
            net, given = case.make()
        names = [*_trained(net)]
        model, optimizer, *_ = booster.boost(net, given)
        start = {**whole_model(booster, model), **_buffers(model.unwrap())}
        booster.load_model(model, f"{source}/model")
        booster.load_optimizer(optimizer, f"{source}/optimizer")
        loaded = saved_state(booster, model)
        if target is not None:
            _save(booster, model, optimizer, target)
        replica, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
        shares = range(replicas) if plugin is None else [replica]
        for each in shares:
            batch = case.batch(STEPS, each)
            booster.backward(case.loss(call(model, batch), batch) / len(shares), optimizer)
        gradients = _filled({each: full_gradient(booster, model, each) for each in names}, case.make()[0])
        optimizer.step()
        parameters = whole_model(booster, model)
    return start, loaded, gradients, {each: parameters[each] for each in names}


def saved_state(booster, model):
    """Return what a checkpoint holds: whole parameters and buffers, and the modules' extra states."""
    return {**whole_model(booster, model), **booster.state_adapter(model).extra_state()}


def _buffers(model):
    """Return the buffers, also those that are not saved."""
    return {f"buffer {name}": value.detach().clone() for name, value in model.named_buffers()}


def _train_alone(name, replicas):
    """Train with plain torch on the samples of all replicas, also in fp64 where that works."""
    with quiet():
        net, _ = _case(name, 0).make()
        start = {**{key: parameter.detach() for key, parameter in net.state_dict().items()}, **_buffers(net)}
        trained, exact = _trainings(name, replicas), None
        if not get_model(name).double:
            with contextlib.suppress(
                RuntimeError, TypeError, ValueError, NotImplementedError
            ):  # its forward has a dtype
                exact = _trainings(name, replicas, double=True)
    return Plain(name, start, trained, exact)


def _trainings(name, replicas, *, double=False):
    """Return the training up to the checkpoint, and that of one more step."""
    found = []
    for steps in (STEPS, STEPS + 1):
        case = _case(name, steps, double=double)
        trained, net = train_plainly(case, replicas), case.make()[0]
        gradients = [_filled(each, net) for each in trained.gradients]
        found.append(
            Trained(gradients=gradients, parameters={each: trained.parameters[each] for each in _trained(net)})
        )
    return found[0], found[1]


@lru_cache(maxsize=2)
def _plain(name, replicas):
    return _on_ranks(1, _train_alone, name, replicas)


# ---- what differs, as sentences for the page


class Plain(NamedTuple):
    """What one process does.

    Attributes:
        name: Of the model.
        start: Its parameters and buffers before the training.
        trained: The training up to the checkpoint, and that of one more step.
        exact: The same in fp64; ``None`` for a model that is trained in it anyway, or can't compute in it.
    """

    name: str
    start: dict[str, Tensor]
    trained: tuple[Trained, Trained]
    exact: tuple[Trained, Trained] | None

    def gradient_findings(self, ours, step):
        """Return a sentence for the gradient that differs most from that of one process, if one does."""
        plain = self.trained[1].gradients
        rounded = [] if self.exact is None else list(zip(plain, self.exact[1].gradients, strict=True))
        return self._findings(f"gradient of step {step + 1}", ours, plain[step], rounded, step)

    def parameter_findings(self, ours, last):
        """Return a sentence for the parameter that differs most: at the checkpoint (``last=0``) or one step later."""
        plain = self.trained[last].parameters
        rounded = [] if self.exact is None else [(plain, self.exact[last].parameters)]
        # A step of this optimizer is at most a tenth of the gradient, so the tolerance of gradients holds for it, too.
        return self._findings(f"after step {STEPS + last}", ours, plain, rounded, STEPS - 1 + last)

    def _findings(self, what, ours, plain, rounded, step):
        """Compare each tensor on its own scale, and those without effect on the loss on the model's scale."""
        if ours.keys() != plain.keys():
            return [f"{what}: other names, {', '.join(sorted(ours.keys() ^ plain.keys())[:3])}"]
        gradients = self.trained[1].gradients[step]
        largest = max(float(value.abs().max()) for value in gradients.values() if value.numel())
        without = self._without_effect(step)
        beyond = {}
        for name, expected in plain.items():
            if ours[name].shape != expected.shape:
                return [f"{what}: shape of `{name}` is {tuple(ours[name].shape)}, not {tuple(expected.shape)}"]
            rounding = max((_difference(one[name], exact[name]) for one, exact in rounded), default=0.0)
            dtype = torch.float64 if MATRIX[self.name].double else torch.float32
            allowed = max(tolerance_for(dtype).relative, _ROUNDINGS * rounding)
            difference = _difference(ours[name], expected)
            if name in without and float((ours[name] - expected).abs().max()) <= _NO_EFFECT * largest:
                continue
            if not difference <= allowed:
                beyond[name] = difference
        if not beyond:
            return []
        worst = max(beyond, key=lambda name: beyond[name])
        difference = f"{beyond[worst]:.1e} of its largest value"
        return [f"{what}: `{worst}` differs by {difference} ({len(beyond)} of {len(plain)} do)"]

    def _without_effect(self, step):
        """Return the names of parameters whose gradients are zero except for rounding."""
        gradients, model = self.trained[1].gradients[step], MATRIX[self.name]
        listed = {name for name in gradients if any(fnmatch(name, pattern) for pattern in model.no_effect)}
        if self.exact is not None:
            gradients = self.exact[1].gradients[step]
        elif not model.double:
            return listed
        largest = {name: float(value.abs().max()) for name, value in gradients.items() if value.numel()}
        return listed | {name for name, value in largest.items() if value <= _ZERO * max(largest.values())}


def _difference(actual, expected):
    if actual.is_complex():
        return largest_difference(torch.view_as_real(actual.detach()), torch.view_as_real(expected.detach()))
    return largest_difference(actual.detach(), expected.detach())


def same_bits(ours, theirs):
    """Return a sentence for the first tensor or extra state that differs at all; NaNs are equal."""
    if ours.keys() != theirs.keys():
        return [f"other names: {', '.join(sorted(ours.keys() ^ theirs.keys())[:3])}"]
    for name, expected in theirs.items():
        actual = ours[name]
        if not isinstance(expected, Tensor):
            if actual != expected:
                return [f"`{name}` is {actual!r}, not {expected!r}"]
            continue
        if actual.dtype != expected.dtype or actual.shape != expected.shape:
            return [f"`{name}` is {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"]
        if not torch.equal(_bits(actual), _bits(expected)):
            return [f"`{name}` differs by {_difference(actual, expected):.1e} of its largest value"]
    return []


def _bits(tensor):
    """Return a tensor's values, with NaNs replaced."""
    return tensor.detach().nan_to_num() if tensor.is_floating_point() else tensor.detach()
