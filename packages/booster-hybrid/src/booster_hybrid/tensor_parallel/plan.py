"""`TensorPlan`: what a policy's rules of tensor parallelism change in a model, installed for one rank, for good or not.

Modules stay the user's own objects, under their own names; those that have to communicate get another ``forward``, and
then their weights become this rank's part. Parameters keep their identity, so that the optimizer and ties keep their
hold. Modules around split layers are told how wide their input is here, and get their part of tensors with all heads.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_hybrid.modules import ModuleNames, ModulePatches, inner_model
from booster_hybrid.policy.base import ModuleRule, ShardingPolicy, Style, matches
from booster_hybrid.policy.mixers import MIXERS, lengths_of_blocks
from booster_hybrid.random_streams import SplitStreams
from booster_hybrid.split_logits import SplitLogits, split_logits
from booster_hybrid.tensor_parallel.adapters import check_wrappers, split_adapters
from booster_hybrid.tensor_parallel.collectives import OutputSum, enter, gather_last, leave, sum_where_used
from booster_hybrid.tensor_parallel.linear import ColumnForward, ColumnSiblings, RowForward, is_transposed
from booster_hybrid.tensor_parallel.split import Block, Split, cut_groups, split_dimension
from booster_hybrid.tensor_parallel.vocabulary import ByVocabulary, VocabularyForward

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import nn

    from booster_hybrid.mesh import RankGroup


def narrow_input(module: nn.Module, width: int, here: int, changes: ModulePatches) -> None:
    """Let a module see its first tensor as wide as what is here; split layers in it `read_real`.

    The module takes widths from its input, as in ``B, T, C = x.size()``, of what is split by then. What it gets has no
    values: whoever computes with it gets no numbers, which the proof at `boost` finds. A hook that the user registers
    on the module after `boost` sees it as well.

    Args:
        module: The module.
        width: Length of the tensor's last dimension.
        here: What the module is told of it.
        changes: Notes the hook.
    """

    def narrow(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [*args, *kwargs.values()]
        place = next((index for index, each in enumerate(given) if isinstance(each, Tensor)), None)
        if place is not None and given[place].shape[-1:] == (width,):
            real: Tensor = given[place]
            narrowed: Any = real.new_full((), math.nan).expand(*real.shape[:-1], here)
            narrowed.booster_real = real  # a list of real ones would not know which a layer in a checkpoint reads again
            given[place] = narrowed
        return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

    changes.hook(module.register_forward_pre_hook(narrow, with_kwargs=True))


def read_real(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a layer the real tensor in place of the narrow one; a hook before its forward."""
    return tuple(getattr(each, "booster_real", each) for each in args)


class OwnHeads:
    """The forward of a part of a layer that mixes positions, with this rank's heads.

    Its buffers stay whole, as files have them, and are cut for each forward. In training some parts look for a kernel
    that computes all of them, with the weight of their last layer, whose results would not be summed: the part itself
    runs as if it were not training, which nothing else in it asks.

    Args:
        module: The part.
        splits: Which part of its buffers is used here, by name.
    """

    def __init__(self, module: nn.Module, splits: Mapping[str, Split]) -> None:
        self._module, self._splits = module, splits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        buffers, training = module._buffers, module.training  # noqa: SLF001 - `setattr` may register them anew
        whole = {name: buffers[name] for name in self._splits}
        try:
            module.training = False
            for name, split in self._splits.items():
                value = whole[name]
                buffers[name] = None if value is None else split.take(value)
            return type(module).forward(module, *args, **kwargs)
        finally:
            module.training = training
            buffers.update(whole)


