"""Which modules have nothing to compute on which stages, such as an embedding, or a vision encoder before the layers.

Each stage runs the model's own forward, and so all that stands before its layers. Where nothing that a module returns
is right on a stage, as its parameters are elsewhere, no value there depends on it: what does is sent, see
`booster_hybrid.pipeline.values`. So the module need not be run. Whether that holds is seen in one more dry run in
which all that the module makes is labelled as missing on these stages.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_hybrid.pipeline.absent import is_plain
from booster_hybrid.pipeline.trace import is_inside

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor, nn

_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules", "forward"})


class IdleModules:
    """Watches the modules outside of the layers in a dry run in which values carry labels.

    Args:
        labels: The labels.
        known: The stages on which modules are known not to run, by name; nothing in the first of two runs.
        progress: Tells how many layers have been called, and which of them runs now.
    """

    def __init__(
        self,
        labels: Any,
        known: Mapping[str, frozenset[int]],
        progress: Callable[[], tuple[int, int | None]],
    ) -> None:
        self._labels, self._known, self._progress = labels, known, progress
        self._calls: list[tuple[Any, ...]] = []
        self._stages: dict[str, frozenset[int]] = {}
        self._running: list[tuple[frozenset[int], Mapping[int, str]]] = []

    def watch(
        self,
        modules: Mapping[str, nn.Module],
        layers: Collection[str],
        senders: Collection[str],
        stack: contextlib.ExitStack,
    ) -> None:
        """Watch all modules outside of the layers that are not around modules whose outputs are sent.

        Args:
            modules: The model's modules by name.
            layers: Names of the layers.
            senders: Names of the modules whose outputs are sent.
            stack: Ends the watch.
        """
        for name, module in modules.items():
            if not name or name in layers or is_inside(name, layers):
                continue
            if any(each.startswith(f"{name}.") for each in senders):
                continue
            enter, leave = functools.partial(self._enter, name), functools.partial(self._leave, name)
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, prepend=True, with_kwargs=True).remove)

    def now(self) -> frozenset[int]:
        """Return the stages that do not run what runs now."""
        return frozenset().union(*(stages for stages, _ in self._running))

    def found(self) -> dict[str, frozenset[int]]:
        """Return the stages on which modules need not run, of several inside of each other the outermost."""
        found: dict[str, frozenset[int]] = {}
        for name, stages in sorted(self._stages.items()):
            around = [each for each in found if name.startswith(f"{each}.")]
            left = stages.difference(*(found[each] for each in around))
            if left:
                found[name] = left
        return found

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        versions = [each._version for each in leaves if isinstance(each, torch.Tensor)]  # noqa: SLF001 - no other way
        self._calls.append((self._progress(), all(map(is_plain, leaves)), versions, _attributes(module)))
        stages = self._known.get(name, frozenset())
        self._running.append((stages, self._labels.made_here))
        if stages:
            self._labels.made_here = {**self._labels.made_here, **dict.fromkeys(stages, f"module '{name}'")}

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        _, self._labels.made_here = self._running.pop()
        before = self._calls.pop()
        leaves = pytree.tree_leaves((args, kwargs))
        versions = [each._version for each in leaves if isinstance(each, torch.Tensor)]  # noqa: SLF001 - no other way
        after = (self._progress(), all(map(is_plain, leaves)), versions, _attributes(module))
        results = pytree.tree_leaves(output)
        tensors: list[Tensor] = [each for each in results if isinstance(each, torch.Tensor)]
        stages: frozenset[int] = frozenset()
        if before == after and before[1] and all(map(is_plain, results)) and tensors:
            wrong = [frozenset(self._labels.of(each)) for each in tensors]
            stages = wrong[0].intersection(*wrong[1:])
        self._stages[name] = self._stages.get(name, stages) & stages


def _attributes(module: nn.Module) -> list[tuple[str, int]]:
    """Return what the attributes of a module and those inside of it are, to be compared."""
    return [
        (name, id(value)) for each in module.modules() for name, value in vars(each).items() if name not in _OF_TORCH
    ]
