"""Measure a cell of the zoo's matrix: what a plugin does with a model, compared with one process.

A cell has three parts. The first trains under the plugin on two ranks and saves. The second builds the model lazily,
compares its weights with those of eager construction, loads the checkpoint of one process, and takes a step. The third
loads the plugin's checkpoint in one process and takes a step.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

import torch
from model_zoo import MATRIX, ZooModel, get_model
from torch import Tensor, nn
from zoo_compare import gradient_findings, parameter_findings, same_bits
from zoo_results import COLUMNS, Cell
from zoo_training import (
    STEPS,
    WORLD_SIZE,
    CellError,
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
