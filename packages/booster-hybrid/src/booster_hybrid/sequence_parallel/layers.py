"""The lists of layers along which sequences are split, and what can't be asked of it then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.fixed_draws import ConstantRandomMode, preserve_generators
from booster_hybrid.layer_plan import ModulePatches
from booster_hybrid.pipeline.trace import CONTAINERS, is_plain_output, shown_output
from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.sequence_parallel.split_list import LayerHooks


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
