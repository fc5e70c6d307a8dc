"""Sequences split over the ranks that split the layers: what tensor parallelism computes twice, each rank does in part.

Between attention and feed-forward blocks, where every tensor parallel rank would work on the same activations, each
works on its positions. A block gathers whole sequences at its entry and leaves with a reduce-scatter, which together
move what tensor parallelism's all-reduce moves. Sums over ranks are taken in that reduce-scatter and its transpose, so
the split layers inside of a block take none themselves. A block that is more than a pair of split layers (a mixture of
experts, an attention that is not split) stays as tensor parallelism has it, between a gather and a cut.
Reference: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from booster_core.errors import ConfigError
from booster_core.state import NamedTensors, compiled_module
from booster_hybrid.layer_plan import Changes
from booster_hybrid.random_streams import Stream
from booster_hybrid.rank_group import AloneRank, RankGroup
from booster_hybrid.sequence_parallel.exchange import cut_replica, gather_sequence, join_replicas, scatter_sum
from booster_hybrid.sequence_parallel.layer_code import give_whole_sequences, not_of_the_layer
from booster_hybrid.sequence_parallel.layers import (
    ListRun,
    check_layer_output,
    check_lengths,
    lists_of_layers,
    refuse_outputs_of_layers,
)
from booster_hybrid.sequence_parallel.layout import SequenceLayout
from booster_hybrid.tensor_parallel.eager import outside_of_graphs
from booster_hybrid.tensor_parallel.linear import ColumnForward, RowForward
from booster_hybrid.tensor_parallel.module_names import ModuleNames
from booster_hybrid.tensor_parallel.summed_use import SummedUse, sum_where_used

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.probe.lengths import Lengths
    from booster_hybrid.tensor_parallel.plan import TensorParallelModel


class SequenceLengths:
    """How long the sequences are of which a rank has a number of positions, also when a layer runs again later."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank
        self._length_of: dict[int, int] = {}
        self._length = 0
        self._last: tuple[int, SequenceLayout] | None = None

    def enter(self, length: int) -> SequenceLayout:
        """Note that layers run on sequences of a length now."""
        layout = SequenceLayout(length, self._size)
        self._length_of[layout.lengths[self._rank]] = self._length = length
        return layout

    def in_backward_of(self, output: Any, run: ListRun) -> None:
        """See to it that what is computed again of a layer knows how long its sequences are."""
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            length = self._length

            def enter_again(_: Tensor) -> None:
                self.enter(length)
                run.note_backward()

            hidden.register_hook(enter_again)

    def of_whole(self, whole: Tensor) -> tuple[Tensor, SequenceLayout]:
        """Return whole sequences as ``(batch, positions, size)``, and how they are split."""
        if whole.dim() == 3:
            return whole, SequenceLayout(whole.shape[1], self._size)
        batch, layout = self._of_flat(whole)
        return whole.view(batch, layout.length, -1), layout

    def of_part(self, part: Tensor) -> tuple[Tensor, SequenceLayout]:
        """Return this rank's part of them as ``(batch, positions, size)``, and how they are split."""
        if part.dim() == 3:
            layout = SequenceLayout(self._length, self._size)
            if layout.lengths[self._rank] != part.shape[1]:
                layout = SequenceLayout(self._length_of[part.shape[1]], self._size)
            self._last = part.shape[0], layout
            return part, layout
        batch, layout = self._of_flat(part)
        return part.view(batch, layout.lengths[self._rank], part.shape[-1]), layout

    def _of_flat(self, rows: Tensor) -> tuple[int, SequenceLayout]:
        """Return what the layer's block before was given: some layers flatten batch and positions in between."""
        if rows.dim() != 2 or self._last is None:
            msg = (
                "'split_gather' needs hidden states of shape (batch, positions, size), but a layer gave one of its "
                f"parts {tuple(rows.shape)}. Use 'all_to_all' or 'ring_attn' with `sp_size`."
            )
            raise ConfigError(msg)
        return self._last


def split_between_blocks(
    model: nn.Module,
    lists: Sequence[str],
    group: RankGroup,
    split: TensorParallelModel,
    known: Lengths | None = None,
) -> None:
    """Let a tensor parallel model's layers work on this rank's positions between their blocks, in place.

    Args:
        model: The user's model, its layers split already.
        lists: Names of the lists of its layers; those that it lacks are passed over.
        group: The tensor parallel ranks.
        split: What has become of the model's parameters.
        known: For which lengths layers were compared; ``None`` where that does not matter.

    Raises:
        ConfigError: If the model can't be split so.
    """
    model = compiled_module(model) or model
    stacks = lists_of_layers(model, lists, "split_gather")
    model.register_forward_pre_hook(refuse_outputs_of_layers, with_kwargs=True)
    name = type(model).__name__

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        layout = SequenceLayout(hidden.shape[1], group.size)
        check_lengths(name, "split_gather", known, hidden.shape[0], layout)

    if known is not None:
        for layers in stacks:
            layers[0].register_forward_pre_hook(lambda _, args, kwargs: check(args, kwargs), with_kwargs=True)
    split_layers(model, stacks, group, split, Changes())


