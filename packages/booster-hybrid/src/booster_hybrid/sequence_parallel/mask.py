"""`SequenceMask`: who may attend to whom in the whole sequence, as transformers' models say it, before it is a tensor.

transformers' models make their masks through one interface, by the name of the attention that uses them. Ours
keeps the rule (causal, sliding, packed, padded, ...) instead of a tensor, so that each rank makes what it needs.

Which parts of the queries attend to which parts of the keys comes as blocks that a kernel computes in one call. A plain
causal or full attention needs one block for each visiting rank. Any other mask is cut into tiles: tiles that hide
everything are skipped, tiles that hide nothing are joined along the keys, and only the others need a mask, of their own
size. So a mask of the whole sequence never exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.flex_kernel import make_block_mask
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    _Range = tuple[int, int]
    from collections.abc import Callable, Mapping

    from torch import Tensor


TILE = 512
"""Largest number of queries, and of keys, of a block that needs a mask: 1 MiB of it in fp32 for each sample."""


@dataclass(frozen=True)
class Block:
    """Queries and keys whose scores one call of a kernel computes.

    Args:
        samples: Which samples of the batch.
        queries: Which of this rank's queries.
        keys: Which of the visiting keys.
        kind: ``"all"`` where every query sees every key, ``"causal"`` where query ``i`` of the block sees its keys up
            to ``i``, ``"some"`` where a mask says it.
        query_range: Positions of the queries in their sequence; only of blocks within one piece of it.
        key_range: Positions of the keys, likewise.
        number: Index of the block among those of one pass.
    """

    samples: slice
    queries: slice
    keys: slice
    kind: str
    query_range: _Range
    key_range: _Range
    number: int


def find_blocks(
    own: Sequence[_Range], theirs: Sequence[_Range], visibility: Visibility, *, first_number: int = 0, is_cut: bool
) -> Iterator[Block]:
    """Yield the blocks in which this rank's queries see some of a visiting rank's keys.

    Args:
        own: Positions of the queries, in increasing order.
        theirs: Positions of the keys.
        visibility: Who may attend to whom.
        first_number: Number of the first block.
        is_cut: Yield blocks of at most `TILE` queries and keys, each within one piece of either sequence.
    """
    is_plain = visibility.is_plain and not is_cut
    if is_plain and not visibility.is_causal:
        found = _everything(own, theirs)
    elif is_plain and (list(own) == list(theirs) or _are_apart(own, theirs)):
        found = _causal(own, theirs)
    else:
        found = _tiles(own, theirs, visibility, is_cut=is_cut)
    for number, (samples, queries, keys, kind, positions) in enumerate(found, first_number):
        yield Block(samples, queries, keys, kind, *positions, number)


def whole_block(own: Sequence[_Range], theirs: Sequence[_Range], number: int) -> Iterator[Block]:
    """Yield all of this rank's queries and of a visiting rank's keys as one block, for a kernel that takes rules."""
    for samples, queries, keys, _, positions in _everything(own, theirs):
        yield Block(samples, queries, keys, "some", *positions, number)


_Found = tuple[slice, slice, slice, str, tuple["_Range", "_Range"]]
_ALL = slice(None)
_NOWHERE = ((0, 0), (0, 0))


def _everything(own: Sequence[_Range], theirs: Sequence[_Range]) -> Iterator[_Found]:
    rows, columns = (sum(stop - start for start, stop in each) for each in (own, theirs))
    if rows and columns:
        yield _ALL, slice(0, rows), slice(0, columns), "all", _NOWHERE


def _are_apart(own: Sequence[_Range], theirs: Sequence[_Range]) -> bool:
    """Return whether each piece of the queries is before or after each piece of the keys."""
    return all(last <= start or stop <= first for first, last in own for start, stop in theirs)


def _causal(own: Sequence[_Range], theirs: Sequence[_Range]) -> Iterator[_Found]:
    """Yield the blocks under a causal mask of pieces that are the same, or of which none overlap.

    Positions on a rank are in the order of the sequence, so its own queries see its own keys by a triangle. What a
    query sees of another rank are the first of its keys.
    """
    if list(own) == list(theirs):
        rows = sum(stop - start for start, stop in own)
        if rows:
            yield _ALL, slice(0, rows), slice(0, rows), "causal", _NOWHERE
        return
    row, begin, seen = 0, 0, 0
    for first, last in own:
        now = sum(stop - start for start, stop in theirs if stop <= first)
        if now != seen:
            if seen and begin < row:
                yield _ALL, slice(begin, row), slice(0, seen), "all", _NOWHERE
            begin, seen = row, now
        row += last - first
    if seen and begin < row:
        yield _ALL, slice(begin, row), slice(0, seen), "all", _NOWHERE


def _tiles(
    own: Sequence[_Range], theirs: Sequence[_Range], visibility: Visibility, *, is_cut: bool
) -> Iterator[_Found]:
    row = 0
    for first, last in own:
        for band in _cuts(first, last):
            column = 0
            for start, stop in theirs:
                if start == stop:
                    continue
                for samples, kinds in visibility.kinds(band, (start, stop), _cuts(start, stop)):
                    for keys, kind in kinds if is_cut else _joined(kinds):
                        if kind != "none":
                            queries = slice(row + band[0] - first, row + band[1] - first)
                            yield samples, queries, _shifted(keys, column - start), kind, (band, keys)
                column += stop - start
        row += last - first


def _cuts(start: int, stop: int) -> list[_Range]:
    """Cut a range into tiles."""
    return [(each, min(each + TILE, stop)) for each in range(start, stop, TILE)]


def _joined(kinds: Sequence[tuple[_Range, str]]) -> list[tuple[_Range, str]]:
    """Join neighbors that hide nothing."""
    result: list[tuple[_Range, str]] = []
    for keys, kind in kinds:
        if result and kind == result[-1][1] == "all":
            result[-1] = ((result[-1][0][0], keys[1]), kind)
        else:
            result.append((keys, kind))
    return result


def _shifted(span: _Range, offset: int) -> slice:
    return slice(span[0] + offset, span[1] + offset)


_TILES_AT_ONCE = 4
"""Tiles of which it is found out together what they hide."""


class MaskUseError(ConfigError, AttributeError):
    """A layer computes with its mask itself, of which there is only the rule."""


def _refuse_use(*used: Any, **_: Any) -> NoReturn:
    what = f" (`{used[-1]}`)" if used and isinstance(used[-1], str) else ""
    msg = (
        f"A layer computes with its attention mask itself{what} instead of passing it to attention, so that its "
        "sequences can't be split. Use 'split_gather' with `tp_size`, or leave `sequence_parallelism_mode` out."
    )
    raise MaskUseError(msg)


@dataclass(eq=False)
class SequenceMask:
    """Who may attend to whom in a batch of whole sequences.

    Args:
        batch_size: Number of sequences.
        length: Number of positions that look.
        key_length: Number of positions that are looked at; the same ones, or those of another sequence.
        rule: Whether a query may see a key, of broadcast indices ``(batch, head, query, key)``.
        padding: Positions that may be seen, shape ``(batch, key length)``, bool; ``None`` for all.
        arguments: What else the model asked of the mask.
    """

    batch_size: int
    length: int
    key_length: int
    rule: Callable[..., Tensor]
    padding: Tensor | None
    arguments: Mapping[str, Any]
    _whole: tuple[Tensor | None] | None = field(default=None, repr=False)
    known: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What `Visibility` has found out, for all layers."""

    ndim = 0
    """Models that add biases to masks of four dimensions pass them to their layers instead."""

    def __post_init__(self) -> None:
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        if self.padding is not None and bool(self.padding.all()):
            self.padding = None
        causal: Any = causal_mask_function
        plain: tuple[Any, ...] = (causal, bidirectional_mask_function)
        self.is_causal = self.rule is causal
        """Whether no query sees a later key; ``False`` may mean that it is not known."""
        self.is_plain = self.padding is None and self.rule in plain
        """Whether nothing else masks anything."""

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_use
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = __lt__ = __gt__ = _refuse_use

    def __getattr__(self, name: str) -> Any:
        """Refuse what only tensors have.

        Raises:
            ConfigError: On every rank that asks for it.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_use(name)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any, **__: Any) -> Any:
        """Refuse what is computed with the mask.

        Raises:
            ConfigError: On every rank that does.
        """
        _refuse_use(getattr(func, "__name__", "a function of torch"))

    def whole(self) -> Tensor | None:
        """Return the mask of the whole sequences, shape ``(batch, 1, length, key length)``.

        ``None`` where it is plainly causal, or hides nothing. Made once for all layers.
        """
        if self._whole is None:
            self._whole = (self._made((0, self.length), (0, self.key_length), {}),)
        return self._whole[0]

    def part(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """Return the mask of a range of queries and one of keys, shape ``(batch, 1, queries, keys)``."""
        made = self._made(queries, keys, {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        assert made is not None, "a mask that may not be left out is there"
        return made

    def padded_rule(self) -> Callable[..., Tensor]:
        """Return the rule that hides padding, too."""
        if self.padding is None:
            return self.rule
        from transformers.masking_utils import and_masks, padding_mask_function

        padding = torch.nn.functional.pad(self.padding, (0, self.key_length - self.padding.shape[1]))
        made: Callable[..., Tensor] = and_masks(self.rule, padding_mask_function(padding))
        return made

    def _made(self, queries: tuple[int, int], keys: tuple[int, int], asked: Mapping[str, Any]) -> Tensor | None:
        from transformers.masking_utils import sdpa_mask

        arguments = {
            "batch_size": self.batch_size,
            "q_length": queries[1] - queries[0],
            "kv_length": keys[1] - keys[0],
            "q_offset": queries[0],
            "kv_offset": keys[0],
            "mask_function": self.rule,
            "attention_mask": self.padding,
            **self.arguments,
            **asked,
        }
        made: Tensor | None = sdpa_mask(**arguments)
        return made


class Visibility:
    """Who may attend to whom, asked for parts of a sequence at a time.

    Args:
        mask: What a layer was given: a `SequenceMask`, a tensor of the user's own for the whole sequence, or ``None``.
        is_causal: Whether no query sees a later key, where there is no mask.

    Attributes:
        is_causal: Whether no query sees a later key; ``False`` may mean that it is not known.
        is_plain: Whether nothing else masks anything.
        has_rule: Whether a rule says who may see whom, and nothing is added to scores.
    """

    def __init__(self, mask: SequenceMask | Tensor | None, *, is_causal: bool) -> None:
        self._mask = mask
        self.is_causal = is_causal and mask is None
        self.is_plain = mask is None
        if isinstance(mask, SequenceMask):
            self.is_causal, self.is_plain = mask.is_causal, mask.is_plain
        self.has_rule = not self.is_plain and not (isinstance(mask, torch.Tensor) and mask.dtype != torch.bool)
        self._known: dict[Any, Any] = mask.known if isinstance(mask, SequenceMask) else {}

    def kinds(
        self, queries: _Range, keys: _Range, tiles: Sequence[_Range]
    ) -> list[tuple[slice, list[tuple[_Range, str]]]]:
        """Return what a range of queries sees of tiles of keys; found out once, for all layers that share a mask.

        Args:
            queries: The range.
            keys: Where the tiles are.
            tiles: Consecutive ranges of keys.

        Returns:
            For samples that see the same, whether they see ``"all"``, ``"some"`` or ``"none"`` of each tile, or by a
            triangle, ``"causal"``.
        """
        if self.is_plain:
            found: Any = [(slice(None), [self._plain_kind(queries, tile) for tile in tiles])]
        else:
            found = self._known.get((queries, keys))
            if found is None:
                found = kinds_of(lambda span: self._part(queries, span), queries, tiles)
                self._known[queries, keys] = found
        return [(samples, list(zip(tiles, kinds, strict=True))) for samples, kinds in found]

    def block_mask(self, queries: Sequence[_Range], keys: Sequence[_Range], device: torch.device) -> Any:
        """Return who may see whom of ranges of queries and of keys, as `FlexKernel` takes it; made once.

        Args:
            queries: Positions of the queries.
            keys: Those of the keys.
            device: Where it is used.
        """
        known = self._known.get(("block mask", queries, keys))
        if known is None:
            known = make_block_mask(*self._rule(), queries, keys, device)
            self._known["block mask", queries, keys] = known
        return known

    def _rule(self) -> tuple[Callable[..., Tensor], tuple[int, int]]:
        """Return whether a query may see a key, and the numbers of samples and heads between which that differs."""
        if isinstance(self._mask, SequenceMask):
            return self._mask.padded_rule(), (self._mask.batch_size, 1)
        mask = self._mask
        assert mask is not None, "what has no mask has no rule"
        samples, heads = mask.shape[:2]

        def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask[sample % samples, head % heads, query, key]

        return sees, (samples, heads)

    def of_heads(self, first: int, last: int) -> Visibility:
        """Return who may attend to whom by some of the heads."""
        if not isinstance(self._mask, torch.Tensor) or self._mask.shape[1] == 1:
            return self
        return Visibility(self._mask[:, first:last], is_causal=False)

    def _plain_kind(self, queries: _Range, keys: _Range) -> str:
        if not self.is_causal or keys[1] - 1 <= queries[0]:
            return "all"
        if keys[0] >= queries[1]:
            return "none"
        return "causal" if queries == keys else "some"

    def mask(self, queries: _Range, keys: _Range, device: torch.device) -> Tensor:
        """Return who may see whom, or what is added; broadcasts to ``(batch, heads, queries, keys)``."""
        if self.is_plain:
            rows = torch.arange(*queries, device=device).unsqueeze(-1)
            columns = torch.arange(*keys, device=device)
            made = columns <= rows if self.is_causal else torch.ones_like(columns <= rows)
            return made.expand(1, 1, -1, -1)
        return self._part(queries, keys)

    def _part(self, queries: _Range, keys: _Range) -> Tensor:
        if isinstance(self._mask, SequenceMask):
            return self._mask.part(queries, keys)
        assert self._mask is not None, "what has no mask is plain"
        return self._mask[..., slice(*queries), slice(*keys)]


def kinds_of(
    part_of: Callable[[_Range], Tensor], queries: _Range, tiles: Sequence[_Range]
) -> list[tuple[slice, list[str]]]:
    """Return what a range of queries sees of tiles of keys, for samples that see the same.

    Args:
        part_of: Returns who may see whom of the queries and a range of keys, or what is added, shape
            ``(batch or 1, heads or 1, queries, keys)``. Asked for a few tiles at a time.
        queries: Range of the queries.
        tiles: Consecutive ranges of keys.
    """
    flags = []
    for first in range(0, len(tiles), _TILES_AT_ONCE):
        some = tiles[first : first + _TILES_AT_ONCE]
        part = part_of((some[0][0], some[-1][1]))
        if part.dtype != torch.bool:
            return [(slice(None), ["some"] * len(tiles))]
        for start, stop in some:
            tile = part[..., start - some[0][0] : stop - some[0][0]]
            is_diagonal = queries == (start, stop)
            triangle = torch.ones_like(tile).tril_() if is_diagonal else ~tile  # nothing equals its opposite
            is_triangle = (tile == triangle).flatten(1).all(1)
            flags.append(torch.stack([tile.flatten(1).all(1), ~tile.flatten(1).any(1), is_triangle]))
    names = ("all", "none", "causal")
    # One transfer from the device for all of them. A single query's triangle hides nothing, so the order matters.
    rows = torch.stack(flags).permute(2, 0, 1).tolist()
    kinds = [
        [next((name for name, is_so in zip(names, tile, strict=True) if is_so), "some") for tile in row] for row in rows
    ]
    if len(kinds) == 1:
        return [(slice(None), kinds[0])]
    found: list[tuple[slice, list[str]]] = []
    for sample, row in enumerate(kinds):
        if found and found[-1][1] == row:
            found[-1] = (slice(found[-1][0].start, sample + 1), row)
        else:
            found.append((slice(sample, sample + 1), row))
    return found


@outside_of_graphs
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> SequenceMask:
    """Return the mask that a transformers model asks for; see transformers' ``AttentionMaskInterface``.

    Raises:
        ConfigError: If the keys are some of one sequence, as with a cache.
    """
    # What is never causal goes from one sequence to another, such as from a decoder's to an encoder's.
    goes_across = arguments.get("allow_is_causal_skip") is False
    if (q_length != kv_length and not goes_across) or int(q_offset) or int(kv_offset):
        msg = (
            f"Attention from {q_length} positions to {kv_length} is not attention within one sequence or to another, "
            "which is what sequence parallelism splits. Pass no `past_key_values`, and generate without it."
        )
        raise ConfigError(msg)
    from transformers.masking_utils import causal_mask_function

    rule: Any = causal_mask_function if mask_function is None else mask_function
    return SequenceMask(batch_size, q_length, kv_length, rule, attention_mask, arguments)


def checked(mask: Any, length: int, key_length: int) -> SequenceMask | Tensor | None:
    """Return what a layer was given as its mask.

    Args:
        mask: A `SequenceMask`, ``None``, or a tensor of the user's own, shape
            ``(batch or 1, heads or 1, length or 1, key length)``, of which the first ones may be missing.
        length: Number of positions of the whole sequence.
        key_length: Number of positions that are looked at.

    Raises:
        ConfigError: If a tensor is not for the whole sequence.
    """
    if isinstance(mask, torch.Tensor):
        if mask.dim() in (2, 3):  # for all samples, and for all heads
            mask = mask[(None,) * (4 - mask.dim())]
        if mask.dim() == 4 and mask.shape[-2] == 1 and mask.shape[-1] == key_length:
            mask = mask.expand(-1, -1, length, -1)
        elif mask.dim() != 4 or tuple(mask.shape[-2:]) != (length, key_length):
            msg = (
                f"An attention mask of shape {tuple(mask.shape)} does not fit a sequence of {length} positions. Pass "
                f"one of shape (batch, 1 or heads, {length}, {key_length}), or one of shape (batch, {key_length}) to "
                "the model."
            )
            raise ConfigError(msg)
    found: SequenceMask | Tensor | None = mask
    return found


def whole_mask(mask: Any, length: int, key_length: int) -> Tensor | None:
    """Return the tensor that a layer's mask stands for, for whole sequences; see `checked`."""
    found = checked(mask, length, key_length)
    return found.whole() if isinstance(found, SequenceMask) else found
