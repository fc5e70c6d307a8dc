"""What ZeRO and Gemini both ask their users, and the precision and formats that follow from the answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.plugin import check_no_masters, check_option_types
from booster_core.precision import NARROW
from booster_runtime.sharding import working_dtypes
from booster_zero.engine.partition import Format

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from booster_core.precision import PrecisionPolicy
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.layout import ListedParameters

_LEAST_TABLE_BYTES = 2**22
"""Smaller tables of embeddings travel with other parameters."""
_WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Options of every strategy that shards by buckets.

    Args:
        max_norm: Clip gradients by this global norm in each step, unless ``clip_grad_by_norm`` was called before it;
            0 disables clipping.
        overlap_communication: Reduce gradients during backward.
        communication_dtype: Dtype in which gradients are sent: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a torch dtype;
            ``None`` uses that of the parameters. CPUs always sum in fp32, devices in this dtype.
        master_weights: Keep fp32 masters of bf16 and fp16 parameters; if False, the optimizer updates the working
            parameters.
        replica_size: Number of replicas of the sharded state: it is sharded within groups of
            ``world_size / replica_size`` ranks, and gradients are averaged over the groups (hybrid sharding).
        partition: ``"flat"`` splits parameters at any element, so that shares are equal; ``"parameter"`` keeps them
            whole; ``"auto"`` chooses by the optimizer's class, see `booster_runtime.sharding.elementwise`.
        unused: ``"zero"`` gives a parameter that this rank did not use a zero gradient, and skips those that no rank
            used; ``"raise"`` raises at the step and names them by rank.
        broadcast_buffers: Broadcast, after each step, rank 0's values of buffers that forward changes, such as running
            statistics.

    Raises:
        ConfigError: If a value is out of range.
    """

    max_norm: float = 0.0
    overlap_communication: bool = True
    communication_dtype: torch.dtype | str | None = None
    master_weights: bool = True
    replica_size: int = 1
    partition: str = "auto"
    unused: str = "zero"
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        check_option_types(self)
        if not 0 <= self.max_norm < math.inf:
            msg = f"`max_norm={self.max_norm}` must be 0 (no clipping) or the largest global norm of the gradients."
            raise ConfigError(msg)
        self._check_positive("replica_size", "a number of replicas")
        self._check_known("partition", ("auto", "flat", "parameter"))
        self._check_known("unused", ("zero", "raise"))
        if self.communication_dtype is not None and self.wire_dtype is None:
            msg = (
                f"`communication_dtype={self.communication_dtype!r}` is not one of {', '.join(map(repr, _WIRES))}, "
                "or a torch dtype of these."
            )
            raise ConfigError(msg)

    def _check_positive(self, name: str, meaning: str) -> None:
        value = getattr(self, name)
        if value is not None and value < 1:
            msg = f"`{name}={value}` must be positive; it is {meaning}."
            raise ConfigError(msg)

    def _check_known(self, name: str, known: Sequence[object]) -> None:
        if getattr(self, name) not in known:
            msg = f"`{name}={getattr(self, name)!r}` is not one of {', '.join(map(repr, known))}."
            raise ConfigError(msg)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The format in which gradients travel; ``None`` for the parameters' own."""
        dtype = self.communication_dtype
        if isinstance(dtype, str):
            return _WIRES.get(dtype)
        return dtype if dtype in _WIRES.values() else None

    def resolve_precision(self, policy: PrecisionPolicy, name: str) -> PrecisionPolicy:
        """Return the policy with working parameters in the compute format, and masters of them where it is narrow.

        Args:
            policy: What the user asked for.
            name: The plugin, for errors.

        Raises:
            ConfigError: If ``reduce_dtype`` and ``communication_dtype`` differ, or fp32 compute is to have masters.
        """
        wire = self.wire_dtype
        if wire is not None:
            if policy.reduce_dtype not in (torch.float32, wire):
                msg = (
                    f"`reduce_dtype={policy.reduce_dtype}` of the precision and `communication_dtype={wire}` of the "
                    "plugin are two answers to one question. Give one of them."
                )
                raise ConfigError(msg)
            policy = replace(policy, reduce_dtype=wire)
        if policy.compute_dtype not in NARROW:
            return check_no_masters(policy, name)
        masters = policy.master_dtype if self.master_weights else policy.compute_dtype
        return replace(policy, param_dtype=policy.compute_dtype, master_dtype=masters)

    def formats(
        self,
        model: nn.Module,
        policy: PrecisionPolicy,
        device: torch.device,
        *,
        listed: ListedParameters,
        lays_out_all: bool = False,
        step_device: torch.device | None = None,
        copies: Mapping[int, tuple[int, ...]] | None = None,
        ranks: Mapping[int, ShardingRanks] | None = None,
    ) -> Callable[[nn.Parameter], Format]:
        """Return what tells the formats and devices of each of a model's parameters.

        Args:
            model: The user's model.
            policy: Precision of the run.
            device: Where forward runs.
            listed: The parameters that the optimizers list.
            lays_out_all: Whether parameters are laid out, too, that are neither trained nor listed. They have no
                masters.
            step_device: Where the optimizers step; ``None`` for ``device``.
            copies: For parameters that several stages of a pipeline hold, by ``id``: `Format.copies`.
            ranks: For parameters that other ranks share than the layout's, by ``id``: `Format.ranks`.
        """
        working_dtype, tables = working_dtypes(model, policy), _tables(model)
        asked = self.wire_dtype or (policy.reduce_dtype if policy.reduce_dtype != torch.float32 else None)

        def format_of(parameter: nn.Parameter) -> Format:
            working = working_dtype(parameter)
            is_trained = parameter.requires_grad or (lays_out_all and parameter in listed)
            has_master = working in NARROW and policy.param_dtype is not None and (is_trained or not lays_out_all)
            optimizer = listed.number_of(parameter)
            return Format(
                working=working,
                master=policy.master_dtype if has_master else working,
                wire=asked or working,
                device=device,
                step_device=step_device or device,
                is_trained=is_trained,
                is_listed=parameter in listed,
                copies=(copies or {}).get(id(parameter), ()),
                ranks=(ranks or {}).get(id(parameter)),
                # Copies are laid out alike wherever they are, also where they are no embedding's.
                is_table=id(parameter) in tables - (copies or {}).keys()
                and parameter.numel() * working.itemsize >= _LEAST_TABLE_BYTES,
                optimizer=optimizer,
                partition=listed.partitions[optimizer],
                by_matrix=listed.by_matrix[optimizer],
            )

        return format_of


def _tables(model: nn.Module) -> set[int]:
    """Return the ``id`` of the parameters that are embeddings' alone: a head that shares one uses all of its rows."""
    users: dict[int, set[bool]] = {}
    for module in model.modules():
        is_embedding = isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(is_embedding)
    return {key for key, found in users.items() if found == {True}}
