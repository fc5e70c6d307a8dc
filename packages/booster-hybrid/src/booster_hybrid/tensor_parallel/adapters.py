"""Low-rank adapters on split layers: each adapter is split as its layer is.

An adapter adds B A x to a layer's output for x. On a column-parallel layer, whose input is whole, A is whole and B has
the rows of this rank's outputs; the gradient of A x, a few numbers for each token, is summed over ranks. On a
row-parallel layer, A has the columns of this rank's inputs, A x is summed, and B is whole; an embedding's adapter is
looked up as the embedding is. If a layer's inputs and outputs are whole, so is its adapter, and nothing is sent.

An adapter of a stacked parameter of experts (peft's ``target_parameters``) adds a product to the parameter itself: what
has the dimension that is split is split likewise, and the gradient of the other factor is summed over ranks.

The layers stay peft's own, and so does what they compute; see `booster_runtime.lora` for how a model gets them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from booster_core.errors import ConfigError
from booster_hybrid.modules import ModulePatches
from booster_hybrid.tensor_parallel.collectives import OutputSum, sum_where_used
from booster_hybrid.tensor_parallel.linear import ColumnForward, RowForward
from booster_hybrid.tensor_parallel.vocabulary import VocabularyForward, looked_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.modules import ModuleNames
    from booster_hybrid.tensor_parallel.split import Split


def _looked_up(
    embed: Callable[..., Tensor],
    first: int,
    group: RankGroup,
    tokens: Tensor,
    weight: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return the rows of tokens in an embedding's adapter, of which some are here."""
    return looked_up(tokens, first, weight.shape[0], lambda local: embed(local, weight, *args, **kwargs), group)


def check_wrappers(names: ModuleNames, targets: Iterable[str], size: int) -> None:
    """Refuse what peft put in the place of a layer that the policy splits, with the layer somewhere inside.

    Args:
        names: The model's modules.
        targets: Names of those that the policy splits.
        size: Number of tensor parallel ranks.

    Raises:
        ConfigError: If there is such a thing.
    """
    for name in targets:
        module = names.modules.get(name)
        if type(module).__module__.startswith("peft."):
            _refuse(name, _typed(module), size)


def split_adapters(
    names: ModuleNames,
    splits: Mapping[str, Split],
    summed_names: set[str],
    group: RankGroup,
    keep: Callable[[nn.Parameter, Split], None],
    changes: ModulePatches,
) -> list[OutputSum]:
    """Split the adapters of layers that have been split, in place.

    Args:
        names: The model's modules.
        splits: The split parameters, by name; ``keep`` adds those of adapters.
        summed_names: Names of the parameters whose gradients are summed; those of adapters are added.
        group: The tensor parallel ranks.
        keep: Notes which part of a parameter is this rank's.
        changes: Notes what is replaced.

    Returns:
        What is sent for them.

    Raises:
        ConfigError: If a layer that is split has an adapter that can't be.
    """
    sums: list[OutputSum] = []
    for name, layer in {id(layer): (name, layer) for name, layer in names.adapted.items()}.values():
        base = names.modules[name]
        held = {each for parameter in base.parameters() for each in names.names_of[id(parameter)]}
        wrappers = parameter_wrappers(layer)
        if wrappers and not held.isdisjoint(splits):
            for wrapper in wrappers:
                _split_stacked(name, wrapper, splits.get(f"{name}.{wrapper.parameter_name}"), group, keep, changes)
        elif not held.isdisjoint(splits):
            _check(layer, base, name, group.size)
            sums += _split_one(name, layer, base, splits[f"{name}.weight"], group, keep, changes)
        elif held and held <= summed_names:
            _sum_gradients(layer, base, names, summed_names, group, changes)
    return sums


