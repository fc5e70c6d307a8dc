"""Documents of any length, packed into rows of one length, one after the other.

Positions start at 0 with each document, which is how models of transformers tell documents of a row apart: none attends
to another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils.data import IterableDataset

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor


class PackedDocuments(IterableDataset[dict[str, Any]]):
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
        super().__init__()
        if length < 1:
            msg = f"`length={length}` is no number of tokens in a row."
            raise ConfigError(msg)
        self._documents, self._length, self._key, self._ignore_index = documents, length, key, ignore_index
        self._num_read = 0
        self._loaded: Mapping[str, Any] | None = None
        # What has been read and not handed out: tokens, their labels, and their positions in their documents.
        self._tokens: list[int] = []
        self._labels: list[int] = []
        self._positions: list[int] = []

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

    def shard(self, num_shards: int, index: int) -> PackedDocuments:
        """Return the rows of one shard."""
        documents: Any = self._documents
        part = documents.shard(num_shards=num_shards, index=index)
        return PackedDocuments(part, self._length, key=self._key, ignore_index=self._ignore_index)

    def set_epoch(self, epoch: int) -> None:
        """Tell the documents the epoch, where they ask for it."""
        set_epoch = getattr(self._documents, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the documents have been read, and the tokens that were not handed out."""
        if self._loaded is not None:  # no pass has begun since
            return dict(self._loaded)
        own = getattr(self._documents, "state_dict", None)
        return {
            "documents": own() if callable(own) else None,
            "num_read": self._num_read,
            "tokens": list(self._tokens),
            "labels": list(self._labels),
            "positions": list(self._positions),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from there; documents that can't tell their position are read again."""
        self._loaded = state
        if state["documents"] is not None:
            documents: Any = self._documents
            documents.load_state_dict(state["documents"])

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        state, self._loaded = self._loaded or {}, None
        self._tokens, self._labels = list(state.get("tokens", ())), list(state.get("labels", ()))
        self._positions, self._num_read = list(state.get("positions", ())), state.get("num_read", 0)
        yield from self._rows()
        skipped = self._num_read if state.get("documents") is None else 0
        for number, document in enumerate(self._documents):
            if number >= skipped:
                self._take(document, number)
                yield from self._rows()

    def _take(self, document: Any, number: int) -> None:
        has_names = hasattr(document, "keys")
        tokens = document[self._key] if has_names else document
        labels = document["labels"] if has_names and "labels" in document else tokens
        if len(labels) != len(tokens):
            msg = f"Document {number} has {len(tokens)} tokens and {len(labels)} labels. Give each token one."
            raise ConfigError(msg)
        self._num_read += 1
        self._tokens += map(int, tokens)
        self._labels += map(int, labels)
        self._positions += range(len(tokens))

    def _rows(self) -> Iterator[dict[str, Tensor]]:
        while len(self._tokens) >= self._length:
            length = self._length
            starts = torch.tensor(self._positions[:length])
            row = {
                "input_ids": torch.tensor(self._tokens[:length]),
                "position_ids": starts,
                "labels": torch.tensor(self._labels[:length]).masked_fill_(starts == 0, self._ignore_index),
            }
            # What is left of a document is one of its own in the next row.
            rest = self._positions[length:]
            cut = rest[0] if rest else 0
            end = rest.index(0) if 0 in rest else len(rest)
            self._tokens, self._labels = self._tokens[length:], self._labels[length:]
            self._positions = [position - cut for position in rest[:end]] + rest[end:] if cut else rest
            yield row


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
