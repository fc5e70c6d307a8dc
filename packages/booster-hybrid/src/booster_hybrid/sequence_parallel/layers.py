"""The lists of layers along which sequences are split, what is done around each layer, and what can't be asked then.

Before the first layer this rank's positions are taken out of the hidden states, and after the last one the ranks' parts
are put together. In between, and where backward computes a layer again, the list knows how long the sequences are.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.trace import CONTAINERS, is_plain_output, shown_output
from booster_hybrid.random_streams import Stream
from booster_hybrid.sequence_parallel.exchange import SequenceLayout
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.modules import ModulePatches


_BETWEEN_LAYERS = ("_deepstack_process",)
"""Methods by which models of transformers change hidden states between layers, at positions of whole sequences."""


def lists_of_layers(model: nn.Module, lists: Sequence[str], mode: str) -> list[list[nn.Module]]:
    """Return the layers of a model, in the order in which they run: one list, or an encoder's and a decoder's.

    Args:
        model: The user's model.
        lists: Names of lists of layers; those that it lacks are passed over.
        mode: The mode of sequence parallelism, for messages.

    Raises:
        ConfigError: If there is none.
    """
    modules = dict(model.named_modules())
    found = [[*modules[name].children()] for name in lists if isinstance(modules.get(name), CONTAINERS)]
    if not found:
        msg = (
            f"`sequence_parallelism_mode={mode!r}` splits sequences along lists of layers, but the policy of "
            f"{type(model).__name__} names none of the model's. Leave sequences whole for this model, or pass "
            "`custom_policy=ShardingPolicy(layers=['model.layers'])` with the name of its list."
        )
        raise ConfigError(msg)
    return found


def check_layer_output(layer: nn.Module, output: Any) -> None:
    """Raise if a layer's hidden states can't be found in what it returned.

    Raises:
        ConfigError: If it is no tensor, or plain tuple that begins with one.
    """
    if not is_plain_output(output):
        msg = (
            f"A layer of class `{type(layer).__name__}` returns a {shown_output(output)}. Where sequences are split, "
            "layers must return a tensor, or a plain tuple of which the first entry is one. Return one of these, or "
            "leave `sequence_parallelism_mode` out."
        )
        raise ConfigError(msg)


_OF_LAYERS = "asks for what the layers have in between, of which each rank has a part. Leave it out."
_REFUSED = {
    "output_hidden_states": _OF_LAYERS,
    "output_attentions": _OF_LAYERS,
    "output_router_logits": "balances experts over the positions of a whole batch, of which each rank has a part. "
    "Leave it out, or use 'split_gather' with `tp_size`.",
}
"""What a model may be asked for that parts of sequences can't give."""