def split_layers(
    model: nn.Module,
    stacks: Sequence[Sequence[nn.Module]],
    group: RankGroup,
    split: TensorParallelModel,
    changes: Changes,
) -> None:
    """Split the sequences of some layers, in place.

    Args:
        model: The user's model, its layers split already.
        stacks: Lists of layers that run one after the other.
        group: As for `split_between_blocks`.
        split: As for `split_between_blocks`.
        changes: Notes what is replaced.
    """
    names = NamedTensors.of(model).name_of
    done = split.splits.keys() | split.summed
    for layers in stacks:
        lengths, stream = SequenceLengths(group.size, group.rank), Stream(group.rank)
        borders = _Borders(lengths, stream, group, split, changes)
        for layer in layers:
            for block in _blocks(layer):
                borders.split(layer, block)
        parts = {
            id(each)
            for layer in layers
            for each in layer.parameters()
            if id(each) not in borders.kept and names[id(each)] not in done
        }
        for module in (module for layer in layers for module in layer.modules()):
            sum_where_used(module, dict.fromkeys(parts), group, changes, [module])
        run = ListRun(model, layers, "split_gather", changes)
        for index, layer in enumerate(layers):
            hooks = _LayerHooks(lengths, run, stream, group, is_first=index == 0, is_last=index == len(layers) - 1)
            changes.hook(layer.register_forward_pre_hook(hooks.before, with_kwargs=True))
            changes.hook(layer.register_forward_hook(hooks.after, always_call=True))


def _is_leaf(block: nn.Module) -> bool:
    """Return whether a block was left as it is: it has no submodules, and no forward of ours."""
    return not _patched(block) and not any(True for _ in block.children())


def _patched(block: nn.Module) -> dict[nn.Module, Any]:
    """Return the forwards of ours in a block that split something."""
    found = {module: vars(module).get("forward") for module in block.modules()}
    return {module: each for module, each in found.items() if each is not None and not isinstance(each, SummedUse)}


def _blocks(layer: nn.Module) -> list[nn.Module]:
    """Return what a layer consists of; T5's keep it in a list."""
    found = []
    for child in layer.children():
        found += list(child) if isinstance(child, nn.ModuleList) else [child]
    return found


@dataclass
class _Borders:
    """Puts the communication of the blocks of some layers at the blocks' borders.

    Args:
        lengths: How long the layers' sequences are.
        stream: This rank's random numbers in the layers.
        group: The tensor parallel ranks.
        tensors: What has become of the model's parameters.
        changes: Notes what is replaced.

    Attributes:
        kept: The parameters whose gradients come whole, by ``id``.
    """

    lengths: SequenceLengths
    stream: Stream
    group: RankGroup
    tensors: TensorParallelModel
    changes: Changes
    kept: set[int] = field(default_factory=set)

    def split(self, layer: nn.Module, block: nn.Module) -> None:
        """Put a block's communication at its borders."""
        if _is_leaf(block):
            return  # a norm, a dropout: each position by itself, as the probe has shown
        patched = _patched(block)
        if not patched or not all(map(_is_plain, patched.values())):
            self._leave_as_it_is(block)
            return
        across = _attending_across(layer, patched)
        for parent in across:
            self._leave_as_it_is(parent)
        patched = {module: forward for module, forward in patched.items() if _parent(layer, module) not in across}
        gathering = _Gathering(self.lengths, self.group, is_replica=False)
        entries: dict[nn.Module, None] = {}
        for module, forward in patched.items():
            if isinstance(forward, ColumnForward):
                # The gather's transpose sums over ranks; the layer itself has nobody to sum with.
                forward.siblings.group = AloneRank(None, 0, 1)
                entries[_entry(layer, module)] = None
            else:
                # The rank stays: the first one's partial sum has the bias.
                own = AloneRank(None, self.group.rank, self.group.size)
                self.changes.forward(module, RowForward(module, own))
                self.changes.hook(module.register_forward_hook(_Scattering(self.lengths, self.group)))
                if getattr(module, "bias", None) is not None:
                    self.kept.add(id(module.bias))
        for entry in entries:
            self.changes.hook(entry.register_forward_pre_hook(gathering, with_kwargs=True))
        self._sum_alone(set(block.modules()).difference(*(parent.modules() for parent in across)))

    def _sum_alone(self, inside: set[nn.Module]) -> None:
        """Let what would sum over ranks inside of a block leave that to its borders."""
        for features in [each for each in self.tensors.features if each.module in inside]:
            features.group = AloneRank(None, 0, 1)
        for adapter in [each for each in self.tensors.adapters if each.module in inside]:
            adapter.group = AloneRank(None, 0, 1)
            if adapter.is_partial:
                self.changes.hook(adapter.module.register_forward_hook(_Scattering(self.lengths, self.group)))

    def _leave_as_it_is(self, block: nn.Module) -> None:
        """Give a block whole sequences, alike on all ranks."""
        stream, lengths, group = self.stream, self.lengths, self.group
        for handle in (
            block.register_forward_pre_hook(lambda *_: stream.pause()),  # or each would work on something else
            block.register_forward_hook(lambda *_: stream.resume()),
            block.register_forward_pre_hook(_Gathering(lengths, group, is_replica=True), with_kwargs=True),
            block.register_forward_hook(_Cutting(lengths, group)),
        ):
            self.changes.hook(handle)
        self.kept |= {id(parameter) for parameter in block.parameters()}


