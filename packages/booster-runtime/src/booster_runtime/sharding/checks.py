"""What is refused: models that ranks would train apart, and gradients that nobody would reduce or step with.

Frozen parameters are watched too: a hook costs nothing until its parameter has been unfrozen and gets a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from booster_core.errors import ConfigError, GradientError
from booster_core.state import NamedTensors
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_OPTIMIZER = (
    "but the model was boosted without an optimizer, so that nothing averages gradients over the ranks and each would "
    "train a model of its own. Pass the optimizer to `boost` together with the model. To evaluate or generate, use "
    "`torch.no_grad()`, or freeze the model with `model.requires_grad_(False)`."
)
_FROZEN = (
    "but it was frozen at `boost` and the optimizer does not hold it, so that nothing averages its gradients over the "
    "ranks. Unfreeze it before `boost` and make the optimizer with it, add it to the optimizer that `boost` returned "
    "with `optimizer.add_param_group`, or keep it frozen."
)


def refuse_composed(model: nn.Module) -> None:
    """Check that each parameter is one tensor, whose memory can be sent and laid out.

    Raises:
        ConfigError: Naming one that is made of others, as torchao's quantised weights are.
    """
    for name, parameter in model.named_parameters():
        if hasattr(type(parameter), "__tensor_flatten__"):  # torch's protocol of such classes
            msg = (
                f"Parameter '{name}' is a `{type(parameter).__name__}`, made of several tensors, which can't be "
                "sent to other ranks as it is. Train it without a plugin, on one device, or keep the base of adapters "
                "in few bits by `booster.enable_lora(..., quantize=True)`."
            )
            raise ConfigError(msg)


def check_distinct_memory(model: nn.Module) -> None:
    """Check that no trained parameter begins at the same place in memory as another one, lazy ones included.

    Sharding would untie them without a word.

    Frozen ones that share theirs are equal forever, tied or not.

    Args:
        model: The user's model, before anything of it is moved.

    Raises:
        ConfigError: Naming two that do, or one that `refuse_composed` refuses.
    """
    refuse_composed(model)
    found: dict[object, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        other_name, other = found.setdefault(_place_of(parameter), (name, parameter))
        if other is not parameter and (other.requires_grad or parameter.requires_grad):
            msg = (
                f"Parameters '{other_name}' and '{name}' are two objects over the same memory. Tie them by assigning "
                "one Parameter to both modules; if they are adapters of tied embeddings (`ensure_weight_tying`), train "
                "the embedding by `modules_to_save` of the LoraConfig instead."
            )
            raise ConfigError(msg)


def _place_of(parameter: nn.Parameter) -> object:
    # Of a lazy tensor, the meta tensor of its geometry. Not by its class: `booster_runtime.lazy` uses this package.
    tensor = getattr(parameter, "lazy_inner", parameter)
    storage = tensor.untyped_storage()
    # A tensor of meta has no address, but its storage is an object of its own.
    begin = storage._cdata if tensor.device.type == "meta" else storage.data_ptr()  # noqa: SLF001 - what identifies it
    return tensor.device, begin + tensor.storage_offset() * tensor.element_size()


def refuse_renormalized(model: nn.Module) -> None:
    """Check that no embedding renormalizes the rows that it looks up.

    ``max_norm`` writes to these rows in each forward. Ranks look up rows of their own samples, so replicas would
    differ, and a gathered table would lose the change.

    Raises:
        ConfigError: Naming an embedding with ``max_norm``.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            msg = (
                f"Embedding '{name}' has `max_norm={module.max_norm:g}`: each forward changes the rows that this rank "
                "looks up, so that ranks would train different models. Leave `max_norm` out, and normalize the rows "
                "that were looked up, or the whole table after `optimizer.step()`."
            )
            raise ConfigError(msg)


def refuse_all_gradients(model: nn.Module) -> None:
    """Raise at the first gradient of any of a model's parameters, because there is no optimizer to step with it.

    Raises:
        GradientError: In backward, naming the parameter.
    """
    names = NamedTensors.of(model).name_of
    for parameter in model.parameters():
        refuse_gradient(parameter, names[id(parameter)], _NO_OPTIMIZER)


def without_optimizer(name: str) -> GradientError:
    """Return the error for a parameter's gradient in a model that was boosted without its optimizer."""
    return GradientError(f"Parameter '{name}' got a gradient, {_NO_OPTIMIZER}")


def refuse_gradient(parameter: nn.Parameter, name: str, reason: str = _FROZEN) -> Any:
    """Raise at the first gradient of a parameter, until the handle that this returns is removed.

    Args:
        parameter: The parameter; frozen ones stay so.
        name: Its name, for the message.
        reason: The end of a sentence that begins with what happened.

    Returns:
        A handle, or ``None`` for a parameter that can't have gradients.

    Raises:
        GradientError: In backward, naming the parameter.
    """
    if parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex()):
        return None

    def refuse(_: nn.Parameter) -> None:
        msg = f"Parameter '{name}' got a gradient, {reason}"
        raise GradientError(msg)

    is_frozen = not parameter.requires_grad
    if is_frozen:  # torch takes hooks of what requires a gradient only, and keeps them when that ends
        parameter.requires_grad = True
    handle = parameter.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
    if is_frozen:
        parameter.requires_grad = False
    return handle


def raise_for_unused(unused: Sequence[str]) -> None:
    """Raise on every rank if parameters took no part in backward on any.

    Args:
        unused: Names of this rank's.

    Raises:
        GradientError: Naming them for each rank.

    Collective: every rank of the world.
    """
    every = collectives.all_gather_object(unused)
    if any(every):
        listed = "; ".join(
            f"rank {rank}: {', '.join(map(repr, names[:10]))}{', ...' if len(names) > 10 else ''}"
            for rank, names in enumerate(every)
            if names
        )
        msg = (
            f"Parameters took no part in backward, which `unused='raise'` forbids. {listed}. Freeze them, leave "
            "them out of the optimizer, or pass `unused='zero'`."
        )
        raise GradientError(msg)


def not_optimized(name: str) -> ConfigError:
    """Return the error for a gradient that the boosted optimizer does not step with."""
    return ConfigError(
        f"The gradient of '{name}' can't be set: the boosted optimizer does not hold the parameter. Pass the optimizer "
        "with the model to `boost`, and list the parameter in it."
    )
