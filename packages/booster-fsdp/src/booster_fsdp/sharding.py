"""Shard a model by ``fully_shard``: the mesh, dtypes, units from the inside out, and prefetching.

Of a lazy model, units are made of meta tensors, and each rank then fills only its shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from booster_core.errors import ConfigError
from booster_core.plugin import rebind, stored_dtypes
from booster_core.state import NamedTensors
from booster_fsdp._torch_private import check_internals, take_parameters
from booster_fsdp.collectives import MOST_RANKS, use_runtime_collectives
from booster_fsdp.parameters import sharded_parameter
from booster_fsdp.units import (
    choose_units,
    describe_formats,
    find_ignored,
    gathers_narrow,
    head_of,
    reduce_dtype,
    unit_format,
    uses_autocast,
)
from booster_runtime.lazy import take_recording
from booster_runtime.sharding import (
    ShardingRanks,
    check_distinct_memory,
    dtensor_shards,
    frozen_base,
    local_of,
    make_ranks,
    normalisation_parameters,
    note_compute,
    note_reductions,
    parameters_by_unit,
    raised_on_all,
    refuse_renormalized,
    send_first,
    sharding_groups,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.optim import Optimizer

    from booster_core.precision import PrecisionPolicy
    from booster_fsdp.config import FSDPConfig
    from booster_runtime.lazy import Recording

_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes in which torch keeps the hooks of a parameter."""


def make_mesh(world_size: int, device_type: str, config: FSDPConfig) -> DeviceMesh:
    """Return the mesh: an axis over which the model is sharded, after one of replicas if there is more than one.

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
    """Return this rank's position on a mesh that `make_mesh` returned."""
    last = mesh.ndim - 1
    return ShardingRanks(
        shard_group=mesh.get_group(last),
        shard_rank=mesh.get_local_rank(last),
        shard_size=mesh.size(last),
        replica_group=mesh.get_group(0) if last else None,
        replica_rank=mesh.get_local_rank(0) if last else 0,
    )


def check_parameters(model: nn.Module) -> None:
    """Check that each parameter can be sharded or replicated.

    Raises:
        ConfigError: If one has hooks or sparse gradients, two parameters share memory, or training skips layers.
    """
    name_of = NamedTensors.of(model).name_of
    for name, parameter in model.named_parameters():
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
    _refuse_skipped_layers(model)
    check_distinct_memory(model)
    refuse_renormalized(model)


def _refuse_skipped_layers(model: nn.Module) -> None:
    """Raise if training skips layers: ranks would gather other ones.

    transformers asks whether it is under FSDP, and then skips none, so that another model would be trained.
    """
    owners = dict(model.named_modules())
    owners |= {f"{name}.config".lstrip("."): getattr(module, "config", None) for name, module in owners.items()}
    for name, owner in owners.items():
        for key, value in getattr(owner, "__dict__", {}).items():
            if key.endswith("layerdrop") and isinstance(value, float) and value > 0:
                msg = (
                    f"`{name}.{key}` is {value}: training would skip layers at random, but under FSDP ranks gather a "
                    "layer's parameters together. Set it to 0 before `boost`, or use plugin='ddp' or 'zero'."
                )
                raise ConfigError(msg)


