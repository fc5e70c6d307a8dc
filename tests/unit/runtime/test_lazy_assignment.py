"""`real.data = lazy`: the real tensor becomes lazy, or an error says why not; the process never crashes.

Without care torch leaves the real tensor with no memory, and the next operation on it is a segmentation fault: so each
case runs in a process of its own.
"""

from textwrap import dedent

import pytest

HEAD = """
import torch
from torch import nn
from booster_core import Booster
from booster_runtime import LazyInitContext
from booster_core.errors import LazyInitError
from booster_runtime.lazy import is_lazy, materialize
"""


@pytest.fixture
def run_alone(scripts, tmp_path):
    """Return a function that runs a script in a process of its own and returns what it prints."""

    def run(script: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(HEAD + dedent(script))
        result = scripts.run(path, [[]])
        assert result.codes == [0], result.output
        return result.output

    return run


BUILDS = {
    "uninitialised": """
        def build(lazy):
            layers = nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Unflatten(1, (4, 1)), nn.LazyConv1d(3, 1), nn.Flatten()
            model = nn.Sequential(*layers)
            model(torch.ones(2, 3))
            assert [type(model[index]) for index in (0, 1, 3)] == [nn.Linear, nn.BatchNorm1d, nn.Conv1d]
            return model
    """,
    "made-outside": """
        outside = {lazy: nn.Linear(3, 3, bias=False) for lazy in (True, False)}
        def build(lazy):
            model = nn.Sequential(outside[lazy], nn.Linear(3, 3))
            model[0].weight.data = torch.randn(3, 3) * 2
            model[0].weight.data.mul_(3)
            return model
    """,
    "frozen-buffer-and-tied": """
        outside = {lazy: nn.BatchNorm1d(3) for lazy in (True, False)}
        def build(lazy):
            model = outside[lazy]
            model.weight.requires_grad_(False)
            model.weight.data = torch.rand(3)
            model.weight.tag = "kept"
            model.running_mean.data = torch.full((3,), 0.5)
            model.bias.data = model.running_mean.data
            assert model.weight.tag == "kept" and not model.weight.requires_grad and model.bias.requires_grad
            return model
    """,
}


@pytest.mark.parametrize("build", BUILDS)
def test_a_real_tensor_becomes_lazy(build, run_alone) -> None:
    body = """
        torch.manual_seed(1)
        eager = build(False)
        torch.manual_seed(1)
        with LazyInitContext():
            lazy = build(True)
        assert is_lazy(lazy)
        held = dict(lazy.named_parameters())
        materialize(lazy)
        assert all(now is held[name] for name, now in lazy.named_parameters())
        assert type(next(lazy.parameters())) is nn.Parameter
        for name, tensor in eager.state_dict().items():
            assert torch.equal(lazy.state_dict()[name], tensor), name
        lazy(torch.ones(2, 3)).sum().backward()
        eager(torch.ones(2, 3)).sum().backward()
        for (name, parameter), other in zip(eager.named_parameters(), lazy.parameters(), strict=True):
            assert parameter.grad is other.grad or torch.equal(parameter.grad, other.grad), name
    """
    run_alone(dedent(BUILDS[build]) + dedent(body))


REFUSED = {
    "has-gradients": """
        real = nn.Parameter(torch.ones(3))
        real.sum().backward()
        with LazyInitContext():
            real.data = torch.randn(3)
    """,
    "held-weakly": """
        import weakref
        real = nn.Parameter(torch.ones(3))
        weak = weakref.ref(real)
        with LazyInitContext():
            real.data = torch.randn(3)
    """,
    "after-the-context": """
        real = nn.Parameter(torch.ones(3))
        with LazyInitContext():
            lazy = nn.Parameter(torch.randn(3))
        real.data = lazy.data
    """,
}


@pytest.mark.parametrize("script", REFUSED)
def test_what_cannot_become_lazy_raises_at_the_assignment(script, run_alone) -> None:
    body, line = dedent(REFUSED[script]).rstrip().rsplit("\n", 1)
    indent = line[: len(line) - len(line.lstrip())]
    caught = "\n".join(
        [
            f"{indent}try:",
            f"    {line}",
            f"{indent}except RuntimeError as error:",
            f"{indent}    print(error)",
            f"{indent}else:",
            f"{indent}    raise AssertionError",
            "assert torch.equal(real.detach() * 2, torch.full((3,), 2.0))",
        ]
    )
    printed = run_alone(f"{body}\n{caught}")
    expected = "incompatible tensor type" if script == "after-the-context" else "can't become lazy"
    assert expected in printed