def _attending_across(layer: nn.Module, patched: Mapping[nn.Module, Any]) -> set[nn.Module]:
    """Return the modules whose column-parallel layers read different inputs, such as a decoder's and an encoder's."""
    read: dict[nn.Module, set[int]] = {}
    for module, forward in patched.items():
        parent = _parent(layer, module)
        if isinstance(forward, ColumnForward) and parent is not layer:
            read.setdefault(parent, set()).add(id(forward.siblings))
    return {parent for parent, siblings in read.items() if len(siblings) > 1}


def _is_plain(forward: Any) -> bool:
    if isinstance(forward, ColumnForward):
        return forward.gathers is None
    return isinstance(forward, RowForward) and forward.splits is None


def _parent(layer: nn.Module, module: nn.Module) -> nn.Module:
    """Return the module whose forward calls a part of a layer, not counting adapters around it."""
    names = ModuleNames(layer)
    return names.parent(_name(names, module))


def _entry(layer: nn.Module, module: nn.Module) -> nn.Module:
    """Return what is given the input of a column-parallel layer: the block that it is in, or what is around it."""
    names = ModuleNames(layer)
    name = _name(names, module)
    parent = names.parent(name)
    return names.outermost[name] if parent is layer else parent


def _name(names: ModuleNames, module: nn.Module) -> str:
    return next(name for name, each in names.modules.items() if each is module)


class _LayerHooks:
    def __init__(
        self, lengths: SequenceLengths, run: ListRun, stream: Stream, group: RankGroup, *, is_first: bool, is_last: bool
    ) -> None:
        self._lengths, self._run, self._stream, self._group = lengths, run, stream, group
        self._is_first, self._is_last = is_first, is_last

    @outside_of_graphs
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take this rank's positions before the first layer."""
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._is_first:
            layout = self._lengths.enter(hidden.shape[1])
            self._run.split()
            args, kwargs = _replaced(args, kwargs, cut_replica(hidden, layout, self._group))
        else:
            self._run.check_layer(module)
        if module.training:
            self._stream.enter(hidden.device)
        return args, kwargs

    @outside_of_graphs
    def after(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Put the parts together after the last layer."""
        self._stream.leave()
        if output is None:  # the layer has raised
            return output
        check_layer_output(module, output)
        self._lengths.in_backward_of(output, self._run)
        if not self._is_last:
            return output
        self._run.join()
        return _mapped(output, lambda hidden: join_replicas(*self._lengths.of_part(hidden), self._group))


class _Gathering:
    """Gives a block whole sequences in place of this rank's positions."""

    def __init__(self, lengths: SequenceLengths, group: RankGroup, *, is_replica: bool) -> None:
        self._lengths, self._group, self._is_replica = lengths, group, is_replica

    @outside_of_graphs
    @not_of_the_layer
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        gather = join_replicas if self._is_replica else gather_sequence
        whole = gather(*self._lengths.of_part(hidden), self._group)
        give_whole_sequences(to_what_follows=True)
        return _replaced(args, kwargs, whole if hidden.dim() == 3 else whole.flatten(0, 1))


class _Scattering:
    """Leaves of a row-parallel layer's partial sums this rank's positions, summed."""

    def __init__(self, lengths: SequenceLengths, group: RankGroup) -> None:
        self._lengths, self._group = lengths, group

    @outside_of_graphs
    @not_of_the_layer
    def __call__(self, module: nn.Module, _: Any, output: Tensor) -> Tensor:
        del module
        part = scatter_sum(*self._lengths.of_whole(output), self._group)
        give_whole_sequences(to_what_follows=False)
        return part if output.dim() == 3 else part.flatten(0, 1)


class _Cutting:
    """Leaves of what all ranks have computed alike this rank's positions."""

    def __init__(self, lengths: SequenceLengths, group: RankGroup) -> None:
        self._lengths, self._group = lengths, group

    @outside_of_graphs
    @not_of_the_layer
    def __call__(self, module: nn.Module, _: Any, output: Any) -> Any:
        del module
        give_whole_sequences(to_what_follows=False)
        return _mapped(output, lambda hidden: cut_replica(*self._lengths.of_whole(hidden), self._group))


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def _mapped(output: Any, function: Any) -> Any:
    """Apply a function to the hidden states that a layer or block returns, alone or first of several."""
    return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)
