"""A batch for the dry run of a model, from the data loader that it will be trained with, or the model's own dummy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from booster_core.errors import ConfigError
from booster_hybrid.fixed_draws import preserve_generators
from booster_runtime.data import leaves_by_path

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

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


def check_entries(dataloader: DataLoader[Any] | None) -> None:
    """Raise if a data loader's batches have tensors that are not for each sample: microbatches would cut them.

    A vector of class weights may be as long as a batch, which does not show in the batch alone; so a batch of two
    samples is compared with one of a single sample, where the loader can be asked for them.

    Args:
        dataloader: As for `example_batch`.

    Raises:
        ConfigError: Naming the first such tensor.
    """
    if dataloader is None or isinstance(dataloader.dataset, IterableDataset) or dataloader.batch_sampler is None:
        return
    try:
        one, two = (_lengths_of(_collated(dataloader, number)) for number in (1, _SAMPLES))
    except Exception:  # noqa: BLE001 - not every collator takes one sample
        return
    for path, length in two.items():
        if one.get(path) == length > 1:
            msg = (
                f"The batch can't be split into microbatches: {path or 'it'} has {length} entries for {_SAMPLES} "
                f"samples and {length} for 1. What is for all samples, such as class weights, belongs into the "
                "criterion, or needs a first dimension of 1; what has rows of its own for each sample, such as the "
                "patches of images, is split by `HybridParallelPlugin(split_batch=...)`."
            )
            raise ConfigError(msg)


def _lengths_of(batch: Any) -> dict[str, int]:
    """Return the first dimension of each tensor of a batch by the tensor's path; scalars are left out."""
    leaves = leaves_by_path(batch)[0]
    return {path: leaf.shape[0] for path, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}


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