def refuse_options(model: nn.Module, names: Iterable[str] = tuple(_REFUSED)) -> None:
    """Let a model refuse, before each forward, what is asked for of parts of sequences; see `_REFUSED`.

    Args:
        model: The user's model.
        names: The options.
    """

    def check(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        for name in names:
            asked = kwargs.get(name)
            if asked or (asked is None and getattr(getattr(module, "config", None), name, False)):
                msg = f"`{name}=True` {_REFUSED[name]}"
                raise ConfigError(msg)

    model.register_forward_pre_hook(check, with_kwargs=True)


HIDDEN_STATES = "hidden_states"
"""What layers call their own hidden states, where these are not the first positional argument."""


class SplitModuleList(ABC):
    """A list of layers of which each rank computes some positions, and what is done before and after each layer.

    A model that leaves its first layer out would give whole sequences to layers which work on parts, and one that
    leaves its last layer out would go on with parts: both are refused.

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
        self._is_running, self._is_split = False, False

    @abstractmethod
    def cut(self, hidden: Tensor) -> Tensor:
        """Return this rank's positions of whole hidden states."""

    @abstractmethod
    def join(self, hidden: Tensor) -> Tensor:
        """Return whole hidden states, given this rank's positions. Collective: the group."""

    def cut_others(
        self, module: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a layer's arguments with this rank's part of all that is no hidden states of its own."""
        del module, hidden
        return args, kwargs

    def check_length(self, length: int) -> None:  # noqa: B027 - not every list has something to check
        """Check that sequences of a length can be split."""

    def check_output(self, module: nn.Module, hidden: Tensor) -> None:  # noqa: B027 - as above
        """Check what a layer has done, given what it returned."""

    def note_masks(self, arguments: Iterable[Any]) -> bool:
        """Take the length from a mask among some arguments; return whether there is one."""
        del arguments
        return False

    def install(self, model: nn.Module, layers: Sequence[nn.Module], changes: ModulePatches) -> None:
        """Let the layers of a model work on this rank's positions, in place.

        Args:
            model: The user's model.
            layers: Its layers.
            changes: Notes what is replaced.
        """
        modules = dict(model.named_modules())
        name = next(name for name, module in modules.items() if module is layers[0])
        caller = modules[name := name.rpartition(".")[0]]
        while name and isinstance(caller, (nn.ModuleList, nn.ModuleDict)):
            caller = modules[name := name.rpartition(".")[0]]
        changes.hook(caller.register_forward_pre_hook(lambda *_: self._begin()))
        changes.hook(caller.register_forward_hook(lambda *_: self._end()))
        for index, layer in enumerate(layers):
            before = functools.partial(self._before, is_first=index == 0)
            after = functools.partial(self._after, is_last=index == len(layers) - 1)
            changes.hook(layer.register_forward_pre_hook(before, with_kwargs=True))
            changes.hook(layer.register_forward_hook(after, always_call=True))
        for name in _BETWEEN_LAYERS:
            if hasattr(caller, name):
                changes.attribute(caller, name, functools.partial(self._on_whole, getattr(caller, name)))

    def layout(self, length: int) -> SequenceLayout:
        """Return how a sequence of a length is split."""
        return SequenceLayout(length, self.group.size, zigzag=self.mode == "ring_attn")

    def resume(self, num_here: int) -> None:
        """Note that a layer runs on some positions of this rank, maybe again after other sequences were underway."""
        if self.layout(self.length).lengths[self.group.rank] != num_here:
            self.length = self._length_of.get(num_here, self.length)

    def _enter(self, length: int) -> None:
        """Note that the layers run on sequences of a length now."""
        self.length = length
        self._length_of[self.layout(length).lengths[self.group.rank]] = length

    @outside_of_graphs
    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_first: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace what belongs to whole sequences by this rank's part."""
        hidden: Tensor = args[0] if args else kwargs[HIDDEN_STATES]
        if is_first:
            self.check_length(hidden.shape[1])
            self._enter(hidden.shape[1])
            self._is_split = True
        else:
            if self._is_running and not self._is_split:
                self._refuse(f"calls a '{type(module).__name__}' of a list of layers without the list's first one")
            if not self.note_masks([*args[1:], *kwargs.values()]):
                self.resume(hidden.shape[1])
        args, kwargs = self.cut_others(module, hidden, args, kwargs)
        if is_first:
            args, kwargs = with_hidden(args, kwargs, self.cut(hidden))
        if module.training:
            self.stream.enter(hidden.device)
        return args, kwargs

    @outside_of_graphs
    def _after(self, module: nn.Module, _: Any, output: Any, *, is_last: bool) -> Any:
        """Put the parts together after the last layer."""
        self.stream.leave()
        if output is None:  # the layer has raised
            return None
        check_layer_output(module, output)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        self.check_output(module, hidden)
        self._in_backward_of(hidden)
        if not is_last:
            return output
        self._is_split = False
        return mapped(output, self.join)

    def _in_backward_of(self, output: Tensor) -> None:
        """See to it that what is computed again of a layer knows how long its sequences are."""
        if output.requires_grad:
            length, key_length = self.length, self.key_length

            def enter_again(_: Tensor) -> None:
                self._enter(length)
                self.key_length = key_length
                self._is_running = False  # single layers may be computed again

            output.register_hook(enter_again)  # type: ignore[no-untyped-call]

    @outside_of_graphs
    def _on_whole(self, method: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Let a method that changes hidden states between layers do so with whole sequences. Collective: the group."""
        return self.cut(method(self.join(hidden_states), *args, **kwargs))

    def _begin(self) -> None:
        self._is_running, self._is_split = True, False

    def _end(self) -> None:
        if self._is_split:
            self._is_split = False
            self._refuse("returns without calling the last layer of a list whose first one it has called")

    def _refuse(self, what: str) -> NoReturn:
        msg = (
            f"{self.model_name} {what}, between which sequences are split (`sequence_parallelism_mode={self.mode!r}`)"
            ". Switch off what skips layers, such as `layerdrop`, stochastic depth or an early exit, or leave "
            "`sequence_parallelism_mode` out."
        )
        raise ConfigError(msg)


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, HIDDEN_STATES: hidden})


def mapped(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the hidden states that a layer or block returns, alone or first of several."""
    return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)
