"""A pipeline's batches: one for the dry run, how others are cut into microbatches, and how outputs are put together.

The batch for the dry run is from the data loader that the model will be trained with, or the model's own dummy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.absent import is_absent, refuse
from booster_hybrid.random_streams import preserve_generators
from booster_runtime.data import fields_of, hides_tensors, leaves_by_path, num_samples, with_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn
    from torch.utils.data import DataLoader

    from booster_hybrid.config import PipelineConfig

    SplitHook = Callable[[Any, int], Iterable[tuple[Any, int]]]
    """Called with a batch and a number of microbatches; returns each microbatch with its number of samples."""


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


def cut_batch(
    batch: Any,
    config: PipelineConfig,
    hook: SplitHook | None = None,
) -> tuple[list[Any], list[int]]:
    """Return the microbatches of a batch, and their numbers of samples.

    Args:
        batch: As its data loader yields it, on this rank's device.
        config: How batches are cut.
        hook: Splits them in place of `split_batch`.

    Raises:
        ConfigError: If it can't be cut.
    """
    count = config.num_microbatches if config.microbatch_size is None else None
    if config.microbatch_size is None and count is None:
        count = config.size
    if hook is not None:
        return split_by_hook(hook, batch, count or config.size)
    sizes = share_samples(count_samples(batch), count, config.microbatch_size)
    return split_batch(batch, sizes), sizes


def count_samples(batch: Any) -> int:
    """Return how many samples a batch has; see `booster_runtime.data.num_samples`.

    Raises:
        ConfigError: If it has no tensors, they are of different lengths, or an object hides some.
    """
    for path, leaf in leaves_by_path(batch)[0]:
        if hides_tensors(leaf):
            msg = (
                f"The batch can't be split into microbatches: {path or 'it'} is a "
                f"`{type(leaf).__name__}` that holds tensors. Pass tensors in dicts, lists and tuples."
            )
            raise ConfigError(msg)
    return num_samples(batch)


def share_samples(count: int, num_microbatches: int | None, microbatch_size: int | None) -> list[int]:
    """Return the number of samples of each microbatch.

    Args:
        count: Samples of the batch.
        num_microbatches: Into how many parts to cut it; the first ones have a sample more where it does not divide.
        microbatch_size: Samples in each part, where ``num_microbatches`` is ``None``; the last has what is left.

    Raises:
        ConfigError: If there are fewer samples than parts.
    """
    if num_microbatches is None:
        size = microbatch_size or count
        return [min(size, count - start) for start in range(0, count, size)]
    if count < num_microbatches:
        msg = (
            f"A batch of {count} sample(s) can't be split into `num_microbatches={num_microbatches}`. Use larger "
            "batches (`drop_last=True` leaves out a last small one), fewer microbatches, or `microbatch_size`."
        )
        raise ConfigError(msg)
    share, more = divmod(count, num_microbatches)
    return [share + (index < more) for index in range(num_microbatches)]


_COUNT = "num_items_in_batch"
"""The argument by which transformers' models divide a sum over a whole batch."""


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the microbatches of a batch, as views of its tensors.

    A number ``num_items_in_batch``, by which losses that are sums are divided, is shared out by samples: each
    microbatch's loss counts by its samples, so that these losses add up to the batch's.

    Args:
        batch: As for `count_samples`.
        sizes: Samples of each microbatch.
    """
    count, start, parts = sum(sizes), 0, []
    for size in sizes:

        def cut(tensor: torch.Tensor, first: int = start, length: int = size) -> torch.Tensor:
            return tensor.narrow(0, first, length) if tensor.dim() and tensor.shape[0] == count else tensor

        part = pytree.tree_map_only(torch.Tensor, cut, batch)
        if isinstance(part, dict) and _is_number(part.get(_COUNT)):
            part[_COUNT] = part[_COUNT] * size / count
        parts.append(part)
        start += size
    return parts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def split_by_hook(hook: SplitHook, batch: Any, count: int) -> tuple[list[Any], list[int]]:
    """Return the microbatches that a user's function makes of a batch, and their numbers of samples.

    Args:
        hook: The function.
        batch: As its data loader yields it, on this rank's device.
        count: The number of microbatches asked for; the function may return another.

    Raises:
        ConfigError: If it returns anything else than pairs of a microbatch and a positive number of samples.
    """
    pairs = [*hook(batch, count)]
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or isinstance(pair[1], bool) or not isinstance(pair[1], int) or pair[1] < 1:
            found = f"({type(pair[0]).__name__}, {pair[1]!r})" if is_pair else f"`{type(pair).__name__}`"
            msg = (
                "`split_batch(batch, num_microbatches)` must return pairs `(microbatch, num_samples)` with at least "
                f"one sample each; it returned {found}."
            )
            raise ConfigError(msg)
    if not pairs:
        msg = "`split_batch(batch, num_microbatches)` returned no microbatches. Return one pair or more."
        raise ConfigError(msg)
    return [part for part, _ in pairs], [size for _, size in pairs]


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the outputs of a whole batch from those of its microbatches.

    Args:
        outputs: What the model returned for each, all of one form.
        sizes: Samples of each.

    Returns:
        In the same form: tensors whose first dimension is that of samples, or a multiple of it, put together, other
        floating tensors averaged over samples; what is no tensor is that of the first microbatch if it is a plain
        value, else (a cache) ``None``.

    Raises:
        ConfigError: If all of it is an object of a class that can't be opened, or a tensor may have its samples along
            another dimension.
    """
    if pytree.tree_is_leaf(outputs[0]) and fields_of(outputs[0]) is None and hides_tensors(outputs[0]):
        msg = (
            f"The model's outputs of class `{type(outputs[0]).__name__}` can't be joined over microbatches. Return "
            "tensors in a dict, list, tuple or dataclass, or leave `return_outputs` out."
        )
        raise ConfigError(msg)
    return _joined_nest(outputs, sizes)


