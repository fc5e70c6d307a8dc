"""Spreading a model's experts over ranks, in place: local experts, and forwards that exchange tokens.

Modules stay the user's own objects, under their own names, and parameters keep their identity, as under tensor
parallelism. Parameters of a module of experts that don't have one part for each expert stay whole.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.expert_parallel.exchange import combine, dispatch, find_route, without_rows
from booster_hybrid.modules import ModuleNames, ModulePatches, inner_model
from booster_hybrid.policy.base import matches
from booster_hybrid.tensor_parallel.adapters import parameter_wrappers
from booster_hybrid.tensor_parallel.split import Split
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.policy.base import ExpertRule


_ARGUMENTS = 3
"""Hidden states, the experts that each token chooses, and their weights."""


class ExpertsForward:
    """Sends tokens to their experts, lets the module's own forward run there, and brings the results back.

    The module is called with rows of one choice each, and counts its experts from 0. Outputs travel in the format of
    the hidden states.

    Args:
        module: The experts that are here.
        name: What errors call it.
        num_experts: Number of experts on all ranks.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, name: str, num_experts: int, group: RankGroup) -> None:
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)
        self._module, self._name, self._num_experts, self._group = module, name, num_experts, group

    @outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of each token's experts, weighted and added up.

        Raises:
            ConfigError: If it is called otherwise than by hidden states, indices and weights.

        Collective: the expert parallel ranks.
        """
        given = self._signature.bind(*args, **kwargs).args
        if len(given) != _ARGUMENTS or given[0].dim() != given[1].dim() or given[1].shape != given[2].shape:
            shapes = ", ".join(str(tuple(each.shape)) if hasattr(each, "shape") else repr(each) for each in given)
            msg = (
                f"The experts '{self._name}' were called with {shapes}. Expert parallelism needs hidden states "
                "(tokens, width), indices (tokens, top_k) and weights (tokens, top_k). Use `ep_size=1` for this model."
            )
            raise ConfigError(msg)
        hidden, index, weights = given
        route = find_route(index, self._num_experts, self._group)
        rows, of_rows = dispatch(route, self._group, hidden, weights)
        if rows.shape[0]:
            results = self._forward(rows, route.local_experts.unsqueeze(1), of_rows).to(rows.dtype)
        else:
            adapted = [getattr(self._module, name) for name in getattr(self._module, "parametrizations", ())]
            results = without_rows(rows, of_rows, [*self._module.parameters(), *adapted])
        return combine(results, hidden.shape[0], route, self._group)


class EveryTokenForward(ExpertsForward):
    """The same for experts that are called with every token, and with zeros for those that have not chosen an expert.

    Rows of zeros stay where they are. The rows of each expert that is here are filled up with zeros to as many as the
    one with the most has.
    """

    @outside_of_graphs
    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the output of every token's row.

        Args:
            hidden: Shape ``(experts * tokens, width)``.

        Raises:
            ConfigError: If it has another shape.

        Collective: the expert parallel ranks.
        """
        if hidden.dim() != 2 or hidden.shape[0] % self._num_experts:
            msg = (
                f"The experts '{self._name}' were called with {tuple(hidden.shape)}. Expert parallelism needs hidden "
                f"states of every token for each of {self._num_experts} experts. Use `ep_size=1` for this model."
            )
            raise ConfigError(msg)
        experts = torch.arange(self._num_experts, device=hidden.device)
        experts = experts.repeat_interleave(hidden.shape[0] // self._num_experts)
        chosen = experts.masked_fill(~hidden.detach().any(-1), self._num_experts)
        route = find_route(chosen.unsqueeze(1), self._num_experts, self._group)
        (rows,) = dispatch(route, self._group, hidden)
        counts = torch.bincount(route.local_experts, minlength=self._num_experts // self._group.size)
        most = max(route.most_rows, 1)  # one row of zeros keeps experts without rows in the graph
        by_expert = torch.sort(route.local_experts, stable=True).indices
        begins = torch.cumsum(counts, 0) - counts
        own = torch.arange(len(by_expert), device=hidden.device)
        sorted_experts = route.local_experts[by_expert]
        places = torch.empty_like(by_expert)
        places[by_expert] = sorted_experts * most + own - begins[sorted_experts]
        filled = rows.new_zeros((len(counts) * most, rows.shape[1])).index_copy(0, places, rows)
        results = self._forward(filled).to(rows.dtype).index_select(0, places)
        return combine(results, hidden.shape[0], route, self._group)


@dataclass(frozen=True)
class ExpertsModule:
    """A module of experts that can be spread.

    Args:
        name: Its name in the model.
        module: The module.
        num_experts: Number of its experts.
        parameters: Those of its parameters that have a part for each expert, by name within the module.
        counts: Its attributes that count the experts.
        takes_every_token: See `ExpertRule`.
        wrappers: peft's around it, each with the adapters of one parameter.
    """

    name: str
    module: nn.Module
    num_experts: int
    parameters: Mapping[str, nn.Parameter]
    counts: tuple[str, ...]
    takes_every_token: bool
    wrappers: tuple[Any, ...] = ()

    def spread_parameters(self) -> dict[int, str]:
        """Return the names of the parameters of which each rank gets a part, those of adapters too, by ``id``."""
        found = {id(parameter): f"{self.name}.{name}" for name, parameter in self.parameters.items()}
        for wrapper in self.wrappers:
            for each in (*wrapper.lora_A.values(), *wrapper.lora_B.values()):
                found[id(each.weight)] = f"{self.name}.{wrapper.parameter_name}, adapted"
        return found


def find_experts(model: nn.Module, rules: Sequence[ExpertRule], size: int) -> list[ExpertsModule]:
    """Return the modules of experts that rules name.

    Args:
        model: The user's model, whole.
        rules: Which modules they are.
        size: Number of ranks to spread them over.

    Raises:
        ConfigError: If there are none, or one can't be spread: it has adapters, its parameters don't have a part for
            each expert, or the ranks do not divide their number.
    """
    model = inner_model(model)
    names = ModuleNames(model)
    base = getattr(model, "base_model_prefix", "")
    found: dict[int, ExpertsModule] = {}
    for rule in rules:
        patterns = (rule.pattern, f"{base}.{rule.pattern}") if base else (rule.pattern,)
        for name, module in names.modules.items():
            if any(matches(pattern, names.in_rules(name)) for pattern in patterns):
                described = _described(name, module, rule, size)
                found.setdefault(id(module), replace(described, wrappers=_wrappers(names, described, size)))
    if not found:
        listed = ", ".join(repr(rule.pattern) for rule in rules) or f"none are known for this class{_advice(model)}"
        msg = (
            f"`ep_size={size}` spreads experts over ranks, and {type(model).__name__} has no modules of experts that "
            f"are named ({listed}). Leave it out, or name them in `custom_policy=ShardingPolicy(experts=(ExpertRule("
            "'blocks.*.experts'),))`; see docs/sharding-policies.md."
        )
        raise ConfigError(msg)
    return list(found.values())


def _advice(model: nn.Module) -> str:
    """Return what to do about a class of transformers without a plan, for a message."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return ""
    if getattr(transformers.MixtralConfig, "base_model_ep_plan", None) is not None:  # one of those with a plan
        return ""
    return f": transformers {transformers.__version__} has no plan for its experts; most families have one from 5.13 on"


def spread_experts(
    model: nn.Module, experts: Sequence[ExpertsModule], group: RankGroup
) -> tuple[dict[str, Split], set[int]]:
    """Keep this rank's experts, in place.

    Args:
        model: The user's model.
        experts: As `find_experts` returns them.
        group: The ranks to spread them over.

    Returns:
        For each parameter that is cut, by name, which experts are here, tied ones under each name; and all of them, by
        ``id``.
    """
    names_of = ModuleNames(inner_model(model)).names_of
    splits: dict[str, Split] = {}
    held: set[int] = set()
    for each in experts:
        share = each.num_experts // group.size
        own = [
            (parameter, Split(tuple(parameter.shape), 0, ((group.rank * share, (group.rank + 1) * share),)))
            for parameter in dict.fromkeys(each.parameters.values())
            if id(parameter) not in held  # tied
        ]
        for parameter, split in (*own, *_splits_of_adapters(each, group)):
            parameter.data = split.take(parameter.data)
            held.add(id(parameter))
            splits.update(dict.fromkeys(names_of[id(parameter)], split))
        install_experts(each, group, ModulePatches(), each.num_experts)
    return splits, held


def _splits_of_adapters(experts: ExpertsModule, group: RankGroup) -> Iterator[tuple[nn.Parameter, Split]]:
    """Yield the adapters' matrices of the experts' parameters, and which part of each is this rank's.

    peft stacks the experts' matrices in one: as the slower index of the first one's rows, and as the faster index of
    the second one's columns.
    """
    number, share = experts.num_experts, experts.num_experts // group.size
    first = group.rank * share
    for wrapper in experts.wrappers:
        vars(wrapper)["num_experts"] = share
        for each in wrapper.lora_A.values():
            rank = each.weight.shape[0] // number
            each.out_features //= group.size
            yield each.weight, Split(tuple(each.weight.shape), 0, ((first * rank, (first + share) * rank),))
        for each in wrapper.lora_B.values():
            starts = range(first, each.weight.shape[1], number)
            each.in_features //= group.size
            yield each.weight, Split(tuple(each.weight.shape), 1, tuple((start, start + share) for start in starts))


def install_experts(experts: ExpertsModule, group: RankGroup, changes: ModulePatches, num_experts: int) -> None:
    """Let a module of experts exchange tokens with the other ranks; its parameters keep their values.

    Args:
        experts: The module.
        group: The ranks.
        changes: Notes what is replaced.
        num_experts: Number of experts on all ranks.
    """
    module = experts.module
    for attribute in experts.counts:
        changes.attribute(module, attribute, num_experts // group.size)
    kind = EveryTokenForward if experts.takes_every_token else ExpertsForward
    changes.forward(module, kind(module, experts.name, num_experts, group))


def _wrappers(names: ModuleNames, experts: ExpertsModule, size: int) -> tuple[Any, ...]:
    """Return peft's wrappers of the experts' parameters.

    Raises:
        ConfigError: If there is something else of peft's.
    """
    name, outer = experts.name, names.outermost[experts.name]
    wrappers = tuple(parameter_wrappers(outer))
    inner = wrappers[-1].base_layer if wrappers else outer
    is_spread = all(wrapper.parameter_name in experts.parameters for wrapper in wrappers)
    is_adapted = any(each.startswith(f"{name}.") for each in names.adapted)
    if is_adapted or not is_spread or inner is not experts.module or type(inner).__module__.startswith("peft."):
        msg = (
            f"The experts '{name}' have adapters that `ep_size={size}` can't spread: those of stacked parameters can, "
            f"by `LoraConfig(target_parameters=[...])`. Leave '{name}' out of the adapters' `target_modules`, or use "
            "`ep_size=1`."
        )
        raise ConfigError(msg)
    return wrappers


def _described(name: str, module: nn.Module, rule: ExpertRule, size: int) -> ExpertsModule:
    """Return a module of experts.

    Raises:
        ConfigError: If it can't be spread.
    """
    own = dict(module.named_parameters(recurse=False))
    missing = [each for each in rule.parameters if each not in own]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not own or missing:
        lacks = f"it has no parameter '{missing[0]}' of its own" if missing and own else "it has no parameters itself"
        msg = (
            f"The experts '{name}' ({type(module).__name__}) can't be spread over `ep_size={size}` ranks: {lacks}. "
            "Experts that are modules each have to be one module, with parameters of shape (experts, ...) and "
            "`forward(hidden_states, top_k_index, top_k_weights)`, as those of transformers 5."
        )
        raise ConfigError(msg)
    parameters = {each: own[each] for each in rule.parameters or own}
    numbers = {each: parameter.shape[0] if parameter.dim() > 1 else 0 for each, parameter in parameters.items()}
    if len(set(numbers.values())) > 1 or 0 in numbers.values():
        shapes = ", ".join(f"'{each}' {tuple(parameter.shape)}" for each, parameter in parameters.items())
        msg = (
            f"The parameters of '{name}' must have the experts as their first of two dimensions or more; got {shapes}. "
            "Name those that do in `ExpertRule(parameters=...)`; others stay whole."
        )
        raise ConfigError(msg)
    num_experts = next(iter(numbers.values()))
    if num_experts % size:
        divisors = ", ".join(str(each) for each in range(1, num_experts + 1) if num_experts % each == 0)
        msg = f"`ep_size={size}` does not divide the {num_experts} experts of '{name}'. Use one of {divisors}."
        raise ConfigError(msg)
    counts = tuple(each for each in rule.counts if vars(module).get(each) == num_experts)
    return ExpertsModule(name, module, num_experts, parameters, counts, rule.takes_every_token)
