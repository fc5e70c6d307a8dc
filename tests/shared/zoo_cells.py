"""Measure a cell of the zoo's matrix: what a plugin does with a model, compared with one process.

A cell has three parts. The first trains under the plugin on two ranks and saves. The second builds the model lazily,
compares its weights with those of eager construction, loads the checkpoint of one process, and takes a step. The third
loads the plugin's checkpoint in one process and takes a step.

A tensor may differ from that of one process by the tolerance of its dtype, or by a few times the rounding error of
that process, which is its distance to the same training in fp64. Of gradients that is the largest of all steps: in one
step errors may happen to cancel, as in WavLM's third, where plain torch that computes the batch in two halves is
farther from one that computes it whole than four times that step's distance.
"""

from __future__ import annotations

import importlib
import re
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from model_zoo import MATRIX, ZooModel, get_model
from torch import Tensor, nn
from zoo_results import COLUMNS, Cell
from zoo_training import (
    STEPS,
    WORLD_SIZE,
    CellError,
    Reference,
    capture,
    first_line,
    load_reference,
    loss_on_ranks,
    make_optimizer,
    quiet,
    take_step,
    train_plainly,
    trained,
)

from booster_core import Booster, DistCoordinator
from booster_core.errors import ConfigError
from booster_runtime import LazyInitContext, full_gradient
from booster_testing import RankError, run_on_ranks
from booster_testing.compare import largest_difference, tolerance_for
from booster_testing.rank_pool import RankDiedError, RankTimeoutError
from booster_testing.training import whole_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PLUGINS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("booster_ddp.TorchDDPPlugin", {}),
    "fsdp": ("booster_fsdp.TorchFSDPPlugin", {}),
    "zero": ("booster_zero.LowLevelZeroPlugin", {"stage": 2, "bucket_bytes": 2**16}),
    "gemini": ("booster_gemini.GeminiPlugin", {"min_chunk_bytes": 2**14}),
    "hybrid": ("booster_hybrid.HybridParallelPlugin", {"tp_size": 2}),
    "zero-1": ("booster_zero.LowLevelZeroPlugin", {"stage": 1}),
}
"""Classes and options, such that the small models fill several buckets and chunks."""
WITHOUT_POLICY = {"zero_stage": 1}
"""The hybrid plugin's options for a model without a tensor parallel policy."""
_TIMEOUT_SECONDS = 240.0
_NO_EFFECT = 1e-6
"""Rounding error of a zero gradient, relative to the model's largest gradient: a few times fp32's 2**-24."""
_ZERO = 1e-9
"""Largest gradient, in fp64 and relative to the model's largest, of a parameter without effect on the loss."""
_ROUNDINGS = 4.0
"""Allowed error relative to that of one process: two ranks round as often, but in another order."""
__all__ = ["COLUMNS", "PLUGINS", "Cell", "measure", "measure_plain"]


def measure_plain(name: str, home: Path) -> list[str]:
    """Train the model in one process, into the folder ``home``; return its error, if any."""
    home.mkdir(parents=True, exist_ok=True)
    try:
        run_on_ranks(train_plainly, 1, name, str(home), timeout_seconds=_TIMEOUT_SECONDS)
    except (RankError, RankDiedError, RankTimeoutError) as error:
        return [f"one process: {_first_error(error)}"]
    return []


def measure(name: str, plugin: str, home: Path) -> Cell:
    """Measure a cell, after `measure_plain` of its model into the same folder."""
    folder = home / plugin
    folder.mkdir(exist_ok=True)
    options = _options(name, plugin)
    findings: list[str] = []
    refusals: set[str] = set()
    for part in (_train_and_save, _load_lazily):
        arguments = (name, plugin, options, str(home), str(folder))
        _run(part, WORLD_SIZE, arguments, findings, refusals)
        if refusals:
            return _refused_or_fault(MATRIX[name], plugin, options, refusals)
        if part is _train_and_save and not (folder / "after.pt").exists():
            return Cell(state="fault", options=options, findings=findings)
    _run(_load_alone, 1, (name, str(home), str(folder)), findings, refusals)
    return Cell(state="fault" if findings else "ok", options=options, findings=findings)


