"""Mutants that no test can find, because the program does the same with them; each with the reason.

By target: function, line of source and change, as the report shows them. An entry that is no mutant any more, or that a
test finds, fails the session, so that the list stays as short as it can be.
"""

from __future__ import annotations

_ONLY_DIFFERENCES = "ranks are compared with each other, so that it does not matter where all of them begin"
_FIRST_BUCKET = "the first parameter begins a bucket, which sets it"
_FINENESS = "a setting of how many sizes are tried: with one more or less, neighbours still differ by less than 2%"
_ITSELF = "the largest or smallest of a number and itself is that number"

EQUIVALENT: dict[str, dict[tuple[str, str, str], str]] = {
    "zero/partition": {
        ("assign_owners", "loads = [0] * world_size", "0 -> 1"): _ONLY_DIFFERENCES,
        ("assign_owners", "loads = [0] * world_size", "0 -> -1"): _ONLY_DIFFERENCES,
        ("_fill", "held = 0", "0 -> 1"): _FIRST_BUCKET,
        ("_fill", "held = 0", "0 -> -1"): _FIRST_BUCKET,
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
        ): "the world size has no divisor that is larger by one",
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
        ): "where there are as many groups as ranks, each rank gets one group either way, all of its units",
    },
    "hybrid/layout": {
        (
            "SequenceLayout.take",
            "return parts[0] if len(parts) == 1 else torch.cat(parts, dim)",
            "0 -> -1",
        ): "the first of one part is the last",
    },
    "core/shard": {
        (
            "TensorShard.__post_init__",
            "not 0 <= start <= stop <= size for (start, stop), size in zip(self.box, self.global_shape, strict=True)",
            "True -> False",
        ): "the condition before it has found as many ranges as dimensions",
    },
    "runtime/regions": {
        (
            "_cut",
            "if start < first_whole * row:",
            "start < first_whole * row -> start <= first_whole * row",
        ): "the part of a row before it is empty then, and no box comes of it",
    },
    "gemini/search": {
        ("", "_CANDIDATES = 192", "192 -> 193"): _FINENESS,
        ("", "_CANDIDATES = 192", "192 -> 191"): _FINENESS,
        (
            "_fullest",
            "return max((plan.numel for plan in plans if plan.numel <= chunk_numel), default=chunk_numel)",
            "plan.numel <= chunk_numel -> plan.numel < chunk_numel",
        ): "a size that a chunk fills is tried anyway; another one tried on top is taken only where it is better",
    },
    "runtime/sums": {
        ("combine_into", "for term in terms[1:]:", "1: -> :"): _ITSELF,
        ("combine_into", "for term in terms[1:]:", "1 -> 0"): _ITSELF,
    },
    "core/loss_scaler": {
        (
            "any_nonfinite",
            "return not bool(torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().all())",
            "0 -> -1",
        ): "the norms may be put together on the device of any of them",
    },
    "core/norm": {
        (
            "global_norm",
            "device = present[0].device if present else _group_device(groups)",
            "0 -> -1",
        ): "gradients are on one device, except for those that a home has moved to the CPU: either can have the sum",
        (
            "global_norm",
            "pair = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf), total.isnan().to(total.dtype)])",
            "0.0 -> 1.0",
        ): "with a NaN the result is NaN, whatever the magnitude",
    },
}
