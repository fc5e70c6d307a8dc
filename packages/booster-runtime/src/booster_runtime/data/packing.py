"""Documents of any length, packed into rows of one length: one after the other, or by first fit.

Positions start at 0 with each document, which is how models of transformers tell documents of a row apart: none attends
to another.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.data import IterableDataset

from booster_core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor


class _Document(NamedTuple):
    """Token ids, and a label for each."""

    tokens: list[int]
    labels: list[int]


class _Rows(IterableDataset[dict[str, Any]], ABC):
    """Rows of documents that are read shard by shard, and know how many documents were read."""

    def __init__(self, documents: Iterable[Any], length: int, *, key: str, ignore_index: int) -> None:
        super().__init__()
        if length < 1:
            msg = f"`length={length}` is no number of tokens in a row."
            raise ConfigError(msg)
        self._documents, self._length, self._key, self._ignore_index = documents, length, key, ignore_index
        self._num_read = 0
        self._loaded: Mapping[str, Any] | None = None

    @property
    def sources(self) -> tuple[Any, ...]:
        """What the documents are read from."""
        return (self._documents,)

    @property
    def num_shards(self) -> int:
        """Number of shards of the documents.

        Raises:
            AttributeError: If they have none.
        """
        found: int = self._documents.num_shards  # type: ignore[attr-defined]  # raises as it should where absent
        return found

    def shard(self, num_shards: int, index: int) -> _Rows:
        """Return the rows of one shard."""
        documents: Any = self._documents
        return self._over(documents.shard(num_shards=num_shards, index=index))

    @abstractmethod
    def _over(self, documents: Iterable[Any]) -> _Rows:
        """Return the same over other documents."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the documents the epoch, where they ask for it."""
        set_epoch = getattr(self._documents, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from there; documents that can't tell their position are read again."""
        self._loaded = state
        if state["documents"] is not None:
            documents: Any = self._documents
            documents.load_state_dict(state["documents"])

    def _position(self) -> Any:
        """Return the documents' own position; ``None`` where they can't tell it."""
        own = getattr(self._documents, "state_dict", None)
        return own() if callable(own) else None

    def _read(self, state: Mapping[str, Any]) -> Iterator[_Document]:
        """Yield the documents that follow a position, and count them."""
        self._num_read = state.get("num_read", 0)
        skipped = self._num_read if state.get("documents") is None else 0
        for number, document in enumerate(self._documents):
            if number < skipped:
                continue
            has_names = hasattr(document, "keys")
            tokens = document[self._key] if has_names else document
            labels = document["labels"] if has_names and "labels" in document else tokens
            if len(labels) != len(tokens):
                msg = f"Document {number} has {len(tokens)} tokens and {len(labels)} labels. Give each token one."
                raise ConfigError(msg)
            self._num_read += 1
            yield _Document(list(map(int, tokens)), list(map(int, labels)))

    def _row(self, tokens: list[int], labels: list[int], positions: list[int]) -> dict[str, Tensor]:
        starts = torch.tensor(positions)
        return {
            "input_ids": torch.tensor(tokens),
            "position_ids": starts,
            "labels": torch.tensor(labels).masked_fill_(starts == 0, self._ignore_index),
        }


class PackedDocuments(_Rows):
    """Rows of ``length`` tokens from a stream of documents, for a data loader that `boost` splits between ranks.

    Documents come one after the other. One that does not fit goes on in the next row, as a document of its own.

    A row has ``input_ids``, ``position_ids`` and ``labels``, each of shape ``(length,)``. The label of a document's
    first token is ``ignore_index``: nothing before it predicts it. Tokens that don't fill a row at the end of a shard
    are left out.

    Args:
        documents: Yields sequences of token ids, or mappings that have them under ``key``, and labels, where they
            differ, under ``"labels"``; with ``shard`` and ``state_dict`` as streams of ``datasets`` have them, it is
            split and restored by these.
        length: Tokens in a row.
        key: Where the token ids are.
        ignore_index: Label of tokens that don't count.

    Raises:
        ConfigError: If ``length`` is not positive; while iterating, if a document has not one label for each token.
    """

    def __init__(
        self, documents: Iterable[Any], length: int, *, key: str = "input_ids", ignore_index: int = -100
    ) -> None:
        super().__init__(documents, length, key=key, ignore_index=ignore_index)
        # What has been read and not handed out: tokens, their labels, and their positions in their documents.
        self._tokens: list[int] = []
        self._labels: list[int] = []
        self._positions: list[int] = []

    def _over(self, documents: Iterable[Any]) -> PackedDocuments:
        return PackedDocuments(documents, self._length, key=self._key, ignore_index=self._ignore_index)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the documents have been read, and the tokens that were not handed out."""
        if self._loaded is not None:  # no pass has begun since
            return dict(self._loaded)
        return {
            "documents": self._position(),
            "num_read": self._num_read,
            "tokens": list(self._tokens),
            "labels": list(self._labels),
            "positions": list(self._positions),
        }

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        state, self._loaded = self._loaded or {}, None
        self._tokens, self._labels = list(state.get("tokens", ())), list(state.get("labels", ()))
        self._positions, self._num_read = list(state.get("positions", ())), state.get("num_read", 0)
        yield from self._rows()
        for document in self._read(state):
            self._tokens += document.tokens
            self._labels += document.labels
            self._positions += range(len(document.tokens))
            yield from self._rows()

    def _rows(self) -> Iterator[dict[str, Tensor]]:
        while len(self._tokens) >= self._length:
            length = self._length
            row = self._row(self._tokens[:length], self._labels[:length], self._positions[:length])
            # What is left of a document is one of its own in the next row.
            rest = self._positions[length:]
            cut = rest[0] if rest else 0
            end = rest.index(0) if 0 in rest else len(rest)
            self._tokens, self._labels = self._tokens[length:], self._labels[length:]
            self._positions = [position - cut for position in rest[:end]] + rest[end:] if cut else rest
            yield row


class FirstFitDocuments(_Rows):
    """Rows of ``length`` tokens that have whole documents, for a data loader that `boost` splits between ranks.

    Documents of a window are put, the longest first, into the first row that has room (first fit decreasing: Johnson
    1973, "Near-optimal bin packing algorithms"). Those that leave rows open go into the next window; at the end of a
    shard all are handed out. Documents longer than a row are cut into several. A row has ``input_ids``,
    ``position_ids`` and ``labels``, each of shape ``(length,)``; padding is a document of its own, without labels.

    All rows have equally many tokens, and so cost the same but for attention: the sum of squares of the documents'
    lengths. Rows that cost about the same come together in one step, so that no rank waits long for another; steps of
    a window come in an order that ``seed`` draws.

    Args:
        documents: As for `PackedDocuments`.
        length: Tokens in a row.
        window: Rows that are packed together. More leave less padding; their documents are read ahead.
        step_rows: Rows of a step: the batch size times the ranks that see different samples and the batches that are
            accumulated. Divides ``window``.
        seed: Of the order of steps; equal on all ranks.
        key: Where the token ids are.
        ignore_index: Label of tokens that don't count.
        pad_token_id: Fills rows up.

    Raises:
        ConfigError: If ``length`` is not positive, or ``step_rows`` does not divide ``window``; while iterating, if a
            document has not one label for each token.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        length: int,
        *,
        window: int = 256,
        step_rows: int = 1,
        seed: int = 0,
        key: str = "input_ids",
        ignore_index: int = -100,
        pad_token_id: int = 0,
    ) -> None:
        super().__init__(documents, length, key=key, ignore_index=ignore_index)
        if step_rows < 1 or window < 1 or window % step_rows:
            msg = f"`window={window}` is no multiple of `step_rows={step_rows}`: a window has the rows of whole steps."
            raise ConfigError(msg)
        self._window, self._step_rows, self._seed, self._pad_token_id = window, step_rows, seed, pad_token_id
        self._epoch = 0
        # Where the present window begins, and how many of its rows were handed out.
        self._begin: dict[str, Any] = {"documents": None, "num_read": 0, "carried": [], "window": 0}
        self._num_rows = 0

    def _over(self, documents: Iterable[Any]) -> FirstFitDocuments:
        settings: dict[str, Any] = {name: getattr(self, f"_{name}") for name in ("window", "step_rows", "seed", "key")}
        settings |= {"ignore_index": self._ignore_index, "pad_token_id": self._pad_token_id}
        return FirstFitDocuments(documents, self._length, **settings)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of steps, and tell the documents the epoch, where they ask for it."""
        super().set_epoch(epoch)
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return where the present window begins, and how many of its rows were handed out."""
        if self._loaded is not None:  # no pass has begun since
            return dict(self._loaded)
        return {**self._begin, "num_rows": self._num_rows, "settings": self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from there; documents that can't tell their position are read again.

        Raises:
            CheckpointError: If the rows were packed in another way.
        """
        if state["settings"] != self._settings():
            msg = (
                f"The position was saved for rows packed with {state['settings']}, and these are packed with "
                f"{self._settings()}: others would follow. Pack them as in the run that saved it."
            )
            raise CheckpointError(msg)
        super().load_state_dict(state)

    def _settings(self) -> dict[str, int]:
        names = ("length", "window", "step_rows", "seed")
        return {name: getattr(self, f"_{name}") for name in names}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        state, self._loaded = self._loaded or {}, None
        carried = [_Document(*each) for each in state.get("carried", ())]
        number, self._num_rows = state.get("window", 0), state.get("num_rows", 0)
        reader = self._read(state)
        position, self._num_read = state.get("documents"), state.get("num_read", 0)
        is_over = False
        while not is_over:
            begin = {"documents": position, "num_read": self._num_read, "window": number}
            self._begin = {**begin, "carried": [list(each) for each in carried]}
            documents, num_tokens = carried, sum(len(each.tokens) for each in carried)
            while num_tokens < self._window * self._length and not is_over:
                document = next(reader, None)
                is_over = document is None
                if document is not None:
                    documents += self._cut(document)
                    num_tokens += len(document.tokens)
            position = self._position()
            rows = first_fit([len(each.tokens) for each in documents], self._length)
            kept = [] if is_over else rows[self._window :]
            carried = [documents[index] for row in kept for index in row]
            chosen = [[documents[index] for index in row] for row in rows[: len(rows) - len(kept)]]
            for row in self._in_steps(chosen, number)[self._num_rows :]:
                self._num_rows += 1
                yield self._joined(row)
            self._num_rows, number = 0, number + 1

    def _cut(self, document: _Document) -> list[_Document]:
        starts = range(0, len(document.tokens), self._length)
        return [_Document(*(part[start : start + self._length] for part in document)) for start in starts]

    def _in_steps(self, rows: list[list[_Document]], number: int) -> list[list[_Document]]:
        """Return the rows of a window by steps whose rows cost about the same; an incomplete step is the last."""
        rows.sort(key=lambda row: sum(len(each.tokens) ** 2 for each in row))
        size = self._step_rows
        steps = [rows[first : first + size] for first in range(len(rows) % size, len(rows), size)]
        random.Random(f"{self._seed} {self._epoch} {number}").shuffle(steps)  # noqa: S311 - no secrets
        return [row for step in (*steps, rows[: len(rows) % size]) for row in step]

    def _joined(self, row: list[_Document]) -> dict[str, Tensor]:
        num_padded = self._length - sum(len(each.tokens) for each in row)
        padding = _Document([self._pad_token_id] * num_padded, [self._ignore_index] * num_padded)
        documents = [*row, padding]
        tokens, labels = ([value for each in part for value in each] for part in zip(*documents, strict=True))
        return self._row(tokens, labels, [position for each in documents for position in range(len(each.tokens))])


def first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Put items, the longest first, each into the first row that has room; rows come by their earliest item.

    Args:
        lengths: Of the items; none is longer than a row.
        room: Length of a row.

    Returns:
        The numbers of the items of each row, in increasing order.
    """
    size = 1 << max(len(lengths) - 1, 0).bit_length()
    # A tree over the rows: what is left in one at the bottom, and above the most that is left in either half.
    most = [room] * (2 * size)
    rows: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        node = 1
        while node < size:
            node = 2 * node + (most[2 * node] < lengths[index])
        rows.setdefault(node, []).append(index)
        most[node] -= lengths[index]
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return sorted(sorted(row) for row in rows.values())


def document_mask(position_ids: Tensor) -> Tensor:
    """Return who may see whom in rows of documents: earlier tokens of the same document.

    For models that take a mask for `torch.nn.functional.scaled_dot_product_attention`; those of transformers make
    their own from ``position_ids``.

    Args:
        position_ids: Of shape ``(batch, length)``; each document starts at 0.

    Returns:
        Shape ``(batch, 1, length, length)``, bool.
    """
    document = (position_ids == 0).cumsum(-1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def cu_seq_lens(position_ids: Tensor) -> dict[str, Any]:
    """Return where documents begin and end, as transformers' flash attention and its kernels take it.

    transformers finds documents by ``position_ids`` itself in a batch of one row only: pass these arguments to the
    model too where a batch has more.

    Args:
        position_ids: Of shape ``(batch, length)``; each document starts at 0.

    Returns:
        ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32, over the rows one after the other, and ``max_length_q`` and
        ``max_length_k``, integers.
    """
    starts = (position_ids.flatten() == 0).nonzero().flatten().to(torch.int32)
    bounds = functional.pad(starts, (0, 1), value=position_ids.numel())
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