def shard_model(
    model: nn.Module, mesh: DeviceMesh, config: FSDPConfig, policy: PrecisionPolicy
) -> dict[str, FSDPModule]:
    """Shard a model in place, and return the model and the modules that became units by name.

    Replicated are: parameters that the options name; scalars, which have no rows; empty ones; parameters that are not
    floating, such as quantized ones, whose class stores further data for each tensor; BatchNorm's under a narrow
    dtype, because its kernels need fp32; and, in a unit with several dtypes, parameters of any but the most frequent
    one, because torch reduces a unit's gradients in one buffer.

    Args:
        model: The user's model, on the device of the mesh or on meta.
        mesh: What `make_mesh` returned.
        config: Options.
        policy: Precision of the run.

    Raises:
        ConfigError: If a name in the options is not in the model, or a unit can't be sharded.

    Collective: every rank of the world.
    """
    chosen = choose_units(model, config)
    whole, dtype_of = _replicated(model, chosen, config, policy)
    unrounded = _unrounded(model, chosen, whole, config, policy)
    for parameter in model.parameters():
        if parameter not in whole and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    options: dict[str, Any] = {
        "ignored_params": whole or None,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if config.cpu_offload
        else OffloadPolicy(),
        "shard_placement_fn": config.shard_placement_fn,
    }
    held = parameters_by_unit(model, chosen)
    formats = {}
    for name in (*reversed(chosen), ""):
        # What is frozen now may be unfrozen later.
        dtype = dtype_of[name] or next((each.dtype for each in held[name] if each not in whole), None)
        formats[name] = unit_format(config, policy, dtype, is_root=not name, is_rounded=name not in unrounded)
    asked, head = config.reshard_after_forward, head_of(model, chosen)
    # Backward needs the head and the outermost unit first; `None` lets torch keep the latter gathered.
    kept = {"": None, head: False} if asked is True else {"": asked and None}
    modules = dict(model.named_modules())
    for name, format_of_unit in formats.items():
        _shard(modules[name], name, mesh=mesh, mp_policy=format_of_unit, reshard=kept.get(name, asked), **options)
    is_gloo = "cpu:gloo" in dist.get_backend_config(mesh.get_group(mesh.ndim - 1))
    is_ours = is_gloo and mesh.device_type == "cpu" and mesh.size(mesh.ndim - 1) <= MOST_RANKS
    if is_ours:
        use_runtime_collectives({name: cast("FSDPModule", modules[name]) for name in formats})
    kept_in = {dtype for dtype in dtype_of.values() if dtype is not None}
    note_compute(model, describe_formats(config, policy, kept_in, has_unrounded=bool(unrounded)))
    is_summed_here = is_ours and hasattr(model, "set_custom_reduce_scatter")
    sent = _sent_dtypes(formats, dtype_of, whole)
    note_reductions(model, sent, torch.device(mesh.device_type), by_backend=not is_summed_here, is_rounded=True)
    units = {name: cast("FSDPModule", modules[name]) for name in ("", *chosen)}
    sharded = list(units.values())
    _prefetch(sharded[0], sharded[1:], config)
    check_internals(sharded)
    return units


def replace_parameters(model: nn.Module, units: Iterable[FSDPModule], before: Mapping[nn.Parameter, str]) -> list[int]:
    """Register a `ShardedTensor` in place of each parameter that torch has sharded, over the same memory.

    Args:
        model: The user's model, sharded.
        units: What `shard_model` returned.
        before: The names of the user's parameters.

    Returns:
        Counts writes of scripts in its only element.
    """
    writes = [0]
    found = ((model.get_parameter(path), own) for own, path in before.items())
    made = {id(each): sharded_parameter(each, own, writes) for each, own in found if isinstance(each, DTensor)}
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001 - without those of modules inside
            if isinstance(parameter, DTensor):
                module._parameters[name] = made[id(parameter)]  # noqa: SLF001
    take_parameters(units)
    return writes


def _replicated(
    model: nn.Module, chosen: Sequence[str], config: FSDPConfig, policy: PrecisionPolicy
) -> tuple[set[nn.Parameter], dict[str, torch.dtype | None]]:
    """Return the parameters that are replicated, and the dtype of each unit's trained parameters."""
    whole = find_ignored(model, config)
    whole |= {parameter for parameter in model.parameters() if _is_kept_whole(parameter)}
    if gathers_narrow(config, policy):
        kept = normalisation_parameters(model)
        whole |= {parameter for parameter in model.parameters() if id(parameter) in kept}
    dtype_of = {}
    for name, parameters in parameters_by_unit(model, chosen).items():
        dtype_of[name], odd = _dtypes(parameter for parameter in parameters if parameter not in whole)
        whole |= odd
    return whole, dtype_of


def _unrounded(
    model: nn.Module, chosen: Sequence[str], whole: set[nn.Parameter], config: FSDPConfig, policy: PrecisionPolicy
) -> set[str]:
    """Return the units that gather a part of the frozen base of adapters, which is pretrained, and not rounded.

    Without autocast the base is gathered in the dtype of its inputs, or it would not run.
    """
    base = frozen_base(model) if gathers_narrow(config, policy) and uses_autocast(config, policy) else set()
    units = parameters_by_unit(model, chosen)
    return {name for name, held in units.items() if any(id(each) in base and each not in whole for each in held)}


