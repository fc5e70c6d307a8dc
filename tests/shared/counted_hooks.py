"""How often backward accumulates each gradient."""

from __future__ import annotations

import collections


def count_hooks(model):
    """Return how often each parameter's gradient has been accumulated; filled while backward runs."""
    fired: dict[str, int] = collections.Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    return fired