def _options(name: str, plugin: str) -> dict[str, Any]:
    """Return the plugin's options for the model."""
    options = PLUGINS[plugin][1]
    if plugin != "hybrid":
        return options
    (has_policy,) = run_on_ranks(_has_policy, 1, name, timeout_seconds=_TIMEOUT_SECONDS)
    return options if has_policy else WITHOUT_POLICY


def _has_policy(name: str) -> bool:
    from booster_hybrid.policy.find import policy_for

    with quiet():
        model = get_model(name).seeded()
    try:
        policy_for(model)
    except ConfigError:
        return False
    return True


def _run(part: Any, world_size: int, arguments: tuple[Any, ...], findings: list[str], refusals: set[str]) -> None:
    """Run a part on ranks; add what it found, or the error that it raised."""
    try:
        per_rank = run_on_ranks(
            part, world_size, *arguments, timeout_seconds=_TIMEOUT_SECONDS, group_timeout_seconds=60.0
        )
    except RankError as error:
        if not error.exceptions:  # threads or groups left behind
            findings.append(first_line(error))
            return
        found = {_first_error(each) for each in error.exceptions.values() if each is not None}
        if len(error.exceptions) == world_size and len(found) == 1 and part is _train_and_save:
            refusals |= found
        findings += sorted(found)
        if len(error.exceptions) < world_size:
            findings.append(f"raised on {len(error.exceptions)} of {world_size} ranks")
    except (RankDiedError, RankTimeoutError) as error:
        findings.append(f"{part.__name__.strip('_')}: {type(error).__name__}: {first_line(error)}")
    else:
        findings += per_rank[0]


def _first_error(error: BaseException) -> str:
    """Return the phase, class and first line of an error on ranks."""
    if isinstance(error, CellError):
        return f"{error.phase}: {error.kind}: {error.line}"
    inner = [each for each in getattr(error, "exceptions", {}).values() if each is not None]
    return _first_error(inner[0]) if inner else f"{type(error).__name__}: {first_line(error)}"


def _refused_or_fault(zoo: ZooModel, plugin: str, options: dict[str, Any], errors: set[str]) -> Cell:
    """Return the cell of a model that raised one error on every rank."""
    (error,) = errors
    pattern = zoo.refused.get(plugin)
    state = "refused" if pattern is not None and re.search(pattern, error) else "fault"
    return Cell(state=state, options=options, findings=[error])


def _booster(plugin: str, options: Mapping[str, Any], zoo: ZooModel) -> Booster:
    home, _, kind = PLUGINS[plugin][0].rpartition(".")
    # Encoder-decoders and others don't show without a batch how their layers are called.
    example = {"example_batch": zoo.share(0, 0, 2)} if "tp_size" in options else {}
    return Booster("cpu", plugin=getattr(importlib.import_module(home), kind)(**options, **example))


def _train_and_save(name: str, plugin: str, options: dict[str, Any], home: str, folder: str) -> list[str]:
    """Train under the plugin and save; return what differs from one process."""
    zoo, reference = get_model(name), load_reference(home)
    with quiet():
        original = zoo.seeded()
        shapes = {key: parameter.shape for key, parameter in trained(original).items()}
        booster = _booster(plugin, options, zoo)
        model, optimizer, *_ = capture("boost", lambda: booster.boost(original, make_optimizer(zoo, original)))
        start = _whole_with_buffers(booster, model)
        findings: list[str] = []
        for step in range(STEPS):
            gradients = _gradients(booster, zoo, model, optimizer, step, shapes)
            if not findings:
                findings += gradient_findings(gradients, reference, step, zoo)
            _agree(gradients)
            capture("step", optimizer.step)
            optimizer.zero_grad()
        after = _saved_state(booster, model)
        if not findings:
            findings += parameter_findings({key: after[key] for key in shapes}, reference, 0, zoo)
        capture("save", lambda: booster.save_model(model, f"{folder}/model", shard=True))
        capture("save", lambda: booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True))
    if DistCoordinator().is_master():
        torch.save(start, f"{folder}/start.pt")
        torch.save(after, f"{folder}/after.pt")
    return findings


