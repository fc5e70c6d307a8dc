"""`Stack`: one list of layers that attend across ranks from this rank's positions, and what they are given of the rest.

What layers are given for whole sequences in addition to hidden states (tables of positions, the states of an encoder)
is cut likewise, each by the split of its own sequence.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from booster_core.errors import ConfigError
from booster_core.state import compiled_module
from booster_hybrid.pipeline.absent import is_absent
from booster_hybrid.sequence_parallel.exchange import gather_sequence
from booster_hybrid.sequence_parallel.layers import HIDDEN_STATES, SplitModuleList
from booster_hybrid.sequence_parallel.mask import SequenceMask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from booster_hybrid.mesh import RankGroup

OTHER_STATES = ("encoder_hidden_states", "key_value_states")
"""What layers and attention call the hidden states of another sequence, by transformers' conventions."""


class Argument(NamedTuple):
    """A tensor that layers are given.

    Args:
        layer: Class of the layer.
        name: What its forward calls the argument.
        path: Where in the argument the tensor is.
        num_dims: Its number of dimensions.
    """

    layer: str
    name: str
    path: str
    num_dims: int


@dataclass
class Mixers:
    """What is in the layers of a model besides attention.

    Attributes:
        classes: Names of the classes of parts that mix positions.
        apart: Of layers that mix none, the names of the classes inside.
    """

    classes: set[str] = field(default_factory=set)
    apart: set[frozenset[str]] = field(default_factory=set)

    def are_apart(self, layer: nn.Module) -> bool:
        """Return whether a layer is known to work on each position by itself."""
        return kind_of_layer(layer) in self.apart


