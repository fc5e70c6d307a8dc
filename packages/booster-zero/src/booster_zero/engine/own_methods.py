"""Methods of an optimizer's class other than torch's, such as ``train`` and ``eval`` of schedule-free optimizers.

They may write parameters, of which they see this rank's pieces alone: what they write is brought into all parameters.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from booster_core.ranks import NamedCall
from booster_runtime.sharding import AnyRankFlags
from booster_zero.engine.bucket import bit_sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from booster_runtime.collectives import Pending
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.optimizer import ShardedOptimizer


def is_own_method(optimizer: torch.optim.Optimizer, name: str, value: Any) -> bool:
    """Return whether an attribute of an optimizer is a method that torch's optimizers have not."""
    return (
        callable(value) and getattr(value, "__self__", None) is optimizer and not hasattr(torch.optim.Optimizer, name)
    )


def call_own_method(
    optimizer: ShardedOptimizer, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a method of the user's optimizer, and bring what it writes into every rank's parameters.

    Args:
        optimizer: The sharded optimizer.
        name: The method's name.
        method: The method.
        *args: Its arguments.
        **kwargs: Its arguments.

    Collective: every rank of the world, with the same arguments.
    """
    buckets, engine = optimizer.buckets(), optimizer.engine
    with NamedCall(f"optimizer.{name}"):
        engine.gatherer.begin_step()
        with contextlib.ExitStack() as stack:
            for bucket in buckets:
                if bucket.memory.moves:
                    stack.enter_context(bucket.stepping())
            before = [bit_sums(bucket.values) for bucket in buckets]
            with optimizer.hosted.showing_pieces():
                result = method(*args, **kwargs)
            optimizer.take_assigned(buckets)
            same = [torch.equal(was, bit_sums(each.values)) for was, each in zip(before, buckets, strict=True)]
        # A rank that owns nothing of a bucket does not see what others have written into it.
        anywhere = AnyRankFlags(bytearray(not each for each in same), engine.device, engine.ranks.holders).wait()
        published: dict[Bucket, Pending] = {}
        for bucket, is_written in zip(buckets, anywhere, strict=True):
            if is_written:
                published[bucket] = bucket.publish()
        engine.gatherer.end_step(published)
    return result
