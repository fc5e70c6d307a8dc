"""Mutants that no test can find, because the program does the same with them; each with the reason.

By target: function, line of source and change, as the report shows them. An entry that is no mutant any more, or that a
test finds, fails the session, so that the list stays as short as it can be.
"""

from __future__ import annotations

_ONLY_DIFFERENCES = "ranks are compared with each other, so that it does not matter where all of them begin"
_FIRST_BUCKET = "the first parameter begins a bucket, which sets it"

EQUIVALENT: dict[str, dict[tuple[str, str, str], str]] = {
    "zero/partition": {
        ("assign_owners", "loads = [0] * world_size", "0 -> 1"): _ONLY_DIFFERENCES,
        ("assign_owners", "loads = [0] * world_size", "0 -> -1"): _ONLY_DIFFERENCES,
        ("_fill", "held = 0", "0 -> 1"): _FIRST_BUCKET,
        ("_fill", "held = 0", "0 -> -1"): _FIRST_BUCKET,
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
            'device = present[0].device if present else torch.device("cpu")',
            "0 -> -1",
        ): "gradients are on one device, except for those that a home has moved to the CPU: either can have the sum",
        (
            "global_norm",
            "pair = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf), total.isnan().to(total.dtype)])",
            "0.0 -> 1.0",
        ): "with a NaN the result is NaN, whatever the magnitude",
    },
}