class Stack(SplitModuleList):
    """What the layers of one list share whose attention sees the other ranks' positions.

    Args:
        mode: ``"all_to_all"`` or ``"ring_attn"``.
        group: The sequence parallel ranks.
        model_name: Class of the model, for messages.

    Attributes:
        num_attentions: Calls of attention in the layer which is running.
        is_plain: Whether the layers attend by torch's function.
        dims: Along which dimension arguments are cut, by `sequence_dim`.
        is_clear: Whether no other size in a layer is that of its sequences, given the numbers of samples and of
            positions: what it is given then is noted in ``dims``.
        heads: Numbers of query and key/value heads of attention that was called.
        drops: Whether attention drops weights where it is asked to.
        mixers: What is in the layers besides attention.
        wholes: What layers are given for whole sequences, by the part of it that is here.
    """

    def __init__(
        self,
        mode: str,
        group: RankGroup,
        model_name: str,
    ) -> None:
        super().__init__(mode, group, model_name)
        self.is_plain = False
        self.heads: set[tuple[int, int]] = set()
        self.drops = True
        self.dims: dict[Argument, int | None] = {}
        self.is_clear: Callable[[nn.Module, int, int], bool] = lambda *_: False
        self.num_attentions = 0
        self.mixers = Mixers()
        self.wholes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._cut: tuple[weakref.ref[Tensor], Callable[[], Tensor | None]] | None = None

    def cut(self, hidden: Tensor) -> Tensor:
        """Return this rank's positions of whole hidden states."""
        return self.layout(self.length).take(hidden, 1, self.group.rank)

    def join(self, hidden: Tensor) -> Tensor:
        """Return whole hidden states, given this rank's positions. Collective: the group."""
        return gather_sequence(hidden, self.layout(self.length), self.group)

    def cut_others(
        self, module: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a layer's arguments with this rank's part of all that is given for whole sequences."""
        self.key_length = self.num_attentions = 0
        names = dict(enumerate(argument_names(module)))

        def own(name: str, value: Any) -> Any:
            if name in OTHER_STATES and isinstance(value, torch.Tensor):
                return self._part_of_other(value)
            return self._part(module, name, value, hidden)

        cut = [own(names.get(index, f"/{index}"), value) for index, value in enumerate(args) if index]
        named = {name: own(name, value) if args or name != HIDDEN_STATES else value for name, value in kwargs.items()}
        return (*args[:1], *cut), named

    def _part(self, layer: nn.Module, name: str, values: Any, hidden: Tensor) -> Any:
        """Return this rank's part of what a layer is given for whole sequences.

        Args:
            layer: The layer.
            name: What its forward calls the argument.
            values: Nested tensors and others.
            hidden: The layer's hidden states.

        Raises:
            ConfigError: If it can't be told along which dimension a tensor is cut, on every rank.
        """
        layout, kind = self.layout(self.length), type(compiled_module(layer) or layer).__name__

        def part(path: Any, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            argument = Argument(kind, name, pytree.keystr(path), value.dim())
            if argument not in self.dims and self.is_clear(layer, hidden.shape[0], self.length):
                self.dims[argument] = sequence_dim(value, self.length)
            dim = self._dim(argument, value, hidden)
            if dim is None:
                return value
            found = layout.take(value, dim, self.group.rank)
            if not is_absent(found):  # in whose place nothing could be put while a weak reference is there
                self.wholes[found] = value
            return found

        return part((), values) if isinstance(values, torch.Tensor) else pytree.tree_map_with_path(part, values)

    def _dim(self, argument: Argument, value: Tensor, hidden: Tensor) -> int | None:
        length, what = self.length, f"`{argument.name}{argument.path}` of '{argument.layer}'"
        if argument not in self.dims:
            if length in value.shape and length in (hidden.shape[0], *hidden.shape[2:]):
                msg = (
                    f"{what} has shape {tuple(value.shape)} with hidden states of {hidden.shape[0]} samples and "
                    f"{length} positions: it can't be told along which dimension to split it. Pass "
                    "`HybridParallelPlugin(example_batch=...)` with a batch where it is given, or use another number "
                    "of samples or positions."
                )
                raise ConfigError(msg)
            return sequence_dim(value, length)
        dim = self.dims[argument]
        if dim is None or value.shape[dim] == 1:
            return None
        if value.shape[dim] != length:
            msg = (
                f"{what} has {value.shape[dim]} entries along dimension {dim}, which runs over the {length} positions "
                "of its sequences. Pass as many, or leave `sequence_parallelism_mode` out."
            )
            raise ConfigError(msg)
        return dim

    def check_length(self, length: int) -> None:
        """Check that each rank gets a part of a sequence.

        Models' own code can't shape tensors without elements.

        Raises:
            ConfigError: If not, on every rank.
        """
        if length < self.group.size:
            msg = (
                f"{self.model_name} was given sequences of {length} position(s), which can't be split over "
                f"{self.group.size} ranks (`sequence_parallelism_mode={self.mode!r}`). Pad them to {self.group.size} "
                "positions and mask the padding, or use a smaller `sp_size`."
            )
            raise ConfigError(msg)

    def check_output(self, module: nn.Module, hidden: Tensor) -> None:
        """Check that a layer has attended to the other ranks' positions, unless another stage of a pipeline runs it.

        Raises:
            ConfigError: If not.
        """
        if not is_absent(hidden) and not self.num_attentions and not self.mixers.are_apart(module):
            msg = (
                f"'{type(module).__name__}' of {self.model_name} does not call its attention through transformers' "
                "attention interface, nor `torch.nn.functional.scaled_dot_product_attention`, so "
                f"`sequence_parallelism_mode={self.mode!r}` would let each part of a "
                "sequence see itself only. Use 'split_gather' with `tp_size`, or a model that does."
            )
            raise ConfigError(msg)

    def note_masks(self, arguments: Iterable[Any]) -> bool:
        """Take the length from a mask among some arguments; return whether there is one."""
        found = next((each for each in arguments if isinstance(each, SequenceMask)), None)
        if found is not None:
            self.length = found.length
        return found is not None

    def _part_of_other(self, states: Tensor) -> Tensor:
        """Return this rank's part of another sequence's states; one and the same for all layers while they use it.

        Raises:
            ConfigError: If not every rank gets one, on every rank.
        """
        self.key_length = states.shape[1]
        self.check_length(self.key_length)
        if self._cut is not None and self._cut[0]() is states and (known := self._cut[1]()) is not None:
            return known
        part = self.layout(self.key_length).take(states, 1, self.group.rank)
        # Of what another stage has, the next layer must get the same one, for which the stage has received values.
        self._cut = weakref.ref(states), (lambda: part) if is_absent(part) else weakref.ref(part)
        return part


def kind_of_layer(layer: nn.Module) -> frozenset[str]:
    """Return the names of the classes inside of a layer."""
    return frozenset(type(module).__name__ for module in layer.modules())


def argument_names(module: nn.Module) -> list[str]:
    """Return what a module's forward calls its arguments, in their order.

    Args:
        module: The module; of a compiled one, the one inside is asked.
    """
    return _names_of(type(compiled_module(module) or module).forward)


@functools.lru_cache
def _names_of(forward: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(forward).parameters if name != "self"]


def sequence_dim(value: Tensor, length: int) -> int | None:
    """Return along which dimension a layer's argument is cut; ``None`` where every rank needs it whole.

    What has two dimensions over positions, or one of shape ``(samples, heads, queries, length)`` or
    ``(samples, 1, length)``, is a mask or a bias of attention, for all keys.

    Args:
        value: The argument, for whole sequences of a length that none of its other sizes equals.
        length: The length.
    """
    dims = [dim for dim, size in enumerate(value.shape) if size == length]
    is_of_keys = dims == [value.dim() - 1] and (value.dim() > 3 or (value.dim() == 3 and value.shape[1] == 1))
    return dims[0] if len(dims) == 1 and not is_of_keys else None
