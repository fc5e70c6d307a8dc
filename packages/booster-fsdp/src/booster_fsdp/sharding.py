"""Shard a model by ``fully_shard``: the mesh, dtypes, units from the inside out, and prefetching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from booster_core.errors import ConfigError
from booster_core.precision import NARROW
from booster_core.state import NamedTensors
from booster_fsdp.communication import use_runtime_collectives
from booster_fsdp.outputs import return_no_views
from booster_fsdp.units import Units
from booster_fsdp.wrapping import choose_units, find_ignored
from booster_runtime.sharding import (
    ShardingRanks,
    check_distinct_memory,
    kept_as_they_are,
    make_ranks,
    note_reductions,
    parameters_by_unit,
    refuse_renormalized,
    sharding_groups,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from booster_core.precision import PrecisionPolicy
    from booster_fsdp.config import FSDPConfig

_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes in which torch keeps the hooks of a parameter."""


def make_mesh(world_size: int, device_type: str, config: FSDPConfig) -> DeviceMesh:
    """Return the mesh: one axis ``"shard"``, after an axis ``"replicate"`` if there is more than one replica.

    Raises:
        ConfigError: If ``replica_size``, or a number as ``reshard_after_forward``, does not divide the ranks.

    Collective: every rank of the world.
    """
    sharding_groups(world_size, config.replica_size)
    shard_size = world_size // config.replica_size
    asked = config.reshard_after_forward
    if not isinstance(asked, bool) and shard_size % asked:
        divisors = ", ".join(str(size) for size in range(2, shard_size + 1) if shard_size % size == 0)
        msg = (
            f"`reshard_after_forward={asked}` does not divide the {shard_size} ranks of a sharded model. "
            f"Use True, False{' or one of ' + divisors if divisors else ''}."
        )
        raise ConfigError(msg)
    if config.replica_size == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    # torch would make the groups with a time limit of its own.
    ranks = make_ranks(config.replica_size)
    groups = [group for group in (ranks.replica_group, ranks.shard_group) if group is not None]
    numbers = torch.arange(world_size).view(config.replica_size, shard_size)
    return DeviceMesh.from_group(groups, device_type, mesh=numbers, mesh_dim_names=("replicate", "shard"))


def ranks_of(mesh: DeviceMesh) -> ShardingRanks:
    """Return this rank's position on a mesh that `make_mesh` returned.

    Collective: none.
    """
    has_replicas = mesh.ndim > 1
    return ShardingRanks(
        shard_group=mesh.get_group("shard"),
        shard_rank=mesh.get_local_rank("shard"),
        shard_size=mesh.size(mesh.ndim - 1),
        replica_group=mesh.get_group("replicate") if has_replicas else None,
        replica_rank=mesh.get_local_rank("replicate") if has_replicas else 0,
    )


def check_parameters(model: nn.Module) -> None:
    """Check that each parameter can be sharded or replicated.

    Raises:
        ConfigError: If one is sharded already, has hooks or sparse gradients, or two parameters share memory.

    Collective: none.
    """
    name_of = NamedTensors.of(model).name_of
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            msg = (
                f"Parameter '{name}' is a DTensor already, {parameter.placements} on {parameter.device_mesh}. Boost "
                "the plain model; to combine sharding with tensor parallelism, use plugin='hybrid'."
            )
            raise ConfigError(msg)
        if id(parameter) not in name_of:
            msg = f"Parameter '{name}' is registered under a name that `state_dict` does not list."
            raise ConfigError(msg)
        if any(getattr(parameter, hooks, None) for hooks in _GRADIENT_HOOKS):
            msg = (
                f"Parameter '{name}' has hooks on its gradient, which FSDP drops: it replaces parameters. Scale the "
                "loss or the gradients after backward instead, or use plugin='zero'."
            )
            raise ConfigError(msg)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            msg = (
                f"The gradients of '{name}' are sparse, and FSDP shards dense ones. Build it with `sparse=False`, or "
                "use plugin='ddp', which keeps them sparse."
            )
            raise ConfigError(msg)
    check_distinct_memory(model)
    refuse_renormalized(model)