def _gradients(
    booster: Booster, zoo: ZooModel, model: nn.Module, optimizer: Any, step: int, shapes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    """Run forward and backward of a step; return whole gradients by name."""
    loss = capture("forward", lambda: loss_on_ranks(booster, zoo, model, step))
    capture("backward", lambda: booster.backward(loss, optimizer))
    whole = capture("gradients", lambda: {name: full_gradient(booster, model, name) for name in shapes})
    # A plugin may return a zero gradient for a parameter without a gradient.
    found = {name: torch.zeros(shapes[name]) if value is None else value for name, value in whole.items()}
    return {name: value.to_dense() if value.is_sparse else value for name, value in found.items()}


def _agree(gradients: dict[str, Tensor]) -> None:
    """Raise if ranks have different gradients."""
    coordinator = DistCoordinator()
    sums = [complex(value.to(torch.complex128).sum()) for value in gradients.values()]
    if coordinator.all_gather_object(sums) != [sums] * coordinator.world_size:
        phase, line = "gradients", "ranks disagree on gradients"
        raise CellError(phase, "AssertionError", line)


def _load_lazily(name: str, plugin: str, options: dict[str, Any], home: str, folder: str) -> list[str]:
    """Boost a model that was built lazily, load the checkpoint of one process, and step; return the differences."""
    zoo, reference = get_model(name), load_reference(home)
    with quiet():
        with LazyInitContext():
            original = zoo.seeded()
        shapes = {key: parameter.shape for key, parameter in trained(original).items()}
        booster = _booster(plugin, options, zoo)
        model, optimizer, *_ = capture("lazy boost", lambda: booster.boost(original, make_optimizer(zoo, original)))
        start = _whole_with_buffers(booster, model)
        eager = torch.load(f"{folder}/start.pt", weights_only=False)
        findings = [f"lazy: {each}" for each in same_bits(start, eager)]
        capture("load", lambda: booster.load_model(model, f"{home}/model"))
        capture("load", lambda: booster.load_optimizer(optimizer, f"{home}/optimizer"))
        loaded = _saved_state(booster, model)
        findings += [f"load: {each}" for each in same_bits(loaded, reference.state)]
        gradients = _gradients(booster, zoo, model, optimizer, STEPS, shapes)
        capture("step", optimizer.step)
        after = whole_model(booster, model)
    later = gradient_findings(gradients, reference, STEPS, zoo)
    later = later or parameter_findings({key: after[key] for key in shapes}, reference, 1, zoo)
    return findings + [f"loaded, then {each}" for each in later]


def _load_alone(name: str, home: str, folder: str) -> list[str]:
    """Load the plugin's checkpoint in one process and step; return the differences."""
    zoo, reference = get_model(name), load_reference(home)
    with quiet():
        original = zoo.seeded()
        booster = Booster("cpu")
        model, optimizer, *_ = booster.boost(original, make_optimizer(zoo, original))
        capture("load on one process", lambda: booster.load_model(model, f"{folder}/model"))
        capture("load on one process", lambda: booster.load_optimizer(optimizer, f"{folder}/optimizer"))
        loaded = _saved_state(booster, model)
        findings = [
            f"load on one process: {each}"
            for each in same_bits(loaded, torch.load(f"{folder}/after.pt", weights_only=False))
        ]
        gradients = take_step(zoo, model, optimizer, STEPS, booster=booster)
        after = {key: parameter.detach() for key, parameter in trained(model.unwrap()).items()}
    later = gradient_findings(gradients, reference, STEPS, zoo)
    later = later or parameter_findings(after, reference, 1, zoo)
    return findings + [f"loaded on one process, then {each}" for each in later]


def _saved_state(booster: Booster, model: Any) -> dict[str, Any]:
    """Return what a checkpoint holds: whole parameters and buffers, and the modules' extra states."""
    return {**whole_model(booster, model), **booster.state_adapter(model).extra_state()}


def _whole_with_buffers(booster: Booster, model: Any) -> dict[str, Tensor]:
    """Return parameters and buffers, also those that are not saved."""
    buffers = {f"buffer {name}": value.detach().clone() for name, value in model.unwrap().named_buffers()}
    return {**whole_model(booster, model), **buffers}


# ---- what differs, as sentences for the page


def gradient_findings(ours: dict[str, Tensor], reference: Reference, step: int, zoo: ZooModel) -> list[str]:
    """Return a sentence for the gradient that differs most from that of one process, if one does."""
    rounded = list(zip(reference.plain.gradients, reference.exact.gradients, strict=True)) if reference.exact else []
    return _findings(
        f"gradient of step {step + 1}", ours, reference.plain.gradients[step], rounded, reference, step, zoo
    )


def parameter_findings(ours: dict[str, Tensor], reference: Reference, last: int, zoo: ZooModel) -> list[str]:
    """Return a sentence for the parameter that differs most: at the checkpoint (``last=0``) or one step later."""
    plain = reference.plain.parameters[last]
    rounded = [(plain, reference.exact.parameters[last])] if reference.exact else []
    # A step of this optimizer is at most a tenth of the gradient, so the tolerance of gradients holds for steps, too.
    return _findings(f"after step {STEPS + last}", ours, plain, rounded, reference, STEPS - 1 + last, zoo)


def _findings(
    what: str,
    ours: dict[str, Tensor],
    plain: dict[str, Tensor],
    rounded: list[tuple[dict[str, Tensor], dict[str, Tensor]]],
    reference: Reference,
    step: int,
    zoo: ZooModel,
) -> list[str]:
    """Compare each tensor on its own scale, and those without effect on the loss on the model's scale."""
    if ours.keys() != plain.keys():
        return [f"{what}: other names, {', '.join(sorted(ours.keys() ^ plain.keys())[:3])}"]
    largest = max(float(value.abs().max()) for value in reference.plain.gradients[step].values() if value.numel())
    without = _without_effect(reference, step, zoo)
    beyond: dict[str, float] = {}
    for name, expected in plain.items():
        if ours[name].shape != expected.shape:
            return [f"{what}: shape of `{name}` is {tuple(ours[name].shape)}, not {tuple(expected.shape)}"]
        rounding = max((_difference(one[name], exact[name]) for one, exact in rounded), default=0.0)
        allowed = max(tolerance_for(reference.dtype).relative, _ROUNDINGS * rounding)
        difference = _difference(ours[name], expected)
        if name in without and float((ours[name] - expected).abs().max()) <= _NO_EFFECT * largest:
            continue
        if not difference <= allowed:
            beyond[name] = difference
    if not beyond:
        return []
    worst = max(beyond, key=lambda name: beyond[name])
    return [f"{what}: `{worst}` differs by {beyond[worst]:.1e} of its largest value ({len(beyond)} of {len(plain)} do)"]


def _without_effect(reference: Reference, step: int, zoo: ZooModel) -> set[str]:
    """Return the names of parameters whose gradients are zero except for rounding."""
    names = reference.plain.gradients[step].keys()
    listed = {name for name in names if any(fnmatch(name, pattern) for pattern in zoo.no_effect)}
    exact = reference.plain.gradients[step] if reference.dtype == torch.float64 else None
    if reference.exact is not None:
        exact = reference.exact.gradients[step]
    if exact is None:
        return listed
    largest = {name: float(value.abs().max()) for name, value in exact.items() if value.numel()}
    return listed | {name for name, value in largest.items() if value <= _ZERO * max(largest.values())}


def _difference(actual: Tensor, expected: Tensor) -> float:
    if actual.is_complex():
        return largest_difference(torch.view_as_real(actual.detach()), torch.view_as_real(expected.detach()))
    return largest_difference(actual.detach(), expected.detach())


def same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
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


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's values, with NaNs replaced."""
    return tensor.detach().nan_to_num() if tensor.is_floating_point() else tensor.detach()
