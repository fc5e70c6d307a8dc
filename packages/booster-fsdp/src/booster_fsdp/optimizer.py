"""`FSDPOptimizer`: the user's optimizer on plain tensors in place of sharded parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from booster_core.errors import ConfigError
from booster_core.gradients import clip_by_norm
from booster_core.plugin import OptimizerWrapper
from booster_fsdp.pieces import RowsPiece, WholeParameters, rows_here, show_rows
from booster_runtime import collectives
from booster_runtime.sharding import HostedOptimizer, check_takes_parts, local_of, partition_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_fsdp.config import FSDPConfig
    from booster_fsdp.settling import Settlement
    from booster_fsdp.units import Units
    from booster_runtime.sharding import ShardingRanks


class FSDPOptimizer(OptimizerWrapper):
    """Step the user's optimizer on this rank's pieces of a sharded model.

    Args:
        optim: The user's optimizer, over the parameters that the model had before it was sharded. Its groups are
            changed to list this rank's pieces, and its state is split in the same way.
        model: The user's model, sharded.
        before: The parameters before sharding, by number.
        paths: Their paths in the model, by number, as for ``get_parameter``.
        names: Their names in the user's own model, by number.
        units: The model's units.
        settlement: Completes the model's gradients.
        ranks: The ranks of a replica.
        config: Options.
        device: Where the model runs.
        **kwargs: As for `OptimizerWrapper`.

    Raises:
        ConfigError: If the optimizer can't step on pieces.

    Collective: none.
    """

    def __init__(
        self,
        optim: Optimizer,
        model: nn.Module,
        *,
        before: Mapping[int, nn.Parameter],
        paths: Mapping[int, str],
        names: Mapping[int, str],
        units: Units,
        settlement: Settlement,
        ranks: ShardingRanks,
        config: FSDPConfig,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        super().__init__(optim, **kwargs)
        self.names = dict(names)
        self.parameters = {index: model.get_parameter(path) for index, path in paths.items()}
        self._index_of = {id(parameter): index for index, parameter in self.parameters.items()}
        self._units = units
        self.ranks = ranks
        self._config = config
        self._device = device
        self._settlement = settlement
        self._takes_rows = partition_for(optim, config.partition) == "flat"
        if config.cpu_offload and device.type != "cpu" and not self._takes_rows:
            msg = (
                f"{type(optim).__name__} needs whole parameters, which ranks exchange on '{device.type}', but "
                "`cpu_offload=True` keeps them in host memory. Use another optimizer, or leave out `cpu_offload`."
            )
            raise ConfigError(msg)
        self._whole: list[WholeParameters] = []
        self.hosted = HostedOptimizer(optim, self.names)
        self.pieces: dict[int, RowsPiece] = {}
        index_before = {id(parameter): index for index, parameter in before.items()}
        for group in optim.param_groups:
            self._adopt([index_before[id(parameter)] for parameter in group["params"]])

    # ---- parameters and groups

    def _adopt(self, members: Sequence[int]) -> None:
        """Replace the parameters of the hosted optimizer's next group by pieces."""
        parameters = {index: self.parameters[index] for index in members}
        if self._takes_rows:
            rows = {index: rows_here(index, parameter, self.ranks) for index, parameter in parameters.items()}
            pieces = {index: piece for index, piece in rows.items() if piece is not None}
        else:
            whole = WholeParameters(parameters, self.ranks)
            self._whole.append(whole)
            pieces = whole.pieces
        self.pieces.update(pieces)
        self.hosted.adopt(len(self.hosted.groups), members, pieces)

    def listed_parameters(self) -> set[int]:
        listed = self.hosted.members()
        return {key for key, index in self._index_of.items() if index in listed}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters to the inner optimizer.

        Raises:
            ConfigError: If a parameter is not the model's, or is in a group already, or the optimizer needs this
                group's parameters whole while those of the other groups are split.

        Collective: none, but every rank must add the same group, between a step and the next backward.
        """
        self._units.reshard()
        given = param_group["params"]
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
        remedy = "Take it from the model that `boost` returned, outside of forward."
        members = self.hosted.new_members(listed, self._index_of, remedy=remedy)
        self.optim.add_param_group({**param_group, "params": listed})
        if self._takes_rows:
            try:
                check_takes_parts(self.unwrap(), self._config.partition, self.optim.param_groups[-1])
            except ConfigError:
                self.optim.param_groups.pop()
                raise
        self._adopt(members)

    def _held(self) -> list[tuple[int, nn.Parameter]]:
        return [(index, self.parameters[index]) for group in self.hosted.groups for index in group]

    # ---- gradients

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss and reduce its gradients; see `OptimizerWrapper.backward`.

        Collective: every rank of the world; under ``no_sync`` only for the gathers of parameters.
        """
        self._settlement.has_backward = True
        super().backward(loss, inputs, retain_graph=retain_graph)

    def settle(self) -> None:
        """Reduce the gradients of ``no_sync``, and average those of replicated parameters.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        self._settlement.settle()

    def gradients(self) -> list[Tensor]:
        """Return the averaged gradients of this rank's rows and of replicated parameters.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        self.settle()
        held = [local_of(parameter.grad) for _, parameter in self._held() if parameter.grad is not None]
        return [gradient for gradient in held if gradient.numel()]

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over all shards of a replica; each element counts once."""
        gradients = self.gradients()
        counted = [
            local_of(parameter.grad)
            for _, parameter in self._held()
            if parameter.grad is not None and (isinstance(parameter, DTensor) or self.ranks.shard_rank == 0)
        ]
        return clip_by_norm(
            gradients,
            max_norm,
            norm_type,
            counted=counted,
            groups=[] if self.ranks.shard_group is None else [self.ranks.shard_group],
            device=self._device,
            error_if_nonfinite=error_if_nonfinite,
        )

    def overflow_anywhere(self, overflow: bool) -> bool:  # noqa: FBT001 - as in core
        """Return whether a gradient overflowed on any rank.

        Collective: every rank of the world.
        """
        flag = torch.tensor([overflow], dtype=torch.uint8, device=self._device)
        collectives.all_reduce(flag, dist.ReduceOp.MAX).wait()
        return bool(flag.item())

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a copy of a parameter's whole gradient, without loss scale; ``None`` if no rank used the parameter.

        Collective: every rank of the world.
        """
        self.settle()
        if parameter.grad is None:
            return None
        gradient: Tensor = parameter.grad.detach()
        if isinstance(gradient, DTensor):
            # The process group has no backend for offloaded shards.
            sharded: Any = gradient.to(self._device)
            gradient = sharded.full_tensor()
        is_scaled = self.loss_scaler is not None and not self.is_unscaled
        if is_scaled or gradient.data_ptr() == local_of(parameter.grad).data_ptr():
            gradient = gradient.clone()
        if self.loss_scaler is not None and not self.is_unscaled:
            gradient /= self.loss_scaler.scale
        return gradient

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients, reduced or not.

        Collective: none.
        """
        held = [parameter for _, parameter in self._held()]
        self._units.forget({id(parameter) for parameter in held})
        for parameter in held:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                local_of(parameter.grad).zero_()
        super().zero_grad(set_to_none)

    # ---- stepping

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update this rank's pieces; see `OptimizerWrapper.step`.

        Collective: every rank of the world.
        """
        if closure is None:
            self._clip_as_configured()
        return super().step(closure)

    def _clip_as_configured(self) -> None:
        if self._config.max_norm > 0 and self._grad_norm is None:
            self.clip_grad_by_norm(self._config.max_norm)

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the inner optimizer on this rank's pieces, and broadcast the buffers that forward has changed.

        Raises:
            ConfigError: If a closure is passed with an optimizer that needs whole parameters.

        Collective: every rank of the world.
        """
        if closure is not None and not self._takes_rows:
            msg = (
                f"{type(self.unwrap()).__name__} gets whole parameters during a step, so a closure can't run the "
                "model. Call `step()` without a closure, or use plugin='ddp'."
            )
            raise ConfigError(msg)
        if closure is None:
            self._make_ready()
            result = self.optim.step()
        else:

            def evaluated() -> float:
                loss = closure()
                self.settle()
                self._clip_as_configured()
                self._make_ready()
                return loss

            result = self.optim.step(evaluated)
        for whole in self._whole:
            whole.scatter()
        # Parameters that a forward without backward left gathered have old values.
        self._units.note_update()
        self._settlement.send_buffers()
        return result

    def _make_ready(self) -> None:
        self.settle()
        if self._takes_rows:
            show_rows(self.pieces.values())
        for whole in self._whole:
            whole.gather()