def shard_model(
    model: nn.Module, mesh: DeviceMesh, config: FSDPConfig, policy: PrecisionPolicy, *, offload: bool
) -> Units:
    """Shard a model in place, and return its units; some parameters are replicated.

    Replicated are: parameters that the options name; scalars, which have no rows; empty ones; parameters that are not
    floating, such as quantized ones, whose class stores further data for each tensor; BatchNorm's under a narrow
    dtype, because its kernels need fp32; and, in a unit with several dtypes, parameters of any but the most frequent
    one, because torch reduces a unit's gradients in one buffer.

    Args:
        model: The user's model, on the device of the mesh or on meta.
        mesh: What `make_mesh` returned.
        config: Options.
        policy: Precision of the run.
        offload: Keep shards in host memory.

    Raises:
        ConfigError: If a name in the options is not in the model, or a unit can't be sharded.

    Collective: every rank of the world.
    """
    chosen = choose_units(model, config)
    whole = find_ignored(model, config)
    whole |= {parameter for parameter in model.parameters() if _is_kept_whole(parameter)}
    if policy.uses_autocast and policy.compute_dtype in NARROW:
        kept = kept_as_they_are(model)
        whole |= {parameter for parameter in model.parameters() if id(parameter) in kept}
    by_unit = parameters_by_unit(model, chosen)
    dtype_of = {}
    for name, parameters in by_unit.items():
        dtype_of[name], odd = _dtypes(parameter for parameter in parameters if parameter not in whole)
        whole |= odd
    modules = dict(model.named_modules())
    asked = config.reshard_after_forward
    for parameter in model.parameters():
        if parameter not in whole and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    offload_policy = OffloadPolicy()
    if offload:
        offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    formats = {name: _mixed_precision(policy, dtype_of[name]) for name in (*reversed(chosen), "")}
    for name, policy_of_unit in formats.items():
        module = modules[name]
        return_no_views(module)
        options: dict[str, Any] = {} if not whole else {"ignored_params": whole}
        try:
            fully_shard(
                module,
                mesh=mesh,
                # `None` lets torch keep the outermost unit gathered, which backward needs first.
                reshard_after_forward=asked if name or not asked else None,
                mp_policy=policy_of_unit,
                offload_policy=offload_policy,
                **options,
            )
        except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as cause:
            where = f"Unit '{name}' ({type(module).__name__})" if name else f"The model ({type(module).__name__})"
            msg = f"{where} can't be sharded: {cause} Keep it whole by `ignored_modules`, or choose other units."
            raise ConfigError(msg) from cause
    sharded = [cast("FSDPModule", modules[name]) for name in chosen]
    if mesh.device_type == "cpu":
        for unit in (model, *sharded):
            use_runtime_collectives(cast("FSDPModule", unit))
    is_summed_here = hasattr(model, "set_custom_reduce_scatter")
    sent = _sent_dtypes(formats, dtype_of, whole)
    note_reductions(model, sent, torch.device(mesh.device_type), by_backend=not is_summed_here, is_rounded=True)
    _prefetch(cast("FSDPModule", model), sharded, config)
    return Units([cast("FSDPModule", model), *sharded])


def _is_kept_whole(parameter: nn.Parameter) -> bool:
    """Return whether there is nothing to shard, or nothing that torch can shard."""
    return not parameter.dim() or not parameter.numel() or not parameter.is_floating_point()


def _dtypes(parameters: Iterable[nn.Parameter]) -> tuple[torch.dtype | None, set[nn.Parameter]]:
    """Return the dtype of most trained elements, and the trained parameters of other dtypes."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    numels: dict[torch.dtype, int] = {}
    for parameter in trained:
        numels[parameter.dtype] = numels.get(parameter.dtype, 0) + parameter.numel()
    if not numels:
        return None, set()
    most = max(numels, key=lambda dtype: numels[dtype])
    return most, {parameter for parameter in trained if parameter.dtype != most}


def _mixed_precision(policy: PrecisionPolicy, dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the dtypes of a unit; autocast around the model handles inputs and outputs."""
    gathered = policy.compute_dtype if policy.uses_autocast else None
    reduced: torch.dtype | None = policy.reduce_dtype
    is_wider = dtype is not None and policy.param_dtype is None and dtype.itemsize > policy.reduce_dtype.itemsize
    if is_wider or (gathered is None and reduced == dtype):
        reduced = None
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)


def _sent_dtypes(
    formats: Mapping[str, MixedPrecisionPolicy],
    dtype_of: Mapping[str, torch.dtype | None],
    replicated: Iterable[nn.Parameter],
) -> set[torch.dtype]:
    """Return the dtypes in which gradients of units and of replicated parameters are reduced."""
    trained = {name: each for name, each in formats.items() if dtype_of[name] is not None}
    units = {each.reduce_dtype or each.param_dtype or dtype_of[name] for name, each in trained.items()}
    # Those of replicated parameters are averaged in fp32 at least.
    others = {torch.promote_types(each.dtype, torch.float32) for each in replicated if each.requires_grad}
    return {dtype for dtype in units if dtype is not None} | others


def _prefetch(root: FSDPModule, units: Sequence[FSDPModule], config: FSDPConfig) -> None:
    ahead, behind = config.forward_prefetch, config.backward_prefetch
    if ahead:
        root.set_modules_to_forward_prefetch(list(units[:ahead]))
    for index, unit in enumerate(units):
        if ahead:
            unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + ahead]))
        if behind:
            unit.set_modules_to_backward_prefetch(list(reversed(units[max(index - behind, 0) : index])))
    if behind:
        root.set_modules_to_backward_prefetch(list(reversed(units[-behind:])))