def _joined_nest(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = outputs[0]
    if isinstance(first, dict) and ({*map(tuple, outputs)} != {tuple(first)} or _has_nests(first.values())):
        # Models leave out what they do not compute for a microbatch, such as the states of its images.
        joined = {}
        for key in dict.fromkeys(key for each in outputs for key in each):
            having = [(each[key], size) for each, size in zip(outputs, sizes, strict=True) if key in each]
            joined[key] = _joined_nest([value for value, _ in having], [size for _, size in having])
        return joined if type(first) is dict else type(first)(**joined)
    if isinstance(first, list) and all(map(_is_by_sample, outputs, sizes)):
        return [entry for each in outputs for entry in each]
    flat = [pytree.tree_flatten(each) for each in outputs]
    leaves = [_joined([leaves[index] for leaves, _ in flat], sizes) for index in range(len(flat[0][0]))]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _has_nests(values: Iterable[Any]) -> bool:
    return any(isinstance(each, (dict, list)) for each in values)


def _is_by_sample(entries: Any, size: int) -> bool:
    """Return whether a list has a tensor for each sample, none of which has a dimension of samples itself."""
    return len(entries) == size and all(
        isinstance(each, torch.Tensor) and each.dim() > 0 and each.shape[0] != size for each in entries
    )


def _joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    fields = [fields_of(value) for value in values]
    if fields[0] is not None:
        return with_fields(
            first, {name: _joined_nest([(each or {})[name] for each in fields], sizes) for name in fields[0]}
        )
    if not isinstance(first, torch.Tensor):
        return first if isinstance(first, (bool, int, float, str, type(None))) else None
    if any(map(is_absent, values)):
        refuse("return_outputs=True", values)
    tensors = [value.detach() for value in values]
    if _is_of_samples(tensors, sizes):
        return torch.cat(tensors) if len({tensor.shape[1:] for tensor in tensors}) == 1 else tensors
    if first.is_floating_point() and len({tensor.shape for tensor in tensors}) == 1:
        total = sum(sizes)
        return torch.stack([tensor * (size / total) for tensor, size in zip(tensors, sizes, strict=True)]).sum(0)
    return tensors


def _is_of_samples(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    """Return whether outputs have one entry, or several, for each sample in their first dimension.

    Raises:
        ConfigError: If another dimension is as long as each microbatch, and the first one is not.
    """
    pairs = list(zip(tensors, sizes, strict=True))
    as_long = [
        dim for dim in range(tensors[0].dim()) if all(each.dim() > dim and each.shape[dim] == n for each, n in pairs)
    ]
    if as_long and as_long[0] and len(tensors) > 1:
        msg = (
            f"It is not known which dimension of an output of shape {tuple(tensors[0].shape)} stands for samples. "
            "Return it with samples first, or leave `return_outputs` out."
        )
        raise ConfigError(msg)
    return all(each.dim() and each.shape[0] * sizes[0] == tensors[0].shape[0] * n for each, n in pairs) and (
        tensors[0].shape[0] % sizes[0] == 0
    )
