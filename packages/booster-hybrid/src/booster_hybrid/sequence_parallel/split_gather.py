"""Sequences split over the ranks that split the layers: what tensor parallelism computes twice, each rank does in part.

Between attention and feed-forward blocks, where every tensor parallel rank would work on the same activations, each
works on its positions. A block gathers whole sequences at its entry and leaves with a reduce-scatter, which together
move what tensor parallelism's all-reduce moves. Sums over ranks are taken in that reduce-scatter and its transpose, so
the split layers inside of a block take none themselves. A block that is more than a pair of split layers (a mixture of
experts, an attention that is not split) stays as tensor parallelism has it, between a gather and a cut.
Reference: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.state import NamedTensors, compiled_module
from booster_hybrid.mesh import AloneRank, RankGroup
from booster_hybrid.modules import ModuleNames, ModulePatches
from booster_hybrid.sequence_parallel.exchange import (
    begin_gather,
    cut_replica,
    gather_sequence,
    join_replicas,
    scatter_sum,
)
from booster_hybrid.sequence_parallel.layers import (
    HIDDEN_STATES,
    SplitModuleList,
    lists_of_layers,
    mapped,
    refuse_options,
    with_hidden,
)
from booster_hybrid.tensor_parallel.collectives import GradientAllReduce, positions_in_graph, sum_where_used
from booster_hybrid.tensor_parallel.linear import ColumnForward, ColumnSiblings, GatheredInput, RowForward
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.sequence_parallel.exchange import SequenceLayout
    from booster_hybrid.tensor_parallel.plan import TensorParallelModel


class GatheringList(SplitModuleList):
    """A list of layers whose blocks gather whole sequences.

    Args:
        group: The tensor parallel ranks.
        model_name: Class of the model, for messages.
    """

    def __init__(self, group: RankGroup, model_name: str) -> None:
        super().__init__("split_gather", group, model_name)
        self._batch: int | None = None

    def cut(self, hidden: Tensor) -> Tensor:
        """Return this rank's positions of what every rank is given alike."""
        return cut_replica(hidden, self.layout(self.length), self.group)

    def join(self, hidden: Tensor) -> Tensor:
        """Return whole hidden states, which every rank hands on alike. Collective: the group."""
        return join_replicas(*self._of_part(hidden), self.group)

    def gather_input(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        siblings: Iterable[ColumnSiblings] = (),
        is_replica: bool = False,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give a block whole sequences in place of this rank's positions.

        Args:
            module: The block.
            args: What it was given.
            kwargs: Likewise.
            siblings: The column-parallel layers that read them, which gather them again in backward.
            is_replica: Whether all ranks go on alike.
        """
        del module
        hidden: Tensor = args[0] if args else kwargs[HIDDEN_STATES]
        if not is_replica and self._is_graphs_own(hidden, self.group.size):
            self._batch = hidden.shape[0]
            return with_hidden(args, kwargs, positions_in_graph(hidden, self.group, gathers=True))
        return self._gather_input(hidden, args, kwargs, siblings, is_replica=is_replica)

    @outside_of_graphs
    def _gather_input(
        self,
        hidden: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        siblings: Iterable[ColumnSiblings],
        *,
        is_replica: bool,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        part, layout = self._of_part(hidden)
        whole = (join_replicas if is_replica else gather_sequence)(part, layout, self.group)
        if hidden.dim() != 3:
            return with_hidden(args, kwargs, whole.flatten(0, 1))
        again = functools.partial(begin_gather, layout=layout, group=self.group)
        for each in siblings:
            each.gathered = GatheredInput(whole, hidden, again)
        return with_hidden(args, kwargs, whole)

    def scatter_output(self, module: nn.Module, _: Any, output: Tensor) -> Tensor:
        """Leave of a row-parallel layer's partial sums this rank's positions, summed."""
        del module
        if self._is_graphs_own(output, 1):
            return positions_in_graph(output, self.group, gathers=False)
        return self._scatter_output(output)

    def _is_graphs_own(self, hidden: Tensor, parts: int) -> bool:
        """Return whether a compiler traces sequences of which all ranks have equally long parts.

        Args:
            hidden: Whole sequences, or this rank's part of them.
            parts: How many of its length they have.
        """
        if not torch.compiler.is_compiling() or hidden.dim() != 3:
            return False
        return self.length % self.group.size == 0 and hidden.shape[1] * parts == self.length

    @outside_of_graphs
    def _scatter_output(self, output: Tensor) -> Tensor:
        part = scatter_sum(*self._of_whole(output), self.group)
        return part if output.dim() == 3 else part.flatten(0, 1)

    @outside_of_graphs
    def cut_output(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Leave of what all ranks have computed alike this rank's positions."""
        del module
        return mapped(output, lambda hidden: cut_replica(*self._of_whole(hidden), self.group))

    def _of_whole(self, whole: Tensor) -> tuple[Tensor, SequenceLayout]:
        """Return whole sequences as ``(batch, positions, size)``, and how they are split."""
        if whole.dim() == 3:
            return whole, self.layout(whole.shape[1])
        batch, layout = self._of_flat(whole)
        return whole.view(batch, layout.length, -1), layout

    def _of_part(self, part: Tensor) -> tuple[Tensor, SequenceLayout]:
        """Return this rank's part of them as ``(batch, positions, size)``, and how they are split."""
        if part.dim() == 3:
            self.resume(part.shape[1])
            self._batch = part.shape[0]
            return part, self.layout(self.length)
        batch, layout = self._of_flat(part)
        return part.view(batch, layout.lengths[self.group.rank], part.shape[-1]), layout

    def _of_flat(self, rows: Tensor) -> tuple[int, SequenceLayout]:
        """Return what the layer's block before was given: some layers flatten batch and positions in between."""
        if rows.dim() != 2 or self._batch is None:
            msg = (
                "'split_gather' needs hidden states of shape (batch, positions, size), but a layer gave one of its "
                f"parts {tuple(rows.shape)}. Use 'all_to_all' or 'ring_attn' with `sp_size`."
            )
            raise ConfigError(msg)
        return self._batch, self.layout(self.length)


def split_between_blocks(
    model: nn.Module,
    lists: Sequence[str],
    group: RankGroup,
    split: TensorParallelModel,
) -> None:
    """Let a tensor parallel model's layers work on this rank's positions between their blocks, in place.

    Args:
        model: The user's model, its layers split already.
        lists: Names of the lists of its layers; those that it lacks are passed over.
        group: The tensor parallel ranks.
        split: What has become of the model's parameters.

    Raises:
        ConfigError: If the model can't be split so.
    """
    model = compiled_module(model) or model
    stacks = lists_of_layers(model, lists, "split_gather")
    refuse_options(model, ("output_hidden_states", "output_attentions"))
    split_layers(model, stacks, group, split, ModulePatches())


def split_layers(
    model: nn.Module,
    stacks: Sequence[Sequence[nn.Module]],
    group: RankGroup,
    split: TensorParallelModel,
    changes: ModulePatches,
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
        positions = GatheringList(group, type(model).__name__)
        borders = _Borders(positions, split, changes)
        for layer in layers:
            borders.enter(layer)
            for block in _blocks(layer):
                borders.split(block)
        parts = {
            id(each)
            for layer in layers
            for each in layer.parameters()
            if id(each) not in borders.kept and names[id(each)] not in done
        }
        for module in (module for layer in layers for module in layer.modules()):
            sum_where_used(module, dict.fromkeys(parts), group, changes, [module])
        positions.install(model, layers, changes)


def _is_leaf(block: nn.Module) -> bool:
    """Return whether a block was left as it is: it has no submodules, and no forward of ours."""
    return not _patched(block) and not any(True for _ in block.children())


def _patched(block: nn.Module) -> dict[nn.Module, Any]:
    """Return the forwards of ours in a block that split something."""
    found = {module: vars(module).get("forward") for module in block.modules()}
    return {
        module: each for module, each in found.items() if each is not None and not isinstance(each, GradientAllReduce)
    }


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
        positions: The list of the layers.
        tensors: What has become of the model's parameters.
        changes: Notes what is replaced.

    Attributes:
        kept: The parameters whose gradients come whole, by ``id``.
    """

    positions: GatheringList
    tensors: TensorParallelModel
    changes: ModulePatches
    kept: set[int] = field(default_factory=set)

    def enter(self, layer: nn.Module) -> None:
        """Go on with the blocks of another layer."""
        self._layer, self._names = layer, ModuleNames(layer)
        self._name_of = {module: name for name, module in reversed(self._names.modules.items())}

    def split(self, block: nn.Module) -> None:
        """Put a block's communication at its borders."""
        if _is_leaf(block):
            return  # a norm, a dropout: each position by itself, as the probe has shown
        patched = _patched(block)
        if not patched or not all(map(_is_plain, patched.values())):
            self._leave_as_it_is(block)
            return
        across = self._attending_across(patched)
        for parent in across:
            self._leave_as_it_is(parent)
        whole = {each for parent in across for each in parent.modules()}
        patched = {module: forward for module, forward in patched.items() if module not in whole}
        siblings: dict[ColumnSiblings, None] = {}
        entries: dict[nn.Module, None] = {}
        for module, forward in patched.items():
            if isinstance(forward, ColumnForward):
                # The gather's transpose sums over ranks; the layer itself has nobody to sum with.
                forward.siblings.group = AloneRank(None, 0, 1)
                siblings[forward.siblings] = None
                entries[self._entry(module)] = None
            else:
                # The rank stays: the first one's partial sum has the bias.
                own = AloneRank(None, self.positions.group.rank, self.positions.group.size)
                self.changes.forward(module, RowForward(module, own))
                self.changes.hook(module.register_forward_hook(self.positions.scatter_output))
                if getattr(module, "bias", None) is not None:
                    self.kept.add(id(module.bias))
        gather = functools.partial(self.positions.gather_input, siblings=siblings)
        for entry in entries:  # before hooks that tell the module of another width, as `narrow_input` does
            self.changes.hook(entry.register_forward_pre_hook(gather, with_kwargs=True, prepend=True))
        self._sum_alone(set(block.modules()) - whole)

    def _sum_alone(self, inside: set[nn.Module]) -> None:
        """Let what would sum over ranks inside of a block leave that to its borders."""
        for each in [each for each in self.tensors.sums if each.module in inside]:
            each.group = AloneRank(None, 0, 1)
            if each.is_partial:
                self.changes.hook(each.module.register_forward_hook(self.positions.scatter_output))

    def _leave_as_it_is(self, block: nn.Module) -> None:
        """Give a block whole sequences, alike on all ranks."""
        positions, stream = self.positions, self.positions.stream
        gather = functools.partial(positions.gather_input, is_replica=True)
        for handle in (
            block.register_forward_pre_hook(lambda *_: stream.pause()),  # or each would work on something else
            block.register_forward_hook(lambda *_: stream.resume()),
            block.register_forward_pre_hook(gather, with_kwargs=True),
            block.register_forward_hook(positions.cut_output),
        ):
            self.changes.hook(handle)
        self.kept |= {id(parameter) for parameter in block.parameters()}

    def _attending_across(self, patched: Mapping[nn.Module, Any]) -> set[nn.Module]:
        """Return modules whose column-parallel layers read different inputs, such as a decoder's and an encoder's."""
        read: dict[nn.Module, set[int]] = {}
        for module, forward in patched.items():
            parent = self._parent(module)
            if isinstance(forward, ColumnForward) and parent is not self._layer:
                read.setdefault(parent, set()).add(id(forward.siblings))
        found = {parent for parent, siblings in read.items() if len(siblings) > 1}
        inside = {each for parent in found for each in parent.modules() if each is not parent}
        return found - inside

    def _parent(self, module: nn.Module) -> nn.Module:
        """Return the module whose forward calls a part of the layer, not counting adapters around it."""
        return self._names.parent(self._name_of[module])

    def _entry(self, module: nn.Module) -> nn.Module:
        """Return what is given a column-parallel layer's input: the block that it is in, or what is around it."""
        parent = self._parent(module)
        return self._names.outermost[self._name_of[module]] if parent is self._layer else parent


def _is_plain(forward: Any) -> bool:
    if isinstance(forward, ColumnForward):
        return forward.gathers is None
    return isinstance(forward, RowForward) and forward.splits is None
