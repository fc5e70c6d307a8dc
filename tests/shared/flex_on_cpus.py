"""torch's `flex_attention` on CPUs, where torch refuses its backward by a check alone."""

import contextlib
import threading
import unittest.mock
import warnings

from booster_hybrid.sequence_parallel import flex_kernel, ring_attention


@contextlib.contextmanager
def flex_on_cpus(compiled=lambda function: function):
    """Let rules go to `flex_attention`, and yield the numbers of queries and keys of each call.

    Args:
        compiled: Compiles it; by default it runs operation by operation.
    """
    from torch.nn.attention import flex_attention

    def unchecked(*_, **__):
        return True

    functions = flex_attention.create_block_mask, compiled(flex_attention.flex_attention)
    calls, attend, one_at_a_time = [], flex_kernel.FlexKernel.attend, threading.Lock()

    def counted(self, query, key, value, mask):
        calls.append((query.shape[2], key.shape[2]))
        with one_at_a_time:  # torch traces rules in one thread at a time, and ranks may be threads
            return attend(self, query, key, value, mask)

    with (
        warnings.catch_warnings(),
        unittest.mock.patch.object(flex_attention, "_validate_device", unchecked),
        unittest.mock.patch.object(flex_attention, "_warn_once", unchecked),  # that it is not compiled
        unittest.mock.patch.object(flex_kernel, "compiled", return_value=functions),
        unittest.mock.patch.object(ring_attention, "takes_rules", unchecked),
        unittest.mock.patch.object(flex_kernel.FlexKernel, "attend", counted),
    ):
        warnings.filterwarnings("ignore", message="The .grad attribute")  # as the compiler hides it where it asks
        yield calls
