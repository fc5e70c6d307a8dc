"""`Stack`: one list of layers that work on this rank's positions, and the hooks that bring them these.

Before the first layer this rank's positions are taken out of the hidden states, and after the last one the ranks' parts
are put together. What else layers are given for whole sequences (tables of positions, the states of an encoder) is cut
likewise, each by the split of its own sequence.
"""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.state import compiled_module
from booster_hybrid.pipeline.absent import is_absent
from booster_hybrid.random_streams import Stream
from booster_hybrid.sequence_parallel.exchange import gather_sequence
from booster_hybrid.sequence_parallel.layers import check_layer_output, check_lengths
from booster_hybrid.sequence_parallel.layout import SequenceLayout
from booster_hybrid.sequence_parallel.mask import SequenceMask
from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from booster_hybrid.probe.lengths import Lengths
    from booster_hybrid.rank_group import RankGroup
    from booster_hybrid.sequence_parallel.layers import ListRun

HIDDEN_STATES = "hidden_states"
"""What layers call their own hidden states, where these are not the first positional argument."""
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


class Stack:
    """What the layers of one list share: who holds which positions.

    Args:
        mode: ``"all_to_all"`` or ``"ring_attn"``.
        group: The sequence parallel ranks.
        model_name: Class of the model, for messages.
        rings: The rings on which keys travel under ``"ring_attn"``; see `ring_attention`.
        num_threads: The most with which one of the ranks computes, for the same.

    Attributes:
        length: Number of positions of the whole sequences that the layer works on which is running.
        key_length: That of the other sequences which it also attends to, 0 where there are none.
        num_attentions: Calls of attention in the layer which is running.
        is_plain: Whether the layers attend by torch's function.
        lengths: For which lengths the layers were compared; ``None`` where that does not matter.
        dims: Along which dimension arguments are cut, by `sequence_dim`.
        is_clear: Whether no other size in a layer is that of its sequences, given the numbers of samples and of
            positions: what it is given then is noted in ``dims``.
        heads: Numbers of query and key/value heads of attention that was called.
        drops: Whether attention drops weights where it is asked to.
    """

    def __init__(
        self,
        mode: str,
        group: RankGroup,
        model_name: str,
        rings: Sequence[RankGroup] | None = None,
        num_threads: int = 1,
    ) -> None:
        self.mode, self.group, self.model_name, self.num_threads = mode, group, model_name, num_threads
        self.rings = (group,) if rings is None else tuple(rings)
        self.is_plain = False
        self.lengths: Lengths | None = None
        self.heads: set[tuple[int, int]] = set()
        self.drops = True
        self.dims: dict[Argument, int | None] = {}
        self.is_clear: Callable[[nn.Module, int, int], bool] = lambda *_: False
        self.length, self.key_length = 0, 0
        self.num_attentions = 0
        self.stream = Stream(group.rank)
        self._length_of: dict[int, int] = {}
        self._cut: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    def layout(self, length: int) -> SequenceLayout:
        """Return how a sequence of a length is split."""
        return SequenceLayout(length, self.group.size, zigzag=self.mode == "ring_attn")

    def cut(self, layer: nn.Module, name: str, values: Any, hidden: Tensor) -> Any:
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
            return value if dim is None else layout.take(value, dim, self.group.rank)

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

    def check_length(self, samples: int, length: int) -> None:
        """Check that each rank gets a part of a sequence, and that layers compute the same from parts of that length.

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
        check_lengths(self.model_name, self.mode, self.lengths, samples, self.layout(length))

    def check_attention(self, layer: nn.Module) -> None:
        """Check that a layer which has run called an attention that sees the other ranks' positions.

        Raises:
            ConfigError: If not.
        """
        if not self.num_attentions:
            msg = (
                f"'{type(layer).__name__}' of {self.model_name} does not call its attention through transformers' "
                "attention interface, nor `torch.nn.functional.scaled_dot_product_attention`, so "
                f"`sequence_parallelism_mode={self.mode!r}` would let each part of a "
                "sequence see itself only. Use 'split_gather' with `tp_size`, or a model that does."
            )
            raise ConfigError(msg)

    def enter(self, length: int) -> None:
        """Note that the layers run on sequences of a length now."""
        self.length = length
        self._length_of[self.layout(length).lengths[self.group.rank]] = length

    def resume(self, num_here: int, arguments: Iterable[Any]) -> None:
        """Note that a layer runs on some positions of this rank, maybe again after other sequences were underway.

        Args:
            num_here: Number of positions here.
            arguments: What it was given, of which a mask knows the length.
        """
        if not self.note_masks(arguments) and self.layout(self.length).lengths[self.group.rank] != num_here:
            self.length = self._length_of.get(num_here, self.length)

    def note_masks(self, arguments: Iterable[Any]) -> bool:
        """Take the length from a mask among some arguments; return whether there is one."""
        found = next((each for each in arguments if isinstance(each, SequenceMask)), None)
        if found is not None:
            self.length = found.length
        return found is not None

    def in_backward_of(self, output: Tensor, run: ListRun) -> None:
        """See to it that what is computed again of a layer knows how long its sequences are.

        Args:
            output: What the layer returns.
            run: Knows which layers have been called.
        """
        if output.requires_grad:
            lengths = self.length, self.key_length

            def enter_again(_: Tensor) -> None:
                self.enter(lengths[0])
                self.key_length = lengths[1]
                run.note_backward()

            output.register_hook(enter_again)  # type: ignore[no-untyped-call]

    def part_of_other(self, states: Tensor) -> Tensor:
        """Return this rank's part of another sequence's states; one and the same for all layers while they use it.

        Raises:
            ConfigError: If the sequence is too short to be split.
        """
        self.check_length(*states.shape[:2])
        self.key_length = states.shape[1]
        if self._cut is not None and self._cut[0]() is states and (known := self._cut[1]()) is not None:
            return known
        part = self.layout(self.key_length).take(states, 1, self.group.rank)
        self._cut = weakref.ref(states), weakref.ref(part)
        return part


class LayerHooks:
    """What is done before and after a layer.

    Args:
        stack: The list that it is in.
        run: Knows which of the list have been called.
        layer: The layer.
        is_first: Whether hidden states are split before it.
        is_last: Whether they are put together after it.
    """

    def __init__(self, stack: Stack, run: ListRun, layer: nn.Module, *, is_first: bool, is_last: bool) -> None:
        self._stack, self._run, self._is_first, self._is_last = stack, run, is_first, is_last
        self._names = argument_names(layer)

    @outside_of_graphs
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace what belongs to whole sequences by this rank's part."""
        stack = self._stack
        names = dict(enumerate(self._names))
        named = {names.get(index, f"/{index}"): value for index, value in enumerate(args)}
        first = next(iter(named)) if args else HIDDEN_STATES
        named.update(kwargs)
        hidden = named.pop(first)
        if self._is_first:
            stack.check_length(*hidden.shape[:2])
            stack.enter(hidden.shape[1])
            self._run.split()
        else:
            self._run.check_layer(module)
            stack.resume(hidden.shape[1], named.values())
        stack.key_length = 0
        layout, rank = stack.layout(stack.length), stack.group.rank
        for name, value in named.items():
            if name in OTHER_STATES and isinstance(value, torch.Tensor):
                named[name] = stack.part_of_other(value)
            else:
                named[name] = stack.cut(module, name, value, hidden)
        named[first] = layout.take(hidden, 1, rank) if self._is_first else hidden
        stack.num_attentions = 0
        if module.training:
            stack.stream.enter(hidden.device)
        args = tuple(named.pop(names.get(index, f"/{index}")) for index in range(len(args)))
        return args, named

    @outside_of_graphs
    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put the parts together after the last layer."""
        del args
        stack = self._stack
        stack.stream.leave()
        if output is None:  # the layer has raised
            return None
        check_layer_output(module, output)
        first = output[0] if isinstance(output, tuple) else output
        if not is_absent(first):  # as of a layer of another stage of a pipeline
            stack.check_attention(module)
        stack.in_backward_of(first, self._run)
        if not self._is_last:
            return output
        self._run.join()
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        hidden = gather_sequence(hidden, stack.layout(stack.length), stack.group)
        return (hidden, *rest) if isinstance(output, tuple) else hidden


def argument_names(module: nn.Module) -> list[str]:
    """Return what a module's forward calls its arguments, in their order.

    Args:
        module: The module; of a compiled one, the one inside is asked.
    """
    forward = type(compiled_module(module) or module).forward
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
