"""`check_sequences`: prove, before anything is split, that a model computes the same from parts of sequences.

The model itself runs on a batch and random weights, with one layer of each kind in its lists: whole, by its own code,
and with its sequences split, for all ranks within this process, at two lengths. So positions, masks and attention are
what they are in training. Outputs and the gradients of all parameters are compared. Nothing is communicated.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.state import compiled_module
from booster_hybrid.modules import ModulePatches, inner_model
from booster_hybrid.probe.calls import call_of_other_length, calls_of_model, is_clear
from booster_hybrid.probe.in_process import InProcessRank, on_ranks
from booster_hybrid.probe.running import NoValuesError, Result, Runner, Setting, random_values, restored, settings_of
from booster_hybrid.probe.units import structural_key
from booster_hybrid.sequence_parallel.apply import split_sequences
from booster_hybrid.sequence_parallel.layers import lists_of_layers
from booster_hybrid.sequence_parallel.mixers import find_mixers
from booster_hybrid.sequence_parallel.stack import Mixers
from booster_hybrid.sequence_parallel.ulysses import head_ranges
from booster_hybrid.tensor_parallel.split import cut_units

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.probe.calls import Call
    from booster_hybrid.sequence_parallel.stack import Argument, Stack

_MOST_RANKS = 4
_OF_RECURRENCES = 2e-3
"""Largest difference, relative to the largest value, of models too large for fp64: recurrences amplify roundings."""


def check_sequences(
    model: nn.Module,
    lists: Sequence[str],
    mode: str,
    sizes: tuple[int, int],
    device: torch.device,
    batches: Iterable[Any],
) -> tuple[list[dict[Argument, int | None]], Mixers]:
    """Raise if a model computes something else, or has other gradients, where sequences are split between its layers.

    Args:
        model: The user's model, whole; everything that is changed for the check is put back.
        lists: Names of its lists of layers.
        mode: ``"all_to_all"`` or ``"ring_attn"``.
        sizes: Numbers of sequence parallel ranks, and of tensor parallel ranks, over which heads are split as well.
        device: Where the model is run.
        batches: What its forward may take; the first one on which it runs is taken.

    Returns:
        Along which dimension what layers are given is cut, for each list that the model has, and what is in the layers
        besides attention.

    Raises:
        NotComparedError: If it could not be found out.
        ConfigError: If the layers can't be split, naming the difference and the remedy.
    """
    inner = inner_model(model)
    inner = compiled_module(inner) or inner
    reasons = []
    size, tensor_size = sizes
    lists_of_layers(inner, lists, mode)
    with restored(inner, device):
        for batch in batches:
            probe = _Probe(inner, lists, mode, size, device)
            for call in calls_of_model(inner, batch, probe.size):
                for is_short in (True, False):
                    reason = probe.run(call, is_short=is_short)
                    if reason is None:
                        if mode == "all_to_all":
                            _check_heads(probe.heads, size, tensor_size)
                        longer = call_of_other_length(inner, batch, probe.size, call)
                        if longer is not None:
                            probe.run(longer, is_short=True)  # not all models take every length
                        return probe.dims, probe.mixers
                    reasons.append(reason)
    raise NotComparedError(reasons[0] if reasons else "there was no batch")


class NotComparedError(Exception):
    """It could not be found out whether a model computes the same from parts of sequences; the message says why."""


class _Probe:
    def __init__(self, model: nn.Module, lists: Sequence[str], mode: str, size: int, device: torch.device) -> None:
        self._model, self._lists, self._mode, self._device = model, lists, mode, device
        few = next(number for number in range(2, size + 1) if size % number == 0)
        self.size = size if size <= _MOST_RANKS else few
        self.dims: list[dict[Argument, int | None]] = []
        self.heads: set[tuple[int, int]] = set()
        self.mixers = Mixers()

    def run(self, call: Call, *, is_short: bool) -> str | None:
        """Compare on a batch, with one layer of each kind or with all; return why that could not be done."""
        changes = ModulePatches()
        if is_short:
            self._leave_out(changes)
        try:
            reason = self._compared(call)
            if reason is not None:
                with _fused_attention(self._model):
                    reason = self._compared(call)
            return reason
        finally:
            changes.undo()

    def _leave_out(self, changes: ModulePatches) -> None:
        """Leave one layer of each kind in each list, but two where there are: models may use what is in between."""
        modules = dict(self._model.named_modules())
        for layers in (modules[name] for name in self._lists if isinstance(modules.get(name), nn.ModuleList)):
            kinds: dict[Any, tuple[str, nn.Module]] = {}
            for place, (key, layer) in enumerate(layers.named_children()):
                kinds.setdefault(structural_key(layer, place, {}), (key, layer))
            changes.attribute(layers, "_modules", dict([*layers.named_children()][:2]) | dict(kinds.values()))

    def _compared(self, call: Call) -> str | None:
        reason = ""
        light = {id(each) for each in self._model.parameters()}
        for setting in settings_of(self._model):
            try:
                values = random_values(self._model, self._device, setting.dtype, light)
                runner = Runner(self._model, call, setting, self._device)
                whole = runner.whole(values)
            except NoValuesError as error:
                return str(error)
            except Exception as error:  # noqa: BLE001 - the batch may need what a training loop does to it first
                reason = reason or f"the model does not run on it ({type(error).__name__}: {error})"
                continue
            if whole is None:
                reason = reason or "the model gives other outputs in each call, or infinite ones"
                continue
            try:
                self._compare(whole, runner, values, setting)
            except ConfigError:
                if self.mixers.classes or not self._find_mixers(runner, values):
                    raise
                self.dims = []
                self._compare(whole, runner, values, setting)
            return None
        return reason

    def _split(self, rank: InProcessRank) -> list[Stack]:
        """Split sequences for a rank."""
        split = split_sequences(self._model, self._lists, self._mode, rank, mixers=self.mixers)
        self.dims = self.dims or [{} for _ in split]
        for (stack, _), dims in zip(split, self.dims, strict=True):
            stack.drops, stack.dims, stack.is_clear = False, dims, is_clear
        return [stack for stack, _ in split]

    def _find_mixers(self, runner: Runner, values: Mapping[int, Tensor]) -> bool:
        """Find out what is in the layers besides attention; return whether anything sees positions."""

        def run(rank: InProcessRank) -> bool:
            split = split_sequences(self._model, self._lists, self._mode, rank, mixers=self.mixers)
            for stack, layers in split:
                stack.drops = False
                find_mixers(layers, stack)
            runner.output(values)
            return any(stack.heads for stack, _ in split)

        (attends,) = on_ranks(1, run, self._model.modules(), self._device)
        return bool(self.mixers.classes) or (attends and bool(self.mixers.apart))

    def _compare(self, whole: Result, runner: Runner, values: Mapping[int, Tensor], setting: Setting) -> None:
        def run(rank: InProcessRank) -> Result:
            stacks = self._split(rank)
            result = runner.run(values)
            self.heads |= {heads for stack in stacks for heads in stack.heads}
            return result

        what = f"`sequence_parallelism_mode={self._mode!r}` changes what {type(self._model).__name__} computes"
        remedy = (
            "Its layers look at several positions of a sequence, or count them, outside of attention. Pass what "
            "depends on positions to the layers as an argument, use 'split_gather' with `tp_size`, or leave sequences "
            "whole."
        )
        try:
            found = on_ranks(self.size, run, self._model.modules(), self._device)
        except ConfigError:
            raise
        except Exception as error:
            msg = f"{what}: on a part of a sequence it fails with {type(error).__name__}: {error}. {remedy}"
            raise ConfigError(msg) from error
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        # What every rank computes from its positions is trained on in the mean.
        mean = _mean([each.gradients for each in found])
        is_exact = setting.dtype == torch.float64 or not self.mixers.classes
        tolerance = setting.tolerance if is_exact else max(setting.tolerance, _OF_RECURRENCES)
        for each in (Result(each.output, mean, each.others) for each in found):
            difference = each.differs_from(whole, tolerance, lambda _, wanted: wanted)
            if difference is not None:
                key, text = difference
                subject = "" if key is None else f"the gradient of '{names.get(key, f'(input {key})')}' "
                msg = f"{what}: {subject}{text}. {remedy}"
                raise ConfigError(msg)
            other = each.other_that_differs(whole, tolerance)
            if other is not None:
                msg = (
                    f"{what}: among its outputs is {other}. It returns what its layers have in between, of which each "
                    "rank has a part. Return what follows the last layer alone, or leave `sequence_parallelism_mode` "
                    "out."
                )
                raise ConfigError(msg)


def _check_heads(found: Iterable[tuple[int, int]], size: int, tensor_size: int) -> None:
    """Check the heads that every tensor parallel rank will have, so that all ranks raise or none does."""
    for heads, units in sorted(found):
        is_shared = units < tensor_size  # several ranks have the same key/value head
        for start, stop in cut_units(heads if is_shared else units, tensor_size):
            number = stop - start
            head_ranges(number if is_shared else number * (heads // units), 1 if is_shared else number, size)


@contextlib.contextmanager
def _fused_attention(model: nn.Module) -> Iterator[None]:
    """Let a model of transformers attend by torch's function: others don't run everywhere, or in every format."""
    values = {id(each): each for module in model.modules() for each in vars(module).values()}
    kept = [(each, each._attn_implementation) for each in values.values() if hasattr(each, "_attn_implementation")]  # noqa: SLF001
    try:
        for config, _ in kept:
            config._attn_implementation = "sdpa"  # noqa: SLF001 - the name by which transformers looks it up
        yield
    finally:
        for config, name in kept:
            config._attn_implementation = name  # noqa: SLF001


def _mean(gradients: Sequence[Mapping[int, Tensor | None]]) -> dict[int, Tensor | None]:
    found: dict[int, Tensor | None] = {}
    for key in gradients[0]:
        known = [each[key] for each in gradients]
        present = [each for each in known if each is not None]
        found[key] = torch.stack(present).sum(0) / len(known) if present else None
    return found