def parameter_wrappers(layer: Any) -> list[Any]:
    """Return peft's wrappers of a module of which each adapts one parameter, the outermost first; none for others."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.lora.layer import ParamWrapper

    found = []
    while isinstance(layer, ParamWrapper):
        found.append(layer)
        layer = layer.base_layer
    return found


@contextlib.contextmanager
def without_stacked_adapters(model: nn.Module) -> Iterator[None]:
    """Leave out the adapters of stacked parameters: peft changes the class of the module, which is one for all ranks.

    Args:
        model: A model that is run for all ranks within this process.
    """
    changes = ModulePatches()
    try:
        for module in model.modules():
            if parameter_wrappers(module):
                changes.attribute(module, "_disable_adapters", value=True)
        yield
    finally:
        changes.undo()


def _split_stacked(
    name: str,
    wrapper: Any,
    split: Split | None,
    group: RankGroup,
    keep: Callable[[nn.Parameter, Split], None],
    changes: ModulePatches,
) -> None:
    """Split the adapters of a parameter of shape ``(experts, outputs, inputs)``, or ``(experts, inputs, outputs)``."""
    whole = f"{name}.{wrapper.parameter_name}"
    if split is None or len(split.global_shape) != 3 or split.dim == 0:
        _refuse(whole, f"{_typed(wrapper)}, which is whole or no stack of matrices", group.size)
    # How peft multiplies them; see its `ParamWrapper.get_delta_weight`.
    of_outputs = (split.dim == 1) == bool(wrapper._did_swap_in_out_features)  # noqa: SLF001 - told nowhere else
    cut, other = (wrapper.lora_B, wrapper.lora_A) if of_outputs else (wrapper.lora_A, wrapper.lora_B)
    summed = {id(each.weight): None for each in other.values()}
    for each in cut.values():
        keep(each.weight, _like(split, each.weight, 0 if of_outputs else 1, whole))
        changes.attribute(each, "out_features" if of_outputs else "in_features", split.local_shape[split.dim])
    sum_where_used(wrapper, summed, group, changes, [*other.values()])


def _split_one(
    name: str,
    layer: Any,
    base: nn.Module,
    split: Split,
    group: RankGroup,
    keep: Callable[[nn.Parameter, Split], None],
    changes: ModulePatches,
) -> list[OutputSum]:
    """Split the adapters of one layer."""
    changes.attribute(
        layer, "_mixed_batch_forward", _refuse_mixed_batches
    )  # where peft takes a batch apart by adapters
    forward: Any = vars(base).get("forward")
    if isinstance(forward, VocabularyForward):
        for table in layer.lora_embedding_A.values():
            keep(table, _like(split, table, 1, name))
        # peft gives it no other name.
        lookup = functools.partial(_looked_up, layer._embed, split.ranges[0][0], group)  # noqa: SLF001
        changes.attribute(layer, "_embed", lookup)
        return []
    pairs = [(layer.lora_A[adapter], layer.lora_B[adapter]) for adapter in layer.lora_A]
    if isinstance(forward, ColumnForward) and forward.gathers is None:
        for _, last in pairs:
            changes.attribute(last, "out_features", split.local_shape[split.dim])
        for parameter in layer.lora_B.parameters():
            keep(parameter, _like(split, parameter, 0, name))
        is_partial = False
    elif isinstance(forward, RowForward) and forward.splits is None:
        for first, _ in pairs:
            keep(first.weight, _like(split, first.weight, 1, name))
            changes.attribute(first, "in_features", split.local_shape[split.dim])
        is_partial = True
    else:
        return []
    return [OutputSum(first, group, changes, is_partial=is_partial) for first, _ in pairs]


def _like(split: Split, parameter: nn.Parameter, dim: int, name: str) -> Split:
    """Return how a parameter is cut along a dimension that is that of a layer's split weight."""
    shape = tuple(parameter.shape)
    if shape[dim] != split.global_shape[split.dim]:
        msg = (
            f"An adapter of '{name}' has a parameter of shape {shape}, whose dimension {dim} is not the "
            f"{split.global_shape[split.dim]} of the layer that is split. Use `tp_size=1`."
        )
        raise ConfigError(msg)
    return replace(split, global_shape=shape, dim=dim)


def _sum_gradients(
    layer: nn.Module,
    base: nn.Module,
    names: ModuleNames,
    summed_names: set[str],
    group: RankGroup,
    changes: ModulePatches,
) -> None:
    """Sum the gradients of adapters of a layer that is whole and works on split activations."""
    inside = {id(parameter) for parameter in base.parameters()}
    new = [
        id(parameter)
        for parameter in layer.parameters()
        if id(parameter) not in inside and summed_names.isdisjoint(names.names_of[id(parameter)])
    ]
    sum_where_used(layer, dict.fromkeys(new), group, changes)
    for each in new:
        summed_names.update(names.names_of[each])


def _check(layer: Any, base: nn.Module, name: str, size: int) -> None:
    """Refuse what a part of a layer can't have."""
    from peft.tuners import lora

    if type(layer) not in (lora.Linear, lora.Embedding):
        _refuse(name, _typed(layer), size)
    if not isinstance(vars(base).get("forward"), (ColumnForward, RowForward, VocabularyForward)):
        _refuse(name, f"on a {type(base).__name__}, whose parameters are split and whose forward is not", size)
    if any(layer.use_dora.values()):
        _refuse(name, "with `use_dora=True`, which takes norms of its whole weight", size)
    variants: dict[str, object] = getattr(layer, "lora_variant", {})
    for variant in variants.values():
        _refuse(name, f"of peft's variant {type(variant).__name__}", size)


def _typed(layer: object) -> str:
    return f"of peft's type {type(layer).__module__.removeprefix('peft.tuners.')}.{type(layer).__name__}"


def _refuse(name: str, what: str, size: int) -> NoReturn:
    msg = (
        f"'{name}' has adapters {what}; `tp_size={size}` splits that layer, and only plain low-rank adapters of linear "
        "layers and embeddings can be split with theirs. Leave the layer out of "
        "`target_modules` (or `target_parameters`, `trainable_token_indices`), choose plain LoRA, or use `tp_size=1`."
    )
    raise ConfigError(msg)


def _refuse_mixed_batches(*_: Any, **__: Any) -> NoReturn:
    msg = (
        "`adapter_names` takes each sample through an adapter of its own, in an order that differs from rank to rank, "
        "which layers that `tp_size` splits can't follow. Call `set_adapter` and run the samples of one adapter "
        "together, or use `tp_size=1`."
    )
    raise ConfigError(msg)
