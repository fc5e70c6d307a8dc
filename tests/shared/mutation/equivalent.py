"""Mutants that no test can find, because the program does the same with them; each with the reason.

By target: function, line of source and change, as the report shows them. An entry that is no mutant any more, or that a
test finds, fails the session, so that the list stays as short as it can be.
"""

from __future__ import annotations

_ONLY_DIFFERENCES = "ranks are compared with each other, so that it does not matter where all of them begin"
_FIRST_BUCKET = "the first parameter begins a bucket, which sets it"
_FROM_ZERO = "nothing starts before 0: whichever of a rank and its input is free since -1, the other is since 0"
_AFTER_BACKWARD = "a weight's gradient follows a forward and a backward of its rank, which end later"
_CUT = "microbatches beyond the last are left out below, and the others keep their order"
_SEED = "any seeds will do, and without dropout nothing is drawn"
_PLENTY = "numbers of blocks stay apart by less, too"
_ITSELF = "the largest or smallest of a number and itself is that number"

_OWN_COPY = "a rank may attend to a copy of its own keys as well"
_ONLY_ONE = "the first of one is the last"
_NO_ROWS = "tensor.dtype == torch.float64 or not tensor.is_contiguous()"
_EXACT_AS_WELL = "a norm about there is that of fp64 either way, but for its last digits"
EQUIVALENT: dict[str, dict[tuple[str, str, str], str]] = {
    "zero/partition": {
        (
            "assign_owners",
            "loads = [(load, rank) for rank, load in enumerate(held or [0] * world_size)]",
            "0 -> 1",
        ): _ONLY_DIFFERENCES,
        (
            "assign_owners",
            "loads = [(load, rank) for rank, load in enumerate(held or [0] * world_size)]",
            "0 -> -1",
        ): _ONLY_DIFFERENCES,
        (
            "_even_bounds",
            "return range(0, share * world_size + 1, share) if share else (0,) * (world_size + 1)",
            "1 -> 2",
        ): "slices have at least 16 elements, so that a bound more would be beyond either end",
        ("_fill", "held = 0", "0 -> 1"): _FIRST_BUCKET,
        ("_fill", "held = 0", "0 -> -1"): _FIRST_BUCKET,
        **{
            ("", "_SMALL_NUMEL = 1 << 13", change): "sums are the same, whichever gradients travel together"
            for change in ("1 << 13 -> 1 >> 13", "1 -> 2", "1 -> 0", "13 -> 14", "13 -> 12")
        },
    },
    "runtime/placements": {
        (
            "_offsets",
            "return [(end - (stop - start), end) for end, (start, stop) in zip(ends, ranges, strict=True)]",
            "True -> False",
        ): "there is one end for each range",
    },
    "runtime/ranks": {
        (
            "sharding_groups",
            'divisors = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)',
            "1 -> 2 (#2)",
        ): "no number larger than the world size divides it",
    },
    "hybrid/split": {
        (
            "is_repeated",
            "steps = zip(tensor.shape, tensor.stride(), strict=True)",
            "True -> False",
        ): "a tensor has one stride for each dimension",
        (
            "cut_groups",
            "if num_groups >= size:",
            "num_groups >= size -> num_groups > size",
        ): "where there are as many groups as ranks, both branches give each rank all units of one group",
    },
    "hybrid/layout": {
        (
            "SequenceLayout.take",
            "return parts[0] if len(parts) == 1 else torch.cat(parts, dim)",
            "0 -> -1",
        ): "the first of one part is the last",
    },
    "hybrid/ring": {
        ("", "_MOST_BLOCKS = 1 << 20", "20 -> 21"): _PLENTY,
        ("", "_MOST_BLOCKS = 1 << 20", "20 -> 19"): _PLENTY,
        ("", "_MOST_BLOCKS = 1 << 20", "1 -> 2"): _PLENTY,
        **{
            ("ring_attention", "seed = int(torch.randint(2**62, ())) if dropout else 0", change): _SEED
            for change in ("2 ** 62 -> 2 * 62", "62 -> 61", "0 -> 1", "0 -> -1")
        },
    },
    "hybrid/ring_travel": {
        ("visits", "if group.size == 1:", "1 -> 0"): _OWN_COPY,
        ("visits", "if step == 0:", "0 -> -1"): _OWN_COPY,
        **{
            ("_pass_on", line, "1 -> 2"): "a bound beyond the last belongs to nobody"
            for line in (
                "sent = [0 if rank <= after else flat.numel() for rank in range(group.size + 1)]",
                "received = [0 if rank <= before else numel for rank in range(group.size + 1)]",
            )
        },
        **{
            ("visits", line, "0 -> -1"): _ONLY_ONE
            for line in (
                "pending = _pass_on(held[0], _numel(key, value, layout.lengths[following]), group)",
                "yield sender, *_unpacked(held[0], key, value, layout.lengths[sender])",
                "held[0] = pending[1]",
            )
        },
    },
    "core/shard": {
        (
            "TensorShard.__post_init__",
            "not 0 <= start <= stop <= size for (start, stop), size in zip(self.box, self.global_shape, strict=True)",
            "True -> False",
        ): "the condition before it compares the two lengths",
        (
            "_cut",
            "if start < first_whole * row:",
            "start < first_whole * row -> start <= first_whole * row",
        ): "the part of the row is empty then, and an empty part yields no box",
    },
    "runtime/sums": {
        ("combine_into", "for term in terms[1:]:", "1: -> :"): _ITSELF,
        ("combine_into", "for term in terms[1:]:", "1 -> 0"): _ITSELF,
    },
    "hybrid/schedule": {
        (
            "Schedule.is_split",
            "return any(event.action.work is Work.BACKWARD_WEIGHT for event in self.events[0])",
            "0 -> -1",
        ): "every rank splits its backwards, or none does",
        (
            "_Worker.__init__",
            "self.free_at = 0",
            "0 -> -1",
        ): "time starts at 0, when a rank that is free since -1 is, too",
        (
            "_timed",
            "forward: dict[tuple[int, int], int] = {(-1, microbatch): 0 for microbatch in range(count)}",
            "0 -> -1",
        ): _FROM_ZERO,
        ("_timed", "places, free = [0] * len(orders), [0] * len(orders)", "0 -> -1 (#2)"): _FROM_ZERO,
        ("_timed", "ready: int | None = 0", "0 -> 1"): _AFTER_BACKWARD,
        ("_timed", "ready: int | None = 0", "0 -> -1"): _AFTER_BACKWARD,
        ("_in_turns", "full = count if chunks == 1 else -(-count // ranks) * ranks", "1 -> 0"): _CUT,
        (
            "_in_turns",
            "full = count if chunks == 1 else -(-count // ranks) * ranks",
            "-count // ranks -> -count * ranks",
        ): _CUT,
        (
            "_Planner.run",
            "self._workers[self._placement.rank_of(0)].add(Action(Work.FORWARD, 0, microbatch))",
            "0 -> -1",
        ): "it plans stages in a V, of which the one before the first would be the first rank's as well",
        (
            "_Planner.run",
            "now = min(ends)",
            "min(ends) -> max(ends)",
        ): "in a V each action takes as long as any other, so that all that are underway end at one time",
    },
    "core/gradients": {
        (
            "global_norm",
            'device = present[0].device if present else torch.device("cpu")',
            "0 -> -1",
        ): "gradients are on one device, except for those that a home has moved to the CPU: either can have the sum",
        (
            "global_norm",
            "pair = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf), total.isnan().to(total.dtype)])",
            "0.0 -> 1.0",
        ): "with a NaN the result is NaN, whatever the magnitude",
        (
            "global_norm",
            "if device is None:",
            "device is None -> device is not None",
        ): "nowhere in particular is the CPU",
        ("", "_TINY = 1e-15", "1e-15 -> 2e-15"): _EXACT_AS_WELL,
        (
            "_norm",
            "if _TINY < float(total) < math.inf:",
            "_TINY < float(total) < math.inf -> _TINY <= float(total) < math.inf",
        ): _EXACT_AS_WELL,
        (
            "_norm",
            'if norm_type == 2.0 and tensors[0].device.type == "cpu":',
            "norm_type == 2.0 and tensors[0].device.type == 'cpu' -> norm_type == 2.0",
        ): "the sum over rows is as exact elsewhere, only slower",
        (
            "_norm",
            'if norm_type == 2.0 and tensors[0].device.type == "cpu":',
            "0 -> -1",
        ): "they are all on one device",
        (
            "_norm_of_rows",
            "if not num_whole or tensor.dtype == torch.float64 or not tensor.is_contiguous():",
            f"not num_whole or {_NO_ROWS.replace('not tensor', '(not tensor')}) -> {_NO_ROWS}",
        ): "no rows add nothing, and the rest is all of it",
        **{
            (
                "_norm_of_rows",
                "rows = torch.linalg.vector_norm(flat[:num_whole].view(-1, _ROW), dim=-1, dtype=torch.float32)",
                change,
            ): "each element is counted once, whichever dimension is summed first"
            for change in ("1 -> 2 (#2)", "1 -> 0 (#2)")
        },
    },
}
