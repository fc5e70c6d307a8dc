"""A batch for the dry run of a model, and what batches show of entries that are not for each sample.

The batch is from the data loader that the model will be trained with, or the model's own dummy. A vector of class
weights may be as long as a batch, and one batch does not tell it from targets. Batches of two sizes do: what is for
each sample has grown with the batch. Where no other size was seen at `boost`, the tensors that could be for all samples
are refused: floating ones that only the criterion takes, and floating vectors. Integers of the criterion are labels,
and what forward takes in more dimensions is its input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from booster_core.errors import ConfigError
from booster_hybrid.fixed_draws import preserve_generators
from booster_runtime.data import leaves_by_path, taken_by

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.utils.data import DataLoader


_REMEDY = (
    "What is for all samples, such as class weights, belongs into the criterion, or needs a first dimension of 1; what "
    "has rows of its own for each sample, such as the patches of images, is split by "
    "`HybridParallelPlugin(split_batch=...)`."
)


def lengths_of(batch: Any) -> dict[str, int]:
    """Return the first dimension of each tensor of a batch by the tensor's path; scalars are left out."""
    return {path: tensor.shape[0] for path, tensor in _entries(batch).items()}


def not_per_sample(path: str, found: str) -> ConfigError:
    """Return the error about a tensor that microbatches would cut wrongly.

    Args:
        path: Where it is in the batch.
        found: What was seen of it.
    """
    return ConfigError(f"The batch can't be split into microbatches: {path or 'it'} {found}. {_REMEDY}")