def cut_arguments(
    module: nn.Module, names: Sequence[str], cuts: Sequence[tuple[int, int]], rank: int, changes: ModulePatches
) -> None:
    """Let a module be called with its rank's heads of some tensors, which come with all heads.

    Args:
        module: The module.
        names: The arguments; one that is ``None``, or has one head for all, stays.
        cuts: The half-open range of heads of each rank.
        rank: This rank.
        changes: Notes the hook.
    """
    positions = {name: index for index, name in enumerate(inspect.signature(module.forward).parameters)}
    num_heads = cuts[-1][1]

    def cut(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = list(args)
        for name in names:
            if name in kwargs:
                kwargs = {**kwargs, name: _own_heads(kwargs[name], num_heads, cuts[rank])}
            elif positions[name] < len(given):
                given[positions[name]] = _own_heads(given[positions[name]], num_heads, cuts[rank])
        return tuple(given), kwargs

    changes.hook(module.register_forward_pre_hook(cut, with_kwargs=True))


def _own_heads(value: Any, num_heads: int, own: tuple[int, int]) -> Any:
    """Return a range of the heads of a tensor of shape (samples, heads, ...) or (samples * heads, one, keys)."""
    if not isinstance(value, Tensor):
        return value
    first, last = own
    if value.dim() == 3:
        return value.view(-1, num_heads, *value.shape[1:])[:, first:last].flatten(0, 1)
    return value[:, first:last] if value.shape[1] == num_heads else value


_ALIGNMENT = 8
COLUMNS = (Style.COLUMN, Style.COLUMN_GATHER, Style.HEAD)
_OF_VOCABULARY = {Style.VOCABULARY, Style.HEAD}
ROWS = (Style.ROW, Style.ROW_SPLIT)


@dataclass
class TensorParallelModel:
    """What has become of a model's parameters.

    Attributes:
        splits: For each split parameter, by name, which part of it is here. Tied parameters appear under each name.
        summed: Names of the parameters that are whole on every rank, and whose gradients are summed over ranks.
        sums: What is summed of low-rank adapters of split layers, and of outputs that each rank's own heads use.
        streams: Lets ranks draw alike what they compute alike; ``None`` before that is asked for.
    """

    splits: dict[str, Split] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    sums: list[OutputSum] = field(default_factory=list)
    streams: SplitStreams | None = None


def parallelize(
    model: nn.Module, policy: ShardingPolicy, group: RankGroup, *, parallel_output: bool = True
) -> TensorParallelModel:
    """Split a model's layers over ranks, in place.

    Args:
        model: The user's model, whole.
        policy: How its class is split.
        group: The tensor parallel ranks.
        parallel_output: Leave the logits split by vocabulary, as `SplitLogits`; ``False`` puts them together. So are
            those of a model that is compiled as a whole.

    Raises:
        ConfigError: If a rule names a module that the model lacks, or sizes can't be split over the ranks.
    """
    plan = TensorPlan(model, policy, group.size, parallel_output=parallel_output)
    split = plan.install(group, ModulePatches())
    split.streams = plan.separate_random_numbers(group)
    plan.cut_parameters(split)
    return split


class TensorPlan:
    """Which modules of a model tensor parallelism changes, and how; nothing is changed before `install`.

    Args:
        model: The user's model, whole.
        policy: How its class is split.
        size: Number of tensor parallel ranks.
        parallel_output: As for `parallelize`.

    Attributes:
        model: The model inside of what is around the whole of it; its names are the user's.
        policy: As above.
        size: As above.
        parallel_output: As above.
        names: Its modules.
        targets: What is changed: modules and parameters by name, each with the rule that holds for it.

    Raises:
        ConfigError: If a rule names a module that the model lacks, or one that can't be split.
    """

    def __init__(self, model: nn.Module, policy: ShardingPolicy, size: int, *, parallel_output: bool = True) -> None:
        self.model, self.policy, self.size, self.parallel_output = inner_model(model), policy, size, parallel_output
        self.names = ModuleNames(self.model)
        self._called: dict[str, list[str]] = defaultdict(list)
        for name in dict.fromkeys((*self.names.modules, *self.names.parameters)):
            self._called[self.names.in_rules(name)].append(name)
        self._counts: dict[tuple[str, str], int] = {}
        found: list[tuple[ModuleRule, str]] = []
        yielding: list[tuple[ModuleRule, str]] = []
        for rule in policy.rules:
            for name in self.matching(rule):
                yields = rule.yields and (self.count(rule.units, name) or 0) < size
                (yielding if yields else found).append((rule, name))
        self._check_splits_layers(found, yielding)
        check_wrappers(self.names, (name for _, name in found), size)
        self.targets: dict[str, ModuleRule] = {}
        for rule, name in found:
            if self.targets.setdefault(name, rule) is not rule:
                continue
            for counted in (rule.units, rule.groups, *rule.blocks):
                self.count(counted, name)  # before attributes that count heads are scaled
            if rule.style in (*COLUMNS, *ROWS):
                self._check_linear(name)
            elif rule.style is Style.VOCABULARY:
                self._check_embedding(name)

    def install(
        self, group: RankGroup, changes: ModulePatches, only: Collection[str] | None = None
    ) -> TensorParallelModel:
        """Let modules of the model work on a rank's part; parameters keep their values, see `cut_parameters`.

        Args:
            group: The ranks, as many as the plan is for.
            changes: Notes what is replaced.
            only: Names among `targets`; ``None`` for all.

        Raises:
            ConfigError: If sizes can't be split over the ranks.
        """
        targets = self.targets if only is None else {name: self.targets[name] for name in only}
        return _Installer(self, group, changes).run(targets)

    def cut_parameters(self, split: TensorParallelModel) -> None:
        """Replace the values of split parameters by those of this rank's part; identity and ties stay."""
        for parameter in self.model.parameters():
            names = self.names.names_of[id(parameter)]
            of_rank = next((split.splits[each] for each in names if each in split.splits), None)
            if of_rank is None:
                continue
            part = of_rank.take(parameter.data)
            # An accumulator of gradients that an earlier loss keeps alive knows the old shape; of another format it is
            # not used any more.
            other = torch.float32 if parameter.dtype == torch.float16 else torch.float16
            parameter.data = torch.empty(0, dtype=other, device=parameter.device)
            parameter.data = part

    def _check_splits_layers(self, found: list[tuple[ModuleRule, str]], yielding: list[tuple[ModuleRule, str]]) -> None:
        """Refuse a policy all of whose rules for layers are optional and match nothing: it is another model's."""
        asked = {rule.style for rule in self.policy.rules} - _OF_VOCABULARY
        if asked and asked.isdisjoint(rule.style for rule, _ in found):
            for rule, name in yielding:
                msg = (
                    f"The layers of {type(self.model).__name__} can't be split over {self.size} ranks: '{name}' has "
                    f"{rule.units} (groups of) heads, of which each rank needs one. Use a smaller `tp_size`, "
                    "`zero_stage=3`, or a `custom_policy=`."
                )
                raise ConfigError(msg)
            patterns = ", ".join(repr(rule.pattern) for rule in self.policy.rules[:4])
            msg = (
                f"The policy of {type(self.model).__name__} splits none of its layers: no name matches {patterns}, "
                "... Pass `custom_policy=` with rules for this model."
            )
            raise ConfigError(msg)

    def matching(self, rule: ModuleRule) -> list[str]:
        """Return the names of the modules and parameters that a rule is for.

        Args:
            rule: The rule.

        Raises:
            ConfigError: If there are none, and the rule is not optional.
        """
        base = getattr(self.model, "base_model_prefix", "")
        # Plans of transformers name modules as seen from the base model, or from the model with its head.
        patterns = (rule.pattern, f"{base}.{rule.pattern}") if base else (rule.pattern,)
        exact = "*" not in rule.pattern
        called = (
            patterns
            if exact
            else [each for each in self._called if any(matches(pattern, each) for pattern in patterns)]
        )
        targets = [name for each in called for name in self._called.get(each, ())]
        if not targets and not rule.is_optional:
            msg = (
                f"The policy of {type(self.model).__name__} names '{rule.pattern}', which the model does not have. "
                "Correct the policy, or mark the rule `is_optional`."
            )
            raise ConfigError(msg)
        return targets

    def _check_linear(self, name: str) -> None:
        """Refuse what has no matrix and vector of its own; whether a layer computes a linear map, the probe shows."""
        module: Any = self.names.modules.get(name)
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if getattr(weight, "ndim", 0) != 2 or getattr(bias, "ndim", 1) != 1:
            msg = (
                f"The policy of {type(self.model).__name__} splits '{name}' as a linear layer, but it is a "
                f"{type(module).__name__} without a weight of two dimensions and a bias of one, or none. Leave it "
                "whole, or give its parameters rules of their own."
            )
            raise ConfigError(msg)
        self._check_parameters(name, module)

    def _check_parameters(self, name: str, module: Any) -> None:
        """Refuse a layer that computes its weight or bias: a part of it can't be computed from a part."""
        own = module._parameters  # noqa: SLF001 - a parametrization is no part of `named_parameters`
        computed = [each for each in ("weight", "bias") if getattr(module, each, None) is not None and each not in own]
        if computed:
            msg = (
                f"The policy of {type(self.model).__name__} splits '{name}', whose `{computed[0]}` is no parameter of "
                "its own but computed from others, as by weight or spectral normalization or another parametrization. "
                "Leave the layer whole, or remove the parametrization before `boost`."
            )
            raise ConfigError(msg)

    def _check_embedding(self, name: str) -> None:
        """Refuse embeddings that look at more than the rows of the tokens that are here."""
        module: Any = self.names.modules[name]
        self._check_parameters(name, module)
        for option in ("scale_grad_by_freq", "max_norm"):
            if getattr(module, option, None):
                msg = (
                    f"The embedding '{name}' of {type(self.model).__name__} has `{option}={getattr(module, option)}`, "
                    "which depends on rows that other tensor parallel ranks hold or look up. Leave the option out, or "
                    "leave the embedding whole by a `custom_policy` without a rule for it."
                )
                raise ConfigError(msg)

    def count(self, what: str | int | None, name: str) -> int | None:
        """Return a number that a rule gives or names."""
        if not isinstance(what, str):
            return what
        if (name, what) not in self._counts:
            self._counts[name, what] = self._looked_up(what, name)
        return self._counts[name, what]

    def _looked_up(self, field_name: str, name: str) -> int:
        owner = self.names.in_rules(name).rpartition(".")[0]
        places: list[Any] = [self.names.modules[owner]]
        while True:  # the nearest configuration first: a composed model has one for each part
            config: Any = getattr(self.names.modules[owner], "config", None)
            places += [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
            if not owner:
                break
            owner = owner.rpartition(".")[0]
        for place in places:
            value = getattr(place, field_name, None)
            if isinstance(value, int):
                return value
        msg = (
            f"The policy of {type(self.model).__name__} counts the units of '{name}' by '{field_name}', which neither "
            "its parent module nor a configuration has as a number."
        )
        raise ConfigError(msg)

    def separate_random_numbers(self, group: RankGroup) -> SplitStreams:
        """Let ranks draw alike for what they compute alike, and apart for what they share out."""
        by_style: dict[Style, list[nn.Module]] = defaultdict(list)
        for name, rule in self.targets.items():
            if name in self.names.modules:
                by_style[rule.style].append(self.names.outermost[name])
        device = next(iter(self.names.parameters.values())).device
        return SplitStreams(by_style[Style.COLUMN], by_style[Style.ROW], group, device)


class _Installer:
    """Installs a plan for one rank."""

    def __init__(self, plan: TensorPlan, group: RankGroup, changes: ModulePatches) -> None:
        self._plan, self._group, self._changes = plan, group, changes
        self._model, self._names = plan.model, plan.names
        self._modules, self._parameters = plan.names.modules, plan.names.parameters
        self._names_of = plan.names.names_of
        self._done: dict[int, Split] = {}
        self._scaled: set[tuple[int, str]] = set()
        self._narrowed: set[nn.Module] = set()
        self._result = TensorParallelModel()

    def run(self, targets: Mapping[str, ModuleRule]) -> TensorParallelModel:
        columns: dict[tuple[int, bool], list[tuple[ModuleRule, str]]] = defaultdict(list)
        for name, rule in targets.items():
            if rule.style in COLUMNS:
                # Siblings are column-parallel layers of one parent; those that don't share are alone.
                parent = id(self._names.parent(name))
                key = (parent, True) if rule.shares_input else (id(self._modules[name]), False)
                columns[key].append((rule, name))
            else:
                self._apply(rule, name)
        for members in columns.values():
            self._apply_columns(members)
        self._result.sums += split_adapters(
            self._names, self._result.splits, self._result.summed, self._group, self._keep, self._changes
        )
        self._sum_shares()
        return self._result

    def _sum_shares(self) -> None:
        """Sum the gradients of what several ranks hold."""
        shared: dict[int, Split | None] = {key: split for key, split in self._done.items() if split.is_shared}
        if not shared:
            return
        for module in self._model.modules():
            forward = vars(module).get("forward")
            if isinstance(forward, ColumnForward):
                forward.siblings.share(module, shared)
            else:
                sum_where_used(module, shared, self._group, self._changes, [module])

    def _apply(self, rule: ModuleRule, name: str) -> None:
        if rule.style is Style.PARAMETER:
            parameter = self._parameters[name]
            self._cut(parameter, rule.dim % parameter.dim(), rule, name)
            self._scale(rule, name)
            return
        if rule.style is Style.SUMMED_GRADIENT:
            self._sum_gradients(name)
            return
        module = self._modules[name]
        if rule.style is Style.SUMMED_FEATURES:
            number = self._plan.count(rule.units, name)
            self._result.sums.append(OutputSum(module, self._group, self._changes, number=number))
        elif rule.style is Style.ARGUMENT:
            blocks = self._blocks(rule, name, 0)
            cut_arguments(module, rule.arguments, self._cuts(blocks[0]), self._group.rank, self._changes)
        elif rule.style in ROWS:
            self._apply_row(rule, name, module)
        elif rule.style is Style.MIXER:
            self._changes.forward(module, OwnHeads(module, self._own_buffers(rule, name, module)))
        elif rule.style is Style.VOCABULARY:
            self._apply_vocabulary(rule, name, module)
        else:
            self._changes.forward(module, _experts_forward(module.forward, self._group))

    def _apply_columns(self, members: list[tuple[ModuleRule, str]]) -> None:
        # Layers with other numbers of inputs read another tensor, as the projections of latent queries and keys do.
        by_input: dict[tuple[bool, int], list[tuple[ModuleRule, str]]] = defaultdict(list)
        for rule, name in members:
            module: Any = self._modules[name]
            transposed = is_transposed(module)
            by_input[transposed, module.weight.shape[0 if transposed else 1]].append((rule, name))
        for (transposed, _), alike in by_input.items():
            siblings = ColumnSiblings([self._modules[name] for _, name in alike], self._group)
            for rule, name in alike:
                module = self._modules[name]
                split = self._cut(module.weight, 1 if transposed else 0, rule, name)
                if module.bias is not None:
                    self._cut(module.bias, 0, rule, name)
                self._set_size(module, outputs=split.local_shape[split.dim])
                self._scale(rule, name)
                gathers = None
                if rule.style is Style.HEAD and self._plan.parallel_output:
                    self._keep_partition(self._names.outermost[name], self._lengths(split, rule, name))
                elif rule.style in (Style.COLUMN_GATHER, Style.HEAD):
                    gathers = self._lengths(split, rule, name)
                forward = ColumnForward(module, siblings, self._group, gathers)
                if rule.style in (Style.COLUMN_GATHER, Style.HEAD) and not transposed:
                    forward.vocabulary = ByVocabulary(self._lengths(split, rule, name), self._group)
                self._changes.forward(module, forward)

    def _keep_partition(self, head: nn.Module, sizes: list[int]) -> None:
        """Let a head's logits know which part of the vocabulary they are."""
        state, group = {"is_traced": False}, self._group  # hooks stay, and with `self` every parameter would

        def begin(_module: nn.Module, _args: Any) -> None:
            # Where the whole model is compiled, be it after `boost`, the compiler comes by here, and it takes the shape
            # of split logits for that of their memory.
            state["is_traced"] = torch.compiler.is_compiling()

        def mark(_module: nn.Module, _args: Any, logits: Tensor) -> Tensor:
            if state["is_traced"]:
                return gather_last(logits, sizes, group)
            # A loss that was computed in the place of logits, or those of a copy of the head that peft keeps inside.
            if not logits.dim() or isinstance(logits, SplitLogits):
                return logits
            return split_logits(logits, ByVocabulary(sizes, group))

        self._changes.hook(self._model.register_forward_pre_hook(begin))
        self._changes.hook(head.register_forward_hook(mark))

    def _apply_row(self, rule: ModuleRule, name: str, module: Any) -> None:
        dim = 0 if is_transposed(module) else 1
        split = self._cut(module.weight, dim, rule, name)
        self._set_size(module, inputs=split.local_shape[dim])
        self._scale(rule, name)
        splits = self._lengths(split, rule, name) if rule.style is Style.ROW_SPLIT else None
        self._changes.forward(module, RowForward(module, self._group, splits))

    def _own_buffers(self, rule: ModuleRule, name: str, module: nn.Module) -> dict[str, Split]:
        """Return which part of its buffers a part that mixes positions by heads uses."""
        found = {}
        for key, buffer in module.named_buffers(recurse=False):
            cut = MIXERS[type(module).__name__].cuts.get(key)
            if cut is not None:  # before attributes of the module are scaled, by the rules after this one
                lengths = lengths_of_blocks(module, cut, buffer.shape[cut.dim])
                blocks = self._blocks(replace(rule, lengths=lengths), name, 0)
                found[key] = split_dimension(
                    tuple(buffer.shape), cut.dim, blocks, rank=self._group.rank, size=self._group.size
                )
        return found

    def _apply_vocabulary(self, rule: ModuleRule, name: str, module: Any) -> None:
        split = self._cut(module.weight, 0, rule, name)
        (start, stop), num_rows = split.ranges[0], split.global_shape[0]
        padding: int | None = module.padding_idx
        self._changes.attribute(module, "num_embeddings", stop - start)
        if padding is not None:
            here = padding - start if start <= padding < stop else None
            self._changes.attribute(module, "padding_idx", here)
        self._changes.forward(module, VocabularyForward(module, start, num_rows, self._group))

    def _sum_gradients(self, name: str) -> None:
        parameter = self._parameters.get(name)
        reader = self._modules[name.rpartition(".")[0] if parameter is not None else name]
        held = [*reader.parameters()] if parameter is None else [parameter]
        sum_where_used(reader, dict.fromkeys(map(id, held)), self._group, self._changes)
        for each in held:
            self._result.summed.update(self._names_of[id(each)])

    def _cut(self, parameter: nn.Parameter, dim: int, rule: ModuleRule, name: str) -> Split:
        """Return which part of a parameter is this rank's; a tied one is cut once."""
        known = self._done.get(id(parameter))
        if known is not None:
            return known
        shape = tuple(parameter.shape)
        blocks = self._blocks(rule, name, shape[dim] // rule.num_blocks)
        try:
            split = split_dimension(shape, dim, blocks, rank=self._group.rank, size=self._group.size)
        except ConfigError as error:
            units = rule.units or " + ".join(map(str, rule.blocks)) or "its length"
            number = " + ".join(str(block.num_units) for block in (blocks if rule.blocks else blocks[:1]))
            msg = f"'{name}' of {type(self._model).__name__} ({units}={number}): {error}"
            raise ConfigError(msg) from None
        self._keep(parameter, split)
        return split

    def _keep(self, parameter: nn.Parameter, split: Split) -> None:
        """Note which part of a parameter is this rank's."""
        self._done[id(parameter)] = split
        for each in self._names_of[id(parameter)]:
            self._result.splits[each] = split

    def _lengths(self, split: Split, rule: ModuleRule, name: str) -> list[int]:
        """Return how much of a dimension in one block each rank has."""
        length = split.global_shape[split.dim]
        block, *others = self._blocks(rule, name, length)
        if others:
            msg = f"'{name}' of {type(self._model).__name__} is put together after it was split, which needs one block."
            raise ConfigError(msg)
        return [(stop - start) * (length // block.num_units) for start, stop in self._cuts(block)]

    def _cuts(self, block: Block) -> list[tuple[int, int]]:
        return cut_groups(block.num_units, block.num_groups, self._group.size, is_shared=block.is_shared)

    def _blocks(self, rule: ModuleRule, name: str, length: int) -> list[Block]:
        """Return what a dimension consists of whose blocks, if they are equal, have a length."""
        groups = self._plan.count(rule.groups, name)
        if rule.blocks:
            numbers = [self._plan.count(units, name) or 0 for units in rule.blocks]
            return [Block(number, groups or number, is_shared=index > 0) for index, number in enumerate(numbers)]
        number = self._plan.count(rule.units, name)
        if rule.lengths and number is not None:
            return [Block(number, groups or number, rule.is_shared, length) for length in rule.lengths]
        if number is None:
            # Kernels of grouped products want rows of 16 bytes.
            number = length // math.gcd(length, _ALIGNMENT) if rule.style is Style.PARAMETER else length
        return [Block(number, groups or number, rule.is_shared)] * rule.num_blocks

    def _scale(self, rule: ModuleRule, name: str) -> None:
        """Let the parent of a split layer count what is here."""
        if not (rule.scaled or rule.local_width or rule.per_group):
            return
        parent = self._parent(name)
        block = self._blocks(rule, name, 1)[0]
        first, last = self._cuts(block)[self._group.rank]
        if rule.local_width:
            self._narrow(parent, name, (last - first, block.num_units))
        for attribute in (*rule.scaled, *rule.per_group):
            before: Any = getattr(parent, attribute, None)
            if (id(parent), attribute) in self._scaled or (before is None and attribute in rule.per_group):
                continue  # siblings may name the same one
            self._scaled.add((id(parent), attribute))
            if attribute in rule.per_group:
                per_group = block.num_units // block.num_groups
                here: int = min(per_group, last - first)
            else:
                here = before * (last - first) // block.num_units
            self._changes.attribute(parent, attribute, here)

    def _narrow(self, parent: nn.Module, name: str, units: tuple[int, int]) -> None:
        """Let the parent of a split layer take widths of what is here from its input."""
        module: Any = self._modules[name]
        width = module.weight.shape[0 if is_transposed(module) else 1]
        if parent not in self._narrowed:  # siblings read the same input
            self._narrowed.add(parent)
            here, everywhere = units
            narrow_input(parent, width, width * here // everywhere, self._changes)
        self._changes.hook(self._names.outermost[name].register_forward_pre_hook(read_real))

    def _parent(self, name: str) -> nn.Module:
        return self._names.parent(name)

    def _set_size(self, module: nn.Module, *, inputs: int | None = None, outputs: int | None = None) -> None:
        """Let a linear layer say how large it is here."""
        for names, size in ((("in_features", "nx"), inputs), (("out_features", "nf"), outputs)):
            for name in names:
                if size is not None and name in vars(module):
                    self._changes.attribute(module, name, size)


def _experts_forward(forward: Callable[..., Tensor], group: RankGroup) -> Callable[..., Tensor]:
    def split_forward(*args: Any, **kwargs: Any) -> Tensor:  # hidden states, mostly with indices and weights
        given, form = pytree.tree_flatten((args, kwargs))
        entered = iter(enter([each for each in given if each.is_floating_point()], group))
        args, kwargs = pytree.tree_unflatten([next(entered) if x.is_floating_point() else x for x in given], form)
        return leave(forward(*args, **kwargs), group)

    return split_forward