def _shard(module: nn.Module, name: str, *, reshard: bool | int | None, **options: Any) -> None:
    """Make one module a unit."""
    kind = type(module)
    module.register_forward_hook(_own_outputs)
    try:
        fully_shard(module, reshard_after_forward=reshard, **options)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as cause:
        where = f"Unit '{name}' ({type(module).__name__})" if name else f"The model ({type(module).__name__})"
        msg = f"{where} can't be sharded: {cause} Keep it whole by `ignored_modules`, or choose other units."
        raise ConfigError(msg) from cause
    # Loggers, trainers and tables of models ask for the user's class by its name.
    made = type(module)
    made.__name__, made.__qualname__, made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    if kind is nn.Embedding and name:
        # The gradient of a lookup does not depend on the table.
        cast("FSDPModule", module).set_unshard_in_backward(False)


def _own_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Copy a unit's outputs that are views, such as those of a `Linear` with a bias on sequences.

    An operation in place on a view (``x += y``) drops torch's hook on it, and with it the unit's gather for backward.
    """
    del module, args
    if not torch.is_grad_enabled():
        return output
    if isinstance(output, torch.Tensor):  # as most are: walking through them costs more than the rest of this
        return output.clone() if output._is_view() else output  # noqa: SLF001 - the only way to ask
    return tree_map_only(torch.Tensor, lambda each: each.clone() if each._is_view() else each, output)  # noqa: SLF001 - the only way to ask


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


def _sent_dtypes(
    formats: Mapping[str, MixedPrecisionPolicy],
    dtype_of: Mapping[str, torch.dtype | None],
    replicated: Iterable[nn.Parameter],
) -> set[torch.dtype]:
    """Return the dtypes in which gradients of units and of replicated parameters are reduced."""
    trained = {name: each for name, each in formats.items() if dtype_of[name] is not None}
    units = {reduce_dtype(each, dtype_of[name]) for name, each in trained.items()}
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


def hollow_model(
    model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device, policy: PrecisionPolicy
) -> Recording:
    """Take the values of a lazy model, or of one on the host, out of it, and move what is left to the device.

    Args:
        model: The model; its lazy tensors, or its parameters, become meta tensors.
        optimizers: Its optimizers.
        device: Where the model will run.
        policy: Sets the dtype of trained parameters.

    Collective: every rank of the world, if the model has tensors with values.
    """
    recording = take_recording(model)
    for optimizer in optimizers:
        rebind(optimizer, recording.replaced)
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001 - as `Module.to` does
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))  # noqa: SLF001
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            parameter.data = parameter.data.to(device)
    send_first(each.data for each in (*model.parameters(), *model.buffers()) if each.device.type != "meta")
    dtype_of = stored_dtypes(model, policy)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype_of(parameter))
    return recording


def fill_model(
    model: nn.Module,
    recording: Recording,
    units: Iterable[FSDPModule],
    device: torch.device,
    policy: PrecisionPolicy,
    *,
    offload: bool,
) -> None:
    """Fill a sharded model: this rank's shards of sharded parameters, and all of the other tensors.

    Args:
        model: The model, sharded.
        recording: Computes its values.
        units: What `shard_model` returned.
        device: Where the model runs.
        policy: Precision of the run.
        offload: Keep shards in host memory.

    Raises:
        LazyInitError: If files with values are missing, or have changed.

    Collective: every rank of the world.
    """
    home = torch.device("cpu") if offload else device
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor) and local_of(parameter).is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = _with_memory(parameter, home)
                module.register_parameter(name, made[id(parameter)])
    take_parameters(units)
    shards = [
        shard
        for path, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
        for shard in dtensor_shards(path, None, parameter)
    ]
    with raised_on_all("boost", device):
        recording.fill(shards, device)
    # Replicated tensors were filled in the dtype of their construction.
    dtype_of = stored_dtypes(model, policy)
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(dtype_of(tensor))


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a sharded parameter like a meta one, with uninitialized memory."""
    # Not `DTensor.from_local`, which moves what is offloaded to the device of the mesh.
    return nn.Parameter(torch.empty_like(parameter.detach(), device=device), requires_grad=parameter.requires_grad)
