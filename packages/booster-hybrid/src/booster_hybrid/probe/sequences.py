"""`check_sequences`: prove, before anything is split, that a model computes the same from parts of sequences.

The model itself runs on a batch and random weights, with one layer of each kind in its lists: whole, by its own code,
and with its sequences split, for all ranks within this process. So positions, masks and attention are what they are in
training. Outputs and the gradients of all parameters are compared. Nothing is communicated.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.state import compiled_module
from booster_hybrid.inner_model import inner_model
from booster_hybrid.layer_plan import Changes
from booster_hybrid.probe.in_process import InProcessRank, on_ranks
from booster_hybrid.probe.kinds import kind_of
from booster_hybrid.probe.running import Result, Runner, Setting, settings_of
from booster_hybrid.probe.values import NoValuesError, random_values, restored
from booster_hybrid.rank_group import AloneRank
from booster_hybrid.sequence_parallel.apply import refuse_router_losses, split_layers
from booster_hybrid.sequence_parallel.layers import refuse_outputs_of_layers
from booster_runtime.data import taken_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.probe.calls import Call

_LONGEST, _DUMMY, _FEWEST = 128, 32, 4
"""Most positions of a sequence, those of a dummy, and the fewest for each rank."""
_MOST_RANKS = 4


def check_sequences(
    model: nn.Module, lists: Sequence[str], mode: str, size: int, device: torch.device, batches: Iterable[Any]
) -> str | None:
    """Raise if a model computes something else, or has other gradients, where sequences are split between its layers.

    Args:
        model: The user's model, whole; everything that is changed for the check is put back.
        lists: Names of its lists of layers.
        mode: ``"all_to_all"`` or ``"ring_attn"``.
        size: Number of sequence parallel ranks.
        device: Where the model is run.
        batches: What its forward may take; the first one on which it runs is taken.

    Returns:
        Why it could not be checked; ``None`` where it was, or where layers attend by torch's function, which is looked
        at in their first call.

    Raises:
        ConfigError: If the layers can't be split, naming the difference and the remedy.
    """
    inner = inner_model(model)
    inner = compiled_module(inner) or inner
    reasons = []
    with restored(inner, device):
        is_plain = all(stack.is_plain for stack, _ in split_layers(inner, lists, mode, AloneRank(None, 0, size)))
    with restored(inner, device):
        for batch in batches:
            probe = _Probe(inner, lists, mode, size, device)
            for is_short in (True, False):
                reason = probe.run(batch, is_short=is_short)
                if reason is None:
                    return None
                reasons.append(reason)
    if is_plain:
        return None
    return reasons[0] if reasons else "there was no batch"


class _Probe:
    def __init__(self, model: nn.Module, lists: Sequence[str], mode: str, size: int, device: torch.device) -> None:
        self._model, self._lists, self._mode, self._device = model, lists, mode, device
        few = next(number for number in range(2, size + 1) if size % number == 0)
        self._size = size if size <= _MOST_RANKS else few

    def run(self, batch: Any, *, is_short: bool) -> str | None:
        """Compare on a batch, with one layer of each kind or with all; return why that could not be done."""
        call = _call_of(self._model, batch, self._size)
        if call is None:
            return "no batch has sequences that are long enough"
        changes = Changes()
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

    def _leave_out(self, changes: Changes) -> None:
        """Leave one layer of each kind in each list."""
        modules = dict(self._model.named_modules())
        for layers in (modules[name] for name in self._lists if isinstance(modules.get(name), nn.ModuleList)):
            kinds: dict[Any, tuple[str, nn.Module]] = {}
            for place, (key, layer) in enumerate(layers.named_children()):
                kinds.setdefault(kind_of(layer, place, {}), (key, layer))
            changes.attribute(layers, "_modules", dict(kinds.values()))

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
            self._compare(whole, runner, values, setting)
            return None
        return reason

    def _compare(self, whole: Result, runner: Runner, values: Mapping[int, Tensor], setting: Setting) -> None:
        def run(rank: InProcessRank) -> Result:
            with restored(self._model, self._device):
                self._model.register_forward_pre_hook(refuse_outputs_of_layers, with_kwargs=True)
                self._model.register_forward_pre_hook(refuse_router_losses, with_kwargs=True)
                for stack, _ in split_layers(self._model, self._lists, self._mode, rank):
                    stack.drops = False
                return runner.run(values)

        what = f"`sequence_parallelism_mode={self._mode!r}` changes what {type(self._model).__name__} computes"
        remedy = (
            "Its layers look at several positions of a sequence, or count them, outside of attention. Pass what "
            "depends on positions to the layers as an argument, use 'split_gather' with `tp_size`, or leave sequences "
            "whole."
        )
        try:
            found = on_ranks(self._size, run)
        except ConfigError:
            raise
        except Exception as error:
            msg = f"{what}: on a part of a sequence it fails with {type(error).__name__}: {error}. {remedy}"
            raise ConfigError(msg) from error
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for each in found:
            # What every rank computes from its positions is trained on in the mean.
            merged = Result(each.output, _mean([result.gradients for result in found]))
            difference = merged.differs_from(whole, setting.tolerance, lambda _, wanted: wanted)
            if difference is not None:
                key, text = difference
                subject = "" if key is None else f"the gradient of '{names.get(key, f'(input {key})')}' "
                msg = f"{what}: {subject}{text}. {remedy}"
                raise ConfigError(msg)


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


def _call_of(model: nn.Module, batch: Any, size: int) -> Call | None:
    """Return a call of a model with sequences of a batch, neither too long nor as long as there are samples.

    Masks hide nothing in it: what positions compute that see no other one is nobody's business, and may differ.
    """
    given = taken_by(model, batch)
    rows = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor) and each.dim() > 1]
    if not rows:
        return None
    samples, length, is_tokens = rows[0].shape[0], rows[0].shape[-1], not rows[0].is_floating_point()
    if is_tokens and length < _FEWEST * size:
        return None

    def part(value: Tensor) -> Tensor:
        if value.dim() > 0 and value.shape[0] == samples and samples == length:
            value = value[:1]
        if is_tokens and value.dim() > 1 and value.shape[-1] == length:
            value = value[..., :_LONGEST]
            is_mask = not value.is_floating_point() and bool(((value == 0) | (value == 1)).all())
            return torch.ones_like(value) if is_mask else value
        return value

    given = pytree.tree_map_only(torch.Tensor, part, given)
    if hasattr(given, "keys"):
        return (), {**given}
    return (tuple(given), {}) if isinstance(given, (list, tuple)) else ((given,), {})


def longer(batch: Any) -> list[Any]:
    """Return batches with longer sequences, made of one with a few positions, as dummies are: plain, and of choices.

    Args:
        batch: What a model's forward takes, whose token indices are of shape ``(samples, positions)``.
    """
    tokens = [
        each for each in pytree.tree_leaves(batch) if isinstance(each, torch.Tensor) and not each.is_floating_point()
    ]
    if not tokens or tokens[0].dim() != 2:
        return [batch]
    length = tokens[0].shape[1]
    times = -(-_DUMMY // length)

    def repeated(value: Tensor) -> Tensor:
        return value.repeat(1, times)[:, :_DUMMY] if value.shape[1:] == (length,) else value

    plain = pytree.tree_map_only(torch.Tensor, repeated, batch)
    return [plain, pytree.tree_map_only(torch.Tensor, lambda each: torch.stack([each, each], 1), plain)]
