"""What stages need for batches of other forms than the example: found when the first batch of a form comes.

A batch with other entries, flags or kinds of tensors takes a model through other code. What stages send each other then
follows from a dry run with that batch, as for the example, on an outline of the model: the whole of it, without values.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.log import log
from booster_hybrid.pipeline.stages import find_cuts
from booster_hybrid.skipped_layers import kept_generators
from booster_runtime.data import taken_by

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from booster_hybrid.config import PipelineConfig
    from booster_hybrid.pipeline.cut import Cuts

_MOST_FORMS = 32
"""Forms that are looked at; a loader with more of them, as with lists of any length, would only be slowed down."""
_BY_VALUE = (bool, str, type(None), torch.dtype, torch.device)
_BY_TYPE = (int, float, complex)


def outline_of(model: nn.Module, device: torch.device) -> nn.Module | None:
    """Return a copy of a model whose parameters have shapes and no values, so that it takes no memory.

    Args:
        model: The user's model, whole.
        device: Where it will be trained.

    Returns:
        ``None`` if it can't be copied, or has parameters of another kind, as quantised ones are.
    """
    instead: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        if type(parameter) is not nn.Parameter:
            return None
        values = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        instead[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    with contextlib.suppress(Exception):  # whatever an attribute raises that can't be copied
        return copy.deepcopy(model, instead)
    return None


class CutsByForm:
    """What a model's stages need, by the form of a microbatch.

    Args:
        model: The user's model.
        outline: Its outline, as it was at `boost`; see `outline_of`. ``None`` lets every batch run as the example.
        lists: Names of its lists of layers.
        cuts: What its stages need for the example.
        example: The example.
        config: How many stages there are.
        trains: Whether the model will be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        outline: nn.Module | None,
        lists: Sequence[str],
        cuts: Cuts,
        example: Any,
        config: PipelineConfig,
        *,
        trains: bool,
    ) -> None:
        self._model, self._outline, self._lists, self._cuts = model, outline, lists, cuts
        self._config, self._trains = config, trains
        self._known: dict[Hashable, Cuts] = {}
        form = form_of(taken_by(model, example))
        if form is not None:
            self._known = dict.fromkeys([(form, True), (form, False)], cuts)

    def for_batch(self, batch: Any) -> Cuts:
        """Return what stages need for a microbatch; for the example, where nothing is known of its form."""
        return self._known.get(self._key(batch), self._cuts)

    def find(self, batches: Sequence[Any]) -> dict[Hashable, Cuts]:
        """Return what stages need for those microbatches whose form is new; to be added by `add`.

        Raises:
            ConfigError: If the model can't be cut so for one of them.
        """
        found: dict[Hashable, Cuts] = {}
        for batch in batches if self._outline is not None else ():
            key = self._key(batch)
            is_new = key is not None and key not in self._known and key not in found
            if is_new and len(self._known) + len(found) < _MOST_FORMS:
                found[key] = self._find(batch)
        return found

    def add(self, found: Mapping[Hashable, Cuts]) -> None:
        """Keep what `find` has returned."""
        self._known.update(found)

    def _find(self, batch: Any) -> Cuts:
        assert self._outline is not None, "something is found by it alone"
        if len(self._known) == _MOST_FORMS - 1:
            msg = (
                f"Batches of {_MOST_FORMS} forms have come (other entries, flags, or numbers of tensors). Those of "
                "further ones run as the example at `boost` did, and raise where they need more."
            )
            log.warning(msg)
        now = dict(self._model.named_modules())
        for name, module in self._outline.named_modules():
            if name in now:
                module.training = now[name].training
                module._buffers.update(now[name]._buffers)  # noqa: SLF001 - setting them would check each
        try:
            with kept_generators():
                return find_cuts(
                    self._outline, self._lists, batch, self._config, trains=self._trains, held_as=self._cuts.trace
                )
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - what a stage lacks then is absent, and raises where it is read
            return self._cuts

    def _key(self, batch: Any) -> Hashable:
        form = form_of(taken_by(self._model, batch))
        return None if form is None else (form, self._model.training)


def form_of(batch: Any) -> Hashable:
    """Return what a batch has, but for sizes and values: entries, flags, texts, kinds of tensors and of numbers.

    Returns:
        ``None`` if it has something else, which a dry run might change.
    """
    leaves, structure = pytree.tree_flatten(batch)
    found: list[Hashable] = [str(structure)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append((leaf.dtype, leaf.dim(), leaf.layout))
        elif isinstance(leaf, _BY_VALUE):
            found.append(leaf)
        elif isinstance(leaf, _BY_TYPE):
            found.append(type(leaf).__name__)
        else:
            return None
    return tuple(found)


def checksum_of_cuts(found: Mapping[Hashable, Cuts]) -> int:
    """Return a number of 32 bits by which ranks tell whether they have found the same."""
    told = [(sorted(cuts.sent_names), [layer.name for layer in cuts.trace.layers]) for cuts in found.values()]
    return zlib.crc32(repr(told).encode())