class BatchDimensions:
    """Compares the lengths of a batch's entries with those of batches that are known from `boost`.

    Args:
        model: The user's model, whose forward tells its own arguments from entries for the criterion.
        seen: The lengths of entries in these: the example, and the data loader's.
    """

    def __init__(self, model: nn.Module, seen: Sequence[Mapping[str, int]]) -> None:
        self._model, self._seen = model, seen
        self._known: set[str] = set()
        for lengths in seen:
            self._note(lengths)
        self._checked: object = None

    def check(self, batch: Any, count: int) -> None:
        """Raise if a tensor would be cut that is, or may be, for all samples of a batch.

        Args:
            batch: As its data loader yields it.
            count: Its number of samples.

        Raises:
            ConfigError: Naming the first such tensor, with the remedy.
        """
        leaves, form = pytree.tree_flatten(batch)
        shapes = form, [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if shapes == self._checked:
            return
        lengths = lengths_of(batch)
        cut = {path: tensor for path, tensor in _entries(batch).items() if tensor.shape[0] == count}
        self._note(lengths)
        unknown = {path: tensor for path, tensor in cut.items() if path not in self._known}
        for earlier in self._seen:
            self._refuse_constant(earlier, unknown, lengths)
        if len(cut) > 1:
            self._refuse_ambiguous(batch, unknown)
        self._checked = shapes

    def _note(self, lengths: Mapping[str, int]) -> None:
        """Take the entries for known whose lengths are others than in the batches from `boost`."""
        for earlier in self._seen:
            self._known.update(path for path, length in lengths.items() if earlier.get(path, length) != length)

    @staticmethod
    def _refuse_constant(
        earlier: Mapping[str, int], unknown: Mapping[str, torch.Tensor], lengths: Mapping[str, int]
    ) -> None:
        """Refuse what is as long as in another batch, although other entries are not."""
        for path in unknown:
            length = lengths[path]
            other = next((key for key in lengths if earlier.get(key, length) != lengths[key] == length), None)
            if other is not None and earlier.get(path) == length:
                found = f"has {length} entries in batches in which {other} has {earlier[other]} and {lengths[other]}"
                raise not_per_sample(path, found)

    def _refuse_ambiguous(self, batch: Any, unknown: Mapping[str, torch.Tensor]) -> None:
        """Refuse what may be for all samples, as no batch of another size was seen."""
        taken = [leaf for leaf in pytree.tree_leaves(taken_by(self._model, batch)) if isinstance(leaf, torch.Tensor)]
        of_forward = {id(leaf) for leaf in taken}
        inputs = {leaf.shape for leaf in taken if leaf.dim() > 1}
        for path, tensor in unknown.items():
            is_input = id(tensor) in of_forward and tensor.dim() > 1
            if is_input or tensor.shape in inputs or not tensor.is_floating_point():
                continue
            msg = (
                f"The batch can't be split into microbatches: {path or 'it'} of shape {tuple(tensor.shape)} may have "
                "an entry for each sample, or be for all of them, as class weights are. Pass the data loader to "
                "`boost`, or an `example_batch` to the plugin that has this entry and another number of samples. "
            )
            raise ConfigError(msg + _REMEDY)


def _entries(batch: Any) -> dict[str, torch.Tensor]:
    return {path: leaf for path, leaf in leaves_by_path(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()}


_SAMPLES = 2


def example_batch(model: nn.Module, dataloader: DataLoader[Any] | None, given: Any = None) -> Any:
    """Return a batch that a model's forward takes.

    Args:
        model: The user's model.
        dataloader: Where batches come from; nothing is taken out of it: the first samples of its data set are read
            directly. One over an iterable data set is left alone.
        given: A batch that the user has given for this, which wins.

    Raises:
        ConfigError: If there is none.
    """
    batch = batch_at_hand(dataloader, given)
    if batch is not None:
        return batch
    dummy = getattr(model, "dummy_inputs", None)
    if dummy is not None and getattr(model, "main_input_name", "input_ids") in dummy:
        return dummy
    image = _dummy_image(model)
    if image is not None:
        return image
    msg = (
        f"Finding the layers of {type(model).__name__} needs an example of what its forward takes. Pass the data "
        "loader to `boost`, or `HybridParallelPlugin(example_batch=...)`."
    )
    raise ConfigError(msg)


def batch_at_hand(dataloader: DataLoader[Any] | None, given: Any = None) -> Any:
    """Return a batch like those that a model will train on; ``None`` where there is none.

    Args:
        dataloader: As for `example_batch`.
        given: A batch that the user has given for this, which wins.
    """
    dataset = None if dataloader is None else dataloader.dataset
    if given is not None or dataloader is None or isinstance(dataset, IterableDataset) or not len(dataset):  # type: ignore[arg-type]
        return given
    return _collated(dataloader, _SAMPLES)


def check_entries(dataloader: DataLoader[Any] | None) -> list[dict[str, int]]:
    """Raise if a data loader's batches have tensors that are not for each sample: microbatches would cut them.

    A vector of class weights may be as long as a batch, which does not show in the batch alone; so a batch of two
    samples is compared with one of a single sample.

    Args:
        dataloader: As for `example_batch`.

    Returns:
        The lengths of the entries of both batches, see `lengths_of`; nothing where a loader can't be asked for them.

    Raises:
        ConfigError: Naming the first such tensor.
    """
    if dataloader is None or isinstance(dataloader.dataset, IterableDataset) or dataloader.batch_sampler is None:
        return []
    try:
        one, two = (_collated(dataloader, number) for number in (1, _SAMPLES))
    except Exception:  # noqa: BLE001 - not every collator takes one sample
        return []
    lengths = [lengths_of(one), lengths_of(two)]
    for path, length in lengths[1].items():
        if lengths[0].get(path) == length > 1:
            raise not_per_sample(path, f"has {length} entries for {_SAMPLES} samples and {length} for 1")
    return lengths


def _collated(dataloader: DataLoader[Any], number: int) -> Any:
    """Return a batch of the first samples of a data set; reading these may draw random numbers, which is undone."""
    dataset: Any = dataloader.dataset
    with torch.random.fork_rng(devices=[]), preserve_generators():
        samples = [dataset[index] for index in range(min(number, len(dataset)))]
        return dataloader.collate_fn(samples) if dataloader.batch_sampler is not None else samples[0]


def _dummy_image(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return an image of the size that a vision model of transformers is configured for."""
    config = getattr(model, "config", None)
    size = getattr(config, "image_size", None)
    if getattr(model, "main_input_name", None) != "pixel_values" or size is None:
        return None
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": torch.zeros(_SAMPLES, getattr(config, "num_channels", 3), height, width)}


def dry_run_failed(model: nn.Module, error: Exception) -> ConfigError:
    """Return the error of a model that can't be run on fake tensors and other numbers of samples and positions."""
    msg = (
        f"The dry run of {type(model).__name__}, which finds out in which order its layers run and what they get, "
        f"failed with {type(error).__name__}: {error}. A model is cut only where that is known: use `pp_size=1` and "
        "leave `sequence_parallelism_mode` out, or pass an `example_batch` on which it runs."
    )
    failure = ConfigError(msg)
    failure.__cause__ = error
    return failure
