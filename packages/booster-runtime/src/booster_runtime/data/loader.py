"""A data loader that splits its samples between ranks and knows how far it has come in their global order."""

from __future__ import annotations

import base64
import inspect
import weakref
import zlib
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from booster_core.checkpoint_io import GlobalPosition
from booster_core.errors import CheckpointError, ConfigError
from booster_runtime.data.batches import move_batch
from booster_runtime.data.iterable import CountedCollate, ShardedIterable
from booster_runtime.data.order import GlobalOrder, wrap_seed
from booster_runtime.data.streams import StreamShards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.utils.data import Dataset


class DistributedDataLoader(DataLoader[Any], GlobalPosition):
    """A ``DataLoader`` whose position is counted in samples of the global order, as batches are handed out.

    Batches that workers have prefetched don't count until they are handed out. The epoch moves on by itself: at the end
    of a pass, and where a new pass begins although the one before was left early. `set_epoch` chooses another one.

    All ranks get equally many batches, so samples at the end of an epoch are repeated where they don't divide by the
    number of ranks. `without_padding` leaves the repeated ones out, for metrics in which each sample counts once.

    Args:
        dataset: A data set, or a `ShardedIterable`.
        world_size: Number of ranks that see different samples.
        seed: Seeds the workers (per rank and epoch).
        rank: Index of this rank among them.
        **kwargs: The arguments of ``DataLoader``. A ``generator`` decides on the workers' seeds in place of ``seed``.
    """

    def __init__(self, dataset: Dataset[Any], *, rank: int, world_size: int, seed: int, **kwargs: Any) -> None:
        generator = kwargs.pop("generator", None)
        self._user_generator = None if generator is torch.default_generator else generator
        super().__init__(dataset, generator=torch.Generator(), **kwargs)
        if isinstance(dataset, StreamShards):
            self.collate_fn = CountedCollate(self.collate_fn, dataset.progress, is_batched=self.batch_size is not None)
        elif isinstance(dataset, ShardedIterable):
            self.collate_fn = CountedCollate(
                self.collate_fn, dataset.take_first, is_batched=self.batch_size is not None
            )
        orders = (each for each in (self.sampler, self.batch_sampler, dataset) if isinstance(each, GlobalOrder))
        self._order = next(orders, None)
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._position = 0
        self._epoch = 0
        # Whether a pass has handed out batches and not come to its end.
        self._is_inside = False
        self._generator_states: list[torch.Tensor] = []
        # Samples of the batch handed out last, and how many of them, at its end, are padding; None where not known.
        self._num_in_batch: int | None = None
        self._num_padded = 0
        self._number = 0
        self._start = 0
        self._ahead: Callable[[], _Ahead | None] = lambda: None
        # Called with the number of each batch and its epoch, where the loader is boosted on several ranks.
        self.on_batch: Callable[[int, int], None] | None = None
        # Called with the number of each batch of a stream that ranks read in turn, and what `take_first` returned.
        self.on_item: Callable[[int, str | None], None] | None = None
        # Called when a pass begins, before its first batch is drawn; it may load a position.
        self.before_pass: Callable[[], object] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is being, or is about to be, iterated."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration follows.

        Collective: none, but every rank must choose the same.
        """
        if epoch != self._epoch:
            self._position = 0
        self._epoch = epoch
        self._is_inside = False
        for target in (self.sampler, self.batch_sampler, self.dataset, super()):  # the user's class may have one
            set_epoch = getattr(target, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator class
        if self.before_pass is not None:
            self.before_pass()
        order = self._order
        self.set_epoch(self._next_epoch())
        if order is not None:
            order.is_epoch_chosen = False
        self._generator_states = [generator.get_state() for generator in self._generators()]
        seed = (self._seed * 1_000_003 + self._epoch) if self._user_generator is None else self._draw_seed()
        # Workers draw their seeds from here: another on every rank and in every epoch, the same in a resumed run.
        self.generator.manual_seed(wrap_seed(seed * 65_537 + self._rank))
        self._position = self._start = start = 0 if order is None else order.start
        per_rank = self.batch_size or 1
        batches: Iterator[Any] = super().__iter__()
        if isinstance(order, StreamShards):
            batches = order.shared_out(batches)
        ahead = _Ahead(batches)
        self._ahead = weakref.ref(ahead)  # workers end with a pass that is left early
        for number, batch in enumerate(ahead, start=1):
            if order is not None:
                order.start = 0  # the next iteration begins a pass of its own
            position = start + number * per_rank * self._world_size
            end = None if order is None else order.num_entries
            self._position = position if end is None else min(position, end)
            self._is_inside = True
            self._number = number
            if self.on_batch is not None:
                self.on_batch(number, self._epoch)
            collated = self._opened(batch, start, number)
            yield collated if self.device is None else move_batch(collated, self.device)
        self.set_epoch(self._epoch + 1)
        if order is not None:
            order.is_epoch_chosen = False

    @property
    def num_samples(self) -> int | None:
        """Entries of the global order: samples, or batches of a batch sampler; ``None`` where that is not known."""
        return None if self._order is None else self._order.num_samples

    @property
    def number(self) -> int:
        """Number of the batch handed out last, from 1 in its pass; 0 before the first."""
        return self._number

    def count_left(self, most: int) -> int:
        """Return how many batches follow in the pass, counted up to ``most``.

        Where the length of a pass is not known, as of streams and samplers of the user's, batches are read ahead.

        Collective: of a stream that is read by shards, every rank of the world.
        """
        shares = None if self._order is None else self._order.shares(self._start)
        if shares is None:
            ahead = self._ahead()
            return 0 if ahead is None else ahead.read(most)
        total, per_batch = shares[0], self.batch_size or 1
        return (total // per_batch if self.drop_last else -(-total // per_batch)) - self._number

    @property
    def splits_batches(self) -> bool:
        """Whether whole batches, as a batch sampler or the data set makes them, go to ranks in turn."""
        return self.batch_size is None

    def without_padding(self, values: Any) -> Any:
        """Return values computed from the batch handed out last, without those of repeated samples.

        Only batches at an epoch's end have such samples, and only on some ranks, where nothing may be left.

        Args:
            values: Tensors in any nest of dicts, lists and tuples, each with one value per sample of this rank's batch
                along its first dimension.

        Raises:
            TypeError: If a value is no tensor.
            ConfigError: If a tensor has not one value per sample.
        """
        return pytree.tree_map(self._real_part, values)

    def counted_part(self, batch: Any) -> tuple[Any, Any, float]:
        """Return the batch handed out last without repeated samples, and what part of a full batch it counts as.

        Returns:
            The samples that count, or the whole batch where there are none or it can't be cut by samples; a function
            that gives values computed from them one row per sample of the whole batch again; and the part, from 0 to 1.
        """
        total, padded = self._num_in_batch, self._num_padded
        if total is None:
            return batch, lambda values: values, 0.0 if padded else 1.0
        real, part = total - padded, (total - padded) / (self.batch_size or 1)
        lengths = {len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if not padded or not real or lengths != {total}:
            return batch, lambda values: values, part
        # The last row stands for those that `without_padding` leaves out.
        rows = torch.arange(total).clamp(max=real - 1)
        return _by_rows(batch, total, slice(real)), lambda values: _by_rows(values, real, rows), part

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the position in samples of the global order; the same on every rank.

        Where the data loader was given generators, their states are part of it, and of a stream that is read by shards
        the position in each.

        Raises:
            CheckpointError: If the loader has a sampler of the user's, whose position is unknown.

        Collective: of a stream that is read by shards, every rank of the world.
        """
        order = self._positioned_order("saved")
        state: dict[str, Any] = {
            "epoch": self._epoch,
            "position": self._position,
            "num_samples": self.num_samples,
            "seed": self._seed if order.seed is None else order.seed,
        }
        if isinstance(order, StreamShards):
            state["shards"] = [order.num_shards, order.gathered_positions() if self._position else {}]
        if order.digest is not None and self._position:
            state["order"] = order.digest
        generators = self._generators()
        if generators:
            # Inside of an epoch, what drew its order; else what will draw the next one.
            inside = self._generator_states if self._position and self._generator_states else None
            states = inside or [generator.get_state() for generator in generators]
            state["generators"] = [_packed(values) for values in states]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a run with any number of ranks stood: the next iteration yields what it had not seen.

        Raises:
            CheckpointError: If the position was saved for a data set of another size, can't be restored with this
                loader's settings, or belongs to an order that the user's sampler does not draw a second time.
        """
        order = self._positioned_order("restored")
        if state["num_samples"] != self.num_samples:
            msg = (
                f"The position was saved for a data set of {state['num_samples']} samples; this one has "
                f"{self.num_samples}. Load it with the same data set, or start a new epoch."
            )
            raise CheckpointError(msg)
        if isinstance(order, ShardedIterable):
            order.restore(state, num_workers=self.num_workers, is_persistent=self.persistent_workers)
        generators, states = self._generators(), state.get("generators", [])
        if states and len(states) != len(generators):
            msg = (
                f"The position was saved for a data loader with {len(states)} generators; this one has "
                f"{len(generators)}. Make the loader as in the run that saved it."
            )
            raise CheckpointError(msg)
        for generator, packed in zip(generators, states, strict=False):
            generator.set_state(_unpacked(packed))
        if order.seed is not None and state["seed"] is not None:
            order.seed = int(state["seed"])
        self.set_epoch(int(state["epoch"] or 0))
        self._position = order.start = int(state["position"] or 0)
        self._generator_states = [generator.get_state() for generator in generators]
        if self._position and state.get("order") != self.order_digest():
            msg = (
                "The position can't be restored: the data loader's sampler draws another order than in the run that "
                f"saved it, so that it is unknown which of epoch {self._epoch}'s samples were seen. Make the sampler "
                "as in that run. One with random numbers of its own has to take them from a `torch.Generator`, or "
                "seed them in `set_epoch`."
            )
            raise CheckpointError(msg)

    def order_digest(self) -> str | None:
        """Return a digest of the order that the user's sampler draws next; ``None`` without one.

        Collective: none; the same on every rank if they draw the same.
        """
        if self._order is None:
            return None
        generators = self._generators()
        states = [generator.get_state() for generator in generators]
        if self._user_generator is not None:
            self._draw_seed()  # as an iteration does before the sampler draws
        digest = self._order.peek(keep=not generators)
        for generator, values in zip(generators, states, strict=True):
            generator.set_state(values)
        return digest

    def _positioned_order(self, verb: str) -> GlobalOrder:
        if self._order is None:
            msg = (
                f"The position of this data loader can't be {verb}: its sampler is a `{type(self.sampler).__name__}`. "
                "Leave `distributed_sampler_cls` out, or keep the position yourself in `extra`."
            )
            raise CheckpointError(msg)
        return self._order

    def _next_epoch(self) -> int:
        """Return the epoch that a pass follows which begins now."""
        order = self._order
        # Loops of torch's style set the epoch on the sampler.
        chosen = getattr(self.sampler if order is None else order, "epoch", None)
        if isinstance(chosen, int) and chosen != self._epoch:
            return chosen
        is_chosen = order is not None and order.is_epoch_chosen
        return self._epoch + 1 if self._is_inside and not is_chosen else self._epoch

    def _generators(self) -> list[torch.Generator]:
        """Return the user's generators that decide on orders and workers' seeds, each once."""
        found = [] if self._order is None else self._order.generators()
        if self._user_generator is not None:
            found.insert(0, self._user_generator)
        return list({id(generator): generator for generator in found}.values())

    def _draw_seed(self) -> int:
        """Draw from the user's generator what torch's own loader draws from it before the sampler does."""
        return int(torch.empty((), dtype=torch.int64).random_(generator=self._user_generator))

    def _opened(self, batch: Any, start: int, number: int) -> Any:
        """Note what is known of the batch of a number, and return what the user's function collated."""
        order = self._order
        if not isinstance(order, ShardedIterable):
            self._count_batch(start, number)
            return batch
        self._num_in_batch, self._num_padded, collated, told = batch
        if isinstance(order, StreamShards):
            order.hand_out(told)
        elif self.on_item is not None:
            self.on_item(number, told)
        return collated

    def _count_batch(self, start: int, number: int) -> None:
        """Note how many entries the batch of a number has, and how many are padding."""
        if self._order is None:
            self._num_in_batch, self._num_padded = None, 0
            return
        per_rank = self.batch_size or 1
        before, after = (number - 1) * per_rank, number * per_rank
        shares = self._order.shares(start)
        total, real = (after, after) if shares is None else shares
        self._num_in_batch = None if self.batch_size is None else min(after, total) - before
        self._num_padded = max(min(after, total) - max(real, before), 0)

    def _real_part(self, values: Any) -> torch.Tensor:
        if not isinstance(values, torch.Tensor):
            msg = f"Values per sample are tensors; got `{type(values).__name__}`."
            raise TypeError(msg)
        if not values.dim() or self._num_in_batch not in (None, len(values)):
            asked = "" if self._num_in_batch is None else f", {self._num_in_batch} here"
            msg = (
                f"A tensor of shape {tuple(values.shape)} has not one value per sample: its first dimension counts the "
                f"samples of this rank's last batch{asked}. Reduce over other dimensions only."
            )
            raise ConfigError(msg)
        if not self._num_padded:
            return values
        return values[:0] if self.splits_batches else values[: len(values) - self._num_padded]


class _Ahead:
    """Batches in their order, of which some may be read before they are asked for."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._read: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        while self.read(1):
            yield self._read.popleft()

    def read(self, number: int) -> int:
        """Read on until there are so many, or no more; return how many there are."""
        self._read.extend(islice(self._batches, max(number - len(self._read), 0)))
        return len(self._read)


def loader_of(batches: object) -> DistributedDataLoader | None:
    """Return the loader over which an iterator is a pass; ``None`` where it is none or has been wrapped."""
    if inspect.isgenerator(batches) and batches.gi_code is DistributedDataLoader.__iter__.__code__:
        loader: DistributedDataLoader | None = inspect.getgeneratorlocals(batches).get("self")
        return loader
    return None


def _by_rows(values: Any, number: int, rows: Any) -> Any:
    """Return rows of the tensors that have a number of them."""

    def taken(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == number else leaf

    return pytree.tree_map(taken, values)


def _packed(state: torch.Tensor) -> str:
    return base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()


def _unpacked(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)
