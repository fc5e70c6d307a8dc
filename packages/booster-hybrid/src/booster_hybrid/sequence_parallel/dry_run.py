"""`check_layers`: find out at `boost` whether a model's layers can be split along sequences.

A copy of the model runs on the batch, but for its layers, which pass their hidden states through. One layer of each
kind, called as the model calls it, is then checked as in its first step: with transformers' interface it runs on fake
tensors, where attention is asked for and not computed; those of plain models compute a short sequence, see `SdpaProbe`.
What can't be seen so the first step finds: without a batch, in compiled layers, behind a layer that reads values.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.state import compiled_module
from booster_hybrid.pipeline.example import batch_at_hand
from booster_hybrid.pipeline.skipped_layers import kept_generators
from booster_hybrid.pipeline.trace import copy_of, fake_of, quiet_fakes, replace_forward
from booster_hybrid.random_weights import random_weights
from booster_hybrid.same_batch import checksum_of
from booster_hybrid.sequence_parallel.apply import split_layers
from booster_hybrid.sequence_parallel.mask import SequenceMask
from booster_hybrid.sequence_parallel.probe import SdpaProbe
from booster_hybrid.sequence_parallel.stack import HIDDEN_STATES
from booster_hybrid.tensor_parallel.group import TensorGroup
from booster_hybrid.tensor_parallel.split import is_repeated
from booster_runtime import collectives
from booster_runtime.data import call_with, move_batch, taken_by

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from booster_core.plugin import BoostContext
    from booster_hybrid.sequence_parallel.stack import Stack

_SEED = 20297
_COUNTERS = ("idx", "index", "layer_id")
"""Parts of the names of attributes that count layers, and make no kinds of them."""


class _EnoughError(BaseException):
    """Ends the run where no more can be seen; not an `Exception`, which a model may catch."""


@dataclass(frozen=True)
class _AloneRank(TensorGroup):
    """A rank whose collectives send nothing, for tensors without values."""

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> collectives.Pending:
        """Leave the buffer as it is."""
        del buffer, bounds
        return collectives.Pending()


@dataclass(frozen=True)
class _Place:
    """A layer of the copy, and where it is."""

    layer: nn.Module
    stack: Stack
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class _Call:
    """How the model calls a layer of a plain stack; the hidden states are apart."""

    place: _Place
    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def check_layers(
    model: nn.Module,
    lists: Sequence[str],
    mode: str,
    group: TensorGroup,
    context: BoostContext,
    dataloader: DataLoader[Any] | None,
    example_batch: Any,
) -> None:
    """Raise on every rank if a batch shows that a model's sequences can't be split between its layers.

    Args:
        model: The user's model, whole; it is neither changed nor called.
        lists: Names of its lists of layers.
        mode: ``"all_to_all"`` or ``"ring_attn"``.
        group: The sequence parallel ranks.
        context: Where the model runs, and with which ranks.
        dataloader: Its data set's first samples are the batch.
        example_batch: A batch that the user has given for this, which wins.

    Raises:
        ConfigError: If so.

    Collective: every rank of the world.
    """
    run = _DryRun(model, lists, mode, group, context.device)
    batch: Any = None
    for check in (run.run, run.probe):  # all ranks come to the second, which communicates, or none does
        with context.coordinator.together("boost"):
            if check == run.run:
                with contextlib.suppress(Exception):  # whatever a data set raises, training tells of it
                    batch = move_batch(batch_at_hand(dataloader, example_batch), context.device)
            check(batch)


class _DryRun:
    """What a batch shows of a model whose sequences are to be split.

    Args:
        model: The user's model, whole; it is neither changed nor called.
        lists: Names of its lists of layers.
        mode: ``"all_to_all"`` or ``"ring_attn"``.
        group: The sequence parallel ranks.
        device: Where it runs.
    """

    def __init__(
        self, model: nn.Module, lists: Sequence[str], mode: str, group: TensorGroup, device: torch.device
    ) -> None:
        self._model, self._lists, self._mode = compiled_module(model) or model, lists, mode
        self._group, self._device = group, device
        self._left: set[nn.Module] = set()
        self._returned: dict[Hashable, Any] = {}
        self._plain: list[_Call] = []
        self._is_inside = False

    def run(self, batch: Any) -> None:
        """Run the copy, and each kind of layer that uses transformers' interface.

        Args:
            batch: As its data loader yields it; nothing is seen of ``None``.

        Raises:
            ConfigError: If the layers can't be split.
        """
        if batch is None or any(_is_compiled(module) for module in self._model.modules()):
            return
        try:
            model = copy_of(self._model)
        except Exception:  # noqa: BLE001 - whatever a user's object raises when it is copied
            return
        rank = _AloneRank(None, self._group.rank, self._group.size)
        for stack, layers in split_layers(model, self._lists, self._mode, rank):
            stack.is_probing = True  # hooks leave what the model gives to layers as it is
            for index, layer in enumerate(layers):
                place = _Place(layer, stack, is_first=index == 0, is_last=index == len(layers) - 1)
                replace_forward(layer, functools.partial(self._call, place))
                self._left.add(layer)
        is_host = self._device.type == "cpu"
        devices = [] if is_host else [self._device]
        kept = torch.random.fork_rng(devices, device_type="cuda" if is_host else self._device.type)
        with kept, kept_generators(), torch.no_grad(), warnings.catch_warnings(), contextlib.suppress(_EnoughError):
            warnings.simplefilter("ignore")  # a run may warn of what it lacks here; the first step does again
            try:
                call_with(model, taken_by(model, batch))
            except ConfigError:
                raise
            except Exception:  # noqa: BLE001, S110 - the batch may need what a training loop does to it first
                pass

    def probe(self, batch: Any) -> None:
        """Let each kind of layer that attends by torch's function compute a short sequence, after `run`.

        Args:
            batch: As for `run`.

        Raises:
            ConfigError: If the layers can't be split.

        Collective: the group.
        """
        has_values = not any(is_repeated(buffer) for buffer in self._model.buffers())
        calls = self._plain if has_values else []
        shown = [(type(each.place.layer).__name__, tuple(each.hidden.shape)) for each in calls]
        every = collectives.all_gather_object((checksum_of(batch), shown), self._group.group)
        if any(each != every[0] for each in every):  # the first step compares batches, and tells of it
            return
        for call in calls:
            layer, stack = call.place.layer, call.place.stack
            values: dict[str, Tensor] | None = None
            if any(is_repeated(parameter) for parameter in layer.parameters()):
                values = random_weights(layer, self._device, _SEED)
                values |= {name: each for name, each in layer.named_buffers() if each.is_floating_point()}
            stack.group, stack.rings = self._group, (self._group,)
            self._is_inside = True
            SdpaProbe(layer, stack, values)(call.hidden, call.args, call.kwargs, call.hidden.shape[1])

    def _call(
        self,
        place: _Place,
        forward: Callable[..., Any],
        _: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Stand for a layer's forward."""
        if self._is_inside:
            return forward(*args, **kwargs)
        hidden = args[0] if args else kwargs.get(HIDDEN_STATES)
        if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2 or hidden.shape[1] < self._group.size:
            raise _EnoughError  # of a batch that can't be split the first step tells
        kind = _kind_of(place, args, kwargs)
        if kind not in self._returned:
            self._is_inside = True
            try:
                self._returned[kind] = self._check(place, hidden, args, kwargs)
            finally:
                self._is_inside = False
        self._left.discard(place.layer)
        if not self._left:
            raise _EnoughError
        return _passed_through(hidden, self._returned[kind])

    def _check(self, place: _Place, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer returns, as fake tensors."""
        stack = place.stack
        if not stack.is_plain:
            if not place.is_first:
                hidden = stack.layout(stack.length).take(hidden, 1, stack.group.rank)
            with _dry(stack):
                return self._on_fakes(place.layer, *_with_hidden(hidden, args, kwargs))
        if hidden.shape[0] == hidden.shape[1]:
            raise _EnoughError  # arguments can't be told; another batch may have other sizes
        named = {name: value for name, value in kwargs.items() if args or name != HIDDEN_STATES}
        self._plain.append(_Call(place, hidden, args[1:], named))
        stack.is_alone = True
        try:
            return self._on_fakes(place.layer, args, kwargs)
        except ConfigError as error:  # of fake tensors; the layer itself computes later
            raise _EnoughError from error
        finally:
            stack.is_alone = False

    def _on_fakes(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        # Some kernels' shapes are known for bf16 alone, such as those of products of groups.
        for narrow in (False, True):
            given = _copied((args, kwargs))  # caches are written to
            try:
                with FakeTensorMode(allow_non_fake_inputs=True) as mode, quiet_fakes():
                    make = functools.partial(fake_of, mode, narrow=narrow)
                    fakes = {name: make(tensor.detach()) for name, tensor in tensors}
                    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, make, given)
                    return torch.func.functional_call(layer, fakes, fake_args, fake_kwargs)
            except ConfigError:
                raise
            except Exception:  # noqa: BLE001, S112 - a value was asked for, which fake tensors don't have
                continue
        raise _EnoughError


@contextlib.contextmanager
def _dry(stack: Stack) -> Iterator[None]:
    """Let a layer's hooks cut what it is given, in this context."""
    stack.is_probing, stack.is_dry = False, True
    try:
        yield
    finally:
        stack.is_probing, stack.is_dry = True, False


def _is_compiled(module: nn.Module) -> bool:
    return compiled_module(module) is not None or getattr(module, "_compiled_call_impl", None) is not None


def _copied(values: Any) -> Any:
    """Return a copy that shares tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return copy.deepcopy(values, {id(tensor): tensor for tensor in tensors})


def _with_hidden(
    hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), {**kwargs}) if args else ((), {**kwargs, HIDDEN_STATES: hidden})


def _passed_through(hidden: Tensor, output: Any) -> Any:
    """Return what a layer would return, with its hidden states as they came in, and zeros."""

    def zeros(fake: Tensor, length: int | None = None) -> Tensor:
        shape = list(fake.shape)
        if length is not None:
            shape[1] = length
        return torch.zeros(shape, dtype=fake.dtype, device=hidden.device)

    first, *rest = output if isinstance(output, tuple) else (output,)
    if not isinstance(first, torch.Tensor) or first.dim() < 2:
        raise _EnoughError
    is_alike = first.dim() == hidden.dim() and first.shape[2:] == hidden.shape[2:]
    passed = hidden if is_alike else zeros(first, hidden.shape[1])
    return (passed, *pytree.tree_map_only(torch.Tensor, zeros, rest)) if isinstance(output, tuple) else passed


def _kind_of(place: _Place, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Return what tells layers apart, and how they are called."""
    layer = place.layer
    tensors = tuple((name, tuple(each.shape)) for name, each in (*layer.named_parameters(), *layer.named_buffers()))
    settings = tuple(
        (name, value)
        for module in layer.modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str)) and not any(part in name for part in _COUNTERS)
    )
    given = tuple(_described(leaf) for leaf in pytree.tree_leaves((args, dict(kwargs))))
    return id(place.stack), place.is_first, place.is_last, repr(layer), tensors, settings, given


def _described(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, SequenceMask):
        return id(value)
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else type(value).__qualname__
