"""The lists of layers along which sequences are split, what is done around each layer, and what can't be asked then.

Before the first layer this rank's positions are taken out of the hidden states, and after the last one the ranks' parts
are put together. In between, and where backward computes a layer again, the list knows how long the sequences are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.fixed_draws import ConstantRandomMode, preserve_generators
from booster_hybrid.layer_plan import ModulePatches
from booster_hybrid.pipeline.trace import CONTAINERS, is_plain_output, shown_output
from booster_hybrid.random_streams import Stream
from booster_hybrid.sequence_parallel.layout import SequenceLayout
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup


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


def check_no_layer_is_skipped(
    model: nn.Module, mode: str, layers: Mapping[str, nn.Module], run: Callable[[], object]
) -> None:
    """Raise if training skips some of a model's layers at random, between which sequences are split.

    Args:
        model: The model.
        mode: The mode of sequence parallelism, for messages.
        layers: Its layers, by name.
        run: Runs it on a batch in training mode. What it draws by torch's generators is not put back.

    Raises:
        ConfigError: If it does.
    """
    called: list[set[str]] = []
    with preserve_generators():
        for draws in (ConstantRandomMode(), ConstantRandomMode(0.0)):
            changes = ModulePatches()
            found: set[str] = set()
            for name, layer in layers.items():
                changes.hook(layer.register_forward_pre_hook(lambda *_, name=name, found=found: found.add(name)))
            try:
                with draws:
                    run()
            except Exception:  # noqa: BLE001 - it may not run in training mode, or not without its layers
                return
            finally:
                changes.undo()
            called.append(found)
    skipped = sorted(called[0] ^ called[1])
    if skipped:
        msg = (
            f"{type(model).__name__} skips layers at random in training ('{skipped[0]}'), between which sequences are "
            f"split (`sequence_parallelism_mode={mode!r}`). Switch it off, for models of transformers by setting each "
            "`layerdrop` of its configuration to 0, or leave `sequence_parallelism_mode` out."
        )
        raise ConfigError(msg)


class ListRun:
    """Sees to it that sequences which are split before the first layer of a list are put together after the last one.

    A model that leaves its first layer out would give whole sequences to layers which work on parts, and one that
    leaves its last layer out would go on with parts.

    Args:
        model: The user's model.
        layers: The layers of one of its lists.
        mode: The mode of sequence parallelism, for messages.
        changes: Notes the hooks.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], mode: str, changes: ModulePatches) -> None:
        self._model_name, self._mode = type(model).__name__, mode
        self._is_running, self._is_split = False, False
        modules = dict(model.named_modules())
        name = next(name for name, module in modules.items() if module is layers[0])
        caller = modules[name := name.rpartition(".")[0]]
        while name and isinstance(caller, (nn.ModuleList, nn.ModuleDict)):
            caller = modules[name := name.rpartition(".")[0]]
        self._caller, self._changes = caller, changes
        changes.hook(caller.register_forward_pre_hook(lambda *_: self._begin()))
        changes.hook(caller.register_forward_hook(lambda *_: self._end()))

    def watch_between(self, hooks: LayerHooks) -> None:
        """Give what the caller of the layers does between them whole sequences.

        Args:
            hooks: Those of a layer.
        """
        for name in _BETWEEN_LAYERS:
            if hasattr(self._caller, name):
                method = _WholeBetweenLayers(getattr(self._caller, name), hooks)
                self._changes.attribute(self._caller, name, method)

    def split(self) -> None:
        """Note that the first layer is called."""
        self._is_split = True

    def join(self) -> None:
        """Note that the last layer has been called."""
        self._is_split = False

    def note_backward(self) -> None:
        """Note that backward runs, in which single layers may be computed again."""
        self._is_running = False

    def check_layer(self, layer: nn.Module) -> None:
        """Check before a layer, but the first one, that the first one has been called.

        Raises:
            ConfigError: If not, on every rank.
        """
        if self._is_running and not self._is_split:
            self._refuse(f"calls a '{type(layer).__name__}' of a list of layers without the list's first one")

    def _begin(self) -> None:
        self._is_running, self._is_split = True, False

    def _end(self) -> None:
        if self._is_split:
            self._is_split = False
            self._refuse("returns without calling the last layer of a list whose first one it has called")

    def _refuse(self, what: str) -> NoReturn:
        msg = (
            f"{self._model_name} {what}, between which sequences are split (`sequence_parallelism_mode={self._mode!r}`)"
            ". Switch off what skips layers, such as `layerdrop`, stochastic depth or an early exit, or leave "
            "`sequence_parallelism_mode` out."
        )
        raise ConfigError(msg)


class _WholeBetweenLayers:
    """Gives a method that changes hidden states between layers those of whole sequences.

    Args:
        method: The method.
        hooks: Those of a layer of the list.
    """

    def __init__(self, method: Callable[..., Tensor], hooks: LayerHooks) -> None:
        self._method, self._hooks = method, hooks

    @outside_of_graphs
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return this rank's part of the hidden states. Collective: the group."""
        return self._hooks.cut(self._method(self._hooks.join(hidden_states), *args, **kwargs))


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


def refuse_outputs_of_layers(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse, before a forward, what the layers have in between, of which each rank has a part.

    Raises:
        ConfigError: If it is asked for.
    """
    del args
    config = getattr(module, "config", None)
    for name in ("output_hidden_states", "output_attentions"):
        asked = kwargs.get(name)
        if asked or (asked is None and getattr(config, name, False)):
            msg = (
                f"`{name}=True` asks for what the layers have in between, of which each rank has a part. Leave it out."
            )
            raise ConfigError(msg)


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
