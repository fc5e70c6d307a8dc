"""An exponential moving average of a model's weights, kept shard by shard on the weights' devices.

Nothing is gathered: each rank averages the shards that it holds, under any plugin, and saves them like a model. Where
the optimizer updates masters, these are averaged, not the parameters that are rounded from them. The average is kept in
fp32 at least, because a step of ``1 - decay`` is lost in narrower formats. Buffers are copied, not
averaged, as in ``torch.optim.swa_utils.AveragedModel``. (Polyak and Juditsky 1992, "Acceleration of stochastic
approximation by averaging", doi:10.1137/0330046.)
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from booster_core.checkpoint_io import LoadRequest, ModelState, SaveRequest
from booster_core.errors import ConfigError
from booster_core.plugin import unwrap_model
from booster_core.state import ModelView, NamedTensors, TensorShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from booster_core import Booster
    from booster_core.checkpoint_io import CheckpointIO, LoadReport
    from booster_core.state import StateAdapter

_Key = tuple[str, Any, "tuple[int, int] | None"]


def ema(booster: Booster, model: nn.Module, decay: float = 0.999) -> ExponentialAverage:
    """Return a moving average of a model's weights: ``update()`` it after each step.

    Args:
        booster: Of the run.
        model: The boosted model, or a plain one that every rank holds whole.
        decay: Weight of the old average in each update.

    Raises:
        TypeError: If ``model`` is not a module.
        ConfigError: If ``decay`` is out of range.
    """
    return ExponentialAverage(model, decay, lambda: booster.state_adapter(model), booster.checkpoint_io)


class ExponentialAverage:
    """The moving average of a boosted model's parameters; starts at their present values.

    Made by `ema`.

    Args:
        model: The boosted model.
        decay: Weight of the old average in each `update`; ``0 <= decay <= 1``.
        make_adapter: Returns the plugin's view of the model's state.
        io: Saves and loads.

    Raises:
        ConfigError: If ``decay`` is out of range.

    Memory: one fp32 copy of the shards that this rank holds. Communication: none, except to save and load.
    """

    def __init__(
        self, model: nn.Module, decay: float, make_adapter: Callable[[], StateAdapter], io: CheckpointIO
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            msg = f"`decay={decay}` must be between 0 and 1; usual values are 0.99 to 0.9999."
            raise ConfigError(msg)
        self.decay = decay
        self._module = unwrap_model(model)
        self._make_adapter = make_adapter
        self._io = io
        self._is_applied = False
        self._copied = _names_of_buffers(self._module)
        adapter = make_adapter()
        formats = {shard.name: shard.dtype for shard in adapter.model_shards()}
        self._formats = dict.fromkeys(formats, torch.float64)  # the widest, for which all masters are read
        self._averages = {
            _key_of(shard): _average_of(shard, is_copied=shard.name in self._copied)
            for shard in adapter.export_shards(self._formats)
        }
        self._has_masters = any(shard.dtype != formats[shard.name] for shard in adapter.export_shards(self._formats))
        self._place = adapter.place
        adapter.follow(self)

    def update(self, decay: float | None = None) -> None:
        """Move the average towards the model's present values: ``average = decay * average + (1 - decay) * value``.

        Args:
            decay: Another decay for this update, such as that of a warmup.

        Raises:
            ConfigError: If ``decay`` is out of range, or the averages are applied.
        """
        decay = self.decay if decay is None else decay
        if not 0.0 <= decay <= 1.0:
            msg = f"`decay={decay}` must be between 0 and 1."
            raise ConfigError(msg)
        self._refuse_if_applied("update")
        adapter = self._make_adapter()
        alike: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
        with torch.no_grad():
            for shard, average in self._pairs(adapter):
                data = shard.data.detach()
                if shard.name in self._copied or not data.is_floating_point():
                    average.copy_(data)
                elif adapter.keeps_values and (data.dtype, data.device) == (average.dtype, average.device):
                    averages, values = alike.setdefault((data.dtype, data.device), ([], []))
                    averages.append(average)
                    values.append(data)
                else:
                    average.lerp_(data.to(average), 1.0 - decay)
            for averages, values in alike.values():
                torch._foreach_lerp_(averages, values, 1.0 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model hold the averages until the body ends, also if it raises; for evaluation.

        The optimizer must not step inside. Takes one more copy of the model's shards meanwhile.

        Raises:
            ConfigError: If they are applied already.

        Collective: every rank of the world, at the beginning and at the end.
        """
        self._refuse_if_applied("applied")
        own: dict[_Key, Tensor] = {}
        self._is_applied = True
        try:
            with torch.no_grad():
                for shard, average in self._pairs(self._make_adapter()):
                    own[_key_of(shard)] = shard.data.detach().clone()
                    shard.data.detach().copy_(average)
                self._show_masters()
            yield
        finally:
            with torch.no_grad():
                for shard in self._make_adapter().export_shards(self._formats):
                    if _key_of(shard) in own:
                        shard.data.detach().copy_(own[_key_of(shard)])
                self._show_masters()
            self._is_applied = False

    def save(self, checkpoint: str | Path, **options: Any) -> None:
        """Write the averages as a model; see `Booster.save_model` for the path, the options and the errors.

        Collective: every rank of the world.
        """
        self._io.save_model(self._state(), SaveRequest(call="save", path=checkpoint, **options))

    def load(self, checkpoint: str | Path, strict: bool = True, **options: Any) -> LoadReport:  # noqa: FBT001, FBT002 - as for `Booster.load_model`
        """Read averages that `save` wrote, under any plugin and number of ranks, or any other model's weights.

        Collective: every rank of the world.
        """
        request = LoadRequest(call="load", path=checkpoint, strict=strict, **options)
        return self._io.load_model(self._state(), request)

    def state_adapter(self) -> StateAdapter:
        """Return the averages as the state of a model, to be saved or loaded.

        Raises:
            ConfigError: If the averages are applied: the model's own values are elsewhere meanwhile.
        """
        self._refuse_if_applied("state_adapter")
        return _AveragesAdapter(self)

    def shards(self) -> Iterator[TensorShard]:
        """Yield the averages as shards of the model; ``data`` is readable and writable."""
        for shard, average in self._pairs(self._make_adapter()):
            yield TensorShard(
                name=shard.name,
                global_shape=shard.global_shape,
                dtype=average.dtype,
                box=shard.box,
                flat=shard.flat,
                data=average,
                is_owner=shard.is_owner,
            )

    def _state(self) -> ModelState:
        return ModelState(adapter=_AveragesAdapter(self), module=self._module)

    def give(self, shard: TensorShard) -> None:
        """See `booster_core.state.ShardFollower`, like `take`."""
        for placed in self._place(shard):
            placed.data.copy_(self._average_for(placed))
            del self._averages[_key_of(placed)]

    def take(self, shard: TensorShard) -> None:
        """See `give`."""
        for placed in self._place(shard):
            self._averages[_key_of(placed)] = placed.data.clone(memory_format=torch.contiguous_format)

    def _show_masters(self) -> None:
        """Bring masters that were written into the parameters that are rounded from them."""
        self._make_adapter().finish_load(model=False, optimizer=self._has_masters)

    def _pairs(self, adapter: StateAdapter) -> Iterator[tuple[TensorShard, Tensor]]:
        for shard in adapter.export_shards(self._formats):
            yield shard, self._average_for(shard)

    def _average_for(self, shard: TensorShard) -> Tensor:
        key = _key_of(shard)
        whole = self._averages.get((shard.name, shard.box, None))
        if key not in self._averages and whole is not None:  # it was frozen, and is split now that it is trained
            self._averages[key] = whole.flatten()[slice(*shard.flat_range)].clone()
        if key not in self._averages:
            msg = (
                f"'{shard.name}' is no part of the model that this average was made of, or is sharded otherwise now. "
                "Make the average after the model has its final form."
            )
            raise ConfigError(msg)
        return self._averages[key]

    def _refuse_if_applied(self, call: str) -> None:
        if self._is_applied:
            msg = f"`{call}` inside of `applied`: the model holds the averages now. Leave the `with` block first."
            raise ConfigError(msg)


class _AveragesAdapter(ModelView):
    """Shows averages in place of a model's own values; extra state is not averaged, but written with them."""

    def __init__(self, ema: ExponentialAverage) -> None:
        super().__init__(ema._make_adapter())  # noqa: SLF001 - the other half of this class
        self._ema = ema

    def model_shards(self) -> Iterator[TensorShard]:
        return self._ema.shards()

    def tied_names(self) -> Mapping[str, str]:
        return self.inner.tied_names()

    def extra_state(self) -> Mapping[str, object]:
        return self.inner.extra_state()


def _names_of_buffers(module: nn.Module) -> set[str]:
    named = NamedTensors.of(module)
    trained = {id(parameter) for parameter in module.parameters()}
    return {name for name, tensor in named.tensors.items() if id(tensor) not in trained}


def _key_of(shard: TensorShard) -> _Key:
    return shard.name, shard.box, shard.flat


def _average_of(shard: TensorShard, *, is_copied: bool) -> Tensor:
    """Return a copy in which an average can be kept; one that is only ever copied keeps its dtype."""
    data = shard.data
    if is_copied or not data.is_floating_point():
        return data.detach().clone()
    return data.detach().to(torch.promote_types(data.dtype, torch.float32), copy=True).contiguous()
