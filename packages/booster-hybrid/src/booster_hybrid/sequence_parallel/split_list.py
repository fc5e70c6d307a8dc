"""`SplitModuleList`: a list of layers that work on this rank's positions, and what is done around each of them.

Before the first layer this rank's positions are taken out of the hidden states, and after the last one the ranks' parts
are put together. In between, and where backward computes a layer again, the list knows how long the sequences are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_hybrid.random_streams import Stream
from booster_hybrid.sequence_parallel.layers import check_layer_output
from booster_hybrid.sequence_parallel.layout import SequenceLayout
from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from booster_hybrid.rank_group import RankGroup
    from booster_hybrid.sequence_parallel.layers import ListRun

HIDDEN_STATES = "hidden_states"
"""What layers call their own hidden states, where these are not the first positional argument."""


class SplitModuleList:
    """How long the sequences are on which a list of layers runs, and who has which of their positions.

    Args:
        mode: The mode of sequence parallelism.
        group: The ranks that share the positions.
        model_name: Class of the model, for messages.

    Attributes:
        length: Number of positions of the whole sequences that the layer works on which is running.
        key_length: That of the other sequences which it also attends to, 0 where there are none.
        stream: This rank's random numbers in the layers.
    """

    def __init__(self, mode: str, group: RankGroup, model_name: str) -> None:
        self.mode, self.group, self.model_name = mode, group, model_name
        self.length, self.key_length = 0, 0
        self.stream = Stream(group.rank)
        self._length_of: dict[int, int] = {}

    def layout(self, length: int) -> SequenceLayout:
        """Return how a sequence of a length is split."""
        return SequenceLayout(length, self.group.size, zigzag=self.mode == "ring_attn")

    def check_length(self, length: int) -> None:
        """Check that sequences of a length can be split."""

    def enter(self, length: int) -> None:
        """Note that the layers run on sequences of a length now."""
        self.length = length
        self._length_of[self.layout(length).lengths[self.group.rank]] = length

    def resume(self, num_here: int) -> None:
        """Note that a layer runs on some positions of this rank, maybe again after other sequences were underway."""
        if self.layout(self.length).lengths[self.group.rank] != num_here:
            self.length = self._length_of.get(num_here, self.length)

    def in_backward_of(self, output: Tensor, run: ListRun) -> None:
        """See to it that what is computed again of a layer knows how long its sequences are.

        Args:
            output: What the layer returns.
            run: Knows which layers have been called.
        """
        if output.requires_grad:
            length, key_length = self.length, self.key_length

            def enter_again(_: Tensor) -> None:
                self.enter(length)
                self.key_length = key_length
                run.note_backward()

            output.register_hook(enter_again)  # type: ignore[no-untyped-call]


class LayerHooks:
    """What is done before and after a layer.

    Args:
        split: The list that it is in.
        run: Knows which of the list have been called.
        is_first: Whether hidden states are split before it.
        is_last: Whether they are put together after it.
    """

    def __init__(self, split: SplitModuleList, run: ListRun, *, is_first: bool, is_last: bool) -> None:
        self._split, self._run, self._is_first, self._is_last = split, run, is_first, is_last

    @outside_of_graphs
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace what belongs to whole sequences by this rank's part."""
        hidden: Tensor = args[0] if args else kwargs[HIDDEN_STATES]
        if self._is_first:
            self._split.check_length(hidden.shape[1])
            self._split.enter(hidden.shape[1])
            self._run.split()
        else:
            self._run.check_layer(module)
            self.resume(hidden.shape[1], [*args[1:], *kwargs.values()])
        args, kwargs = self.cut_others(module, hidden, args, kwargs)
        if self._is_first:
            args, kwargs = with_hidden(args, kwargs, self.cut(hidden))
        if module.training:
            self._split.stream.enter(hidden.device)
        return args, kwargs

    @outside_of_graphs
    def after(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Put the parts together after the last layer."""
        self._split.stream.leave()
        if output is None:  # the layer has raised
            return None
        check_layer_output(module, output)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        self.check_output(module, hidden)
        self._split.in_backward_of(hidden, self._run)
        if not self._is_last:
            return output
        self._run.join()
        return mapped(output, self.join)

    def resume(self, num_here: int, others: Iterable[Any]) -> None:
        """Note that a layer after the first one runs; see `SplitModuleList.resume`."""
        del others
        self._split.resume(num_here)

    def cut_others(
        self, module: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a layer's arguments with this rank's part of all that is no hidden states of its own."""
        del module, hidden
        return args, kwargs

    def cut(self, hidden: Tensor) -> Tensor:
        """Return this rank's positions of whole hidden states."""
        raise NotImplementedError

    def join(self, hidden: Tensor) -> Tensor:
        """Return whole hidden states, given this rank's positions. Collective: the group."""
        raise NotImplementedError

    def check_output(self, module: nn.Module, hidden: Tensor) -> None:
        """Check what a layer has done, given what it returned."""


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, HIDDEN_STATES: hidden})


def mapped(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the hidden states that a layer or block returns, alone or first of several."""
    return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)
