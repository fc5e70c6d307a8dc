"""Data loaders of a user's own class that deal their samples to ranks: the class and its attributes stay.

The dealt loader's class extends the user's, and below it `DistributedDataLoader`: where the user's ``__iter__`` calls
``super().__iter__()`` it gets this rank's batches. That it hands out each of them is checked batch by batch, because
anything else would show ranks other samples than their own, or make them wait for each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader

from booster_core.errors import ConfigError
from booster_runtime.data.loader import DistributedDataLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def iterates_itself(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's class has an ``__iter__`` or ``_get_iterator`` of its own.

    Collective: none.
    """
    return any(getattr(type(loader), name) is not vars(DataLoader)[name] for name in ("__iter__", "_get_iterator"))


def maker_like(loader: DataLoader[Any]) -> Callable[..., DataLoader[Any]]:
    """Return a function that makes dealt loaders of a loader's class, with its attributes.

    Args:
        loader: The user's loader.

    Returns:
        A function with the arguments of `DistributedDataLoader`.

    Raises:
        ConfigError: If the class makes iterators in a way of its own, which may ignore the sampler.

    Collective: none.
    """
    kind = type(loader)
    if kind is DataLoader:
        return DistributedDataLoader
    if kind._get_iterator is not DataLoader._get_iterator:  # noqa: SLF001 - no public name
        msg = (
            f"The data loader is a `{kind.__name__}` with a `_get_iterator` of its own, so its samples can't be split "
            "between ranks. Pass a plain `DataLoader`, or leave it out of `boost` and let it split samples by rank "
            "itself."
        )
        raise ConfigError(msg)
    described = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    dealt_kind = cast("type[DistributedDataLoader]", type(kind.__name__, (_Checked, kind, _Counted), described))

    def make(*args: Any, **kwargs: Any) -> DataLoader[Any]:
        dealt = dealt_kind.__new__(dealt_kind)
        # torch refuses to change a loader that is initialised, and one with persistent workers keeps its iterator.
        skipped = ("_DataLoader__", "_iterator")
        own = {name: value for name, value in vars(loader).items() if not name.startswith(skipped)}
        vars(dealt).update(own)
        DistributedDataLoader.__init__(dealt, *args, **kwargs)
        return dealt

    return make


class _Counted(DistributedDataLoader):
    """Counts the batches that the user's ``__iter__`` has drawn."""

    num_drawn = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator class
        for self.num_drawn, batch in enumerate(super().__iter__(), start=1):
            yield batch


class _Checked:
    """Checks that the user's ``__iter__`` hands out each batch when it has drawn it."""

    num_drawn: int

    def __iter__(self) -> Iterator[Any]:
        self.num_drawn = 0
        for number, batch in enumerate(super().__iter__(), start=1):  # type: ignore[misc]  # the user's class
            if self.num_drawn != number:
                msg = (
                    f"`{type(self).__name__}.__iter__` has handed out {number} batches and drawn {self.num_drawn} from "
                    "`super().__iter__()`. To be split between ranks, it hands out each batch that it draws, before it "
                    "draws the next. Pass a plain `DataLoader`, or leave this one out of `boost` and let it split "
                    "samples by rank itself."
                )
                raise ConfigError(msg)
            yield batch
