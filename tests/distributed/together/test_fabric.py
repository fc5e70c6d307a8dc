"""A loop of Lightning Fabric under each plugin trains as Fabric alone does in one process."""

import pytest
import torch
from fabric_runs import misuse, train
from isolated_libraries import FOLDER, missing_libraries
from safetensors.torch import load_file

from booster_testing import run_on_ranks

pytestmark = [
    pytest.mark.usefixtures("new_interpreters"),
    pytest.mark.skipif(
        bool(missing_libraries(["lightning_fabric"])), reason=f"lightning-fabric not installed, nor in {FOLDER}"
    ),
]
SLOW = pytest.mark.slow


def parameters_in(folder):
    paths = (folder / "step-00000000" / "model").glob("*.safetensors")
    return {name: value for path in paths for name, value in load_file(path).items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return what Fabric alone computes, and the parameters it saved."""
    path = tmp_path_factory.mktemp("plain") / "state.pt"
    [found] = run_on_ranks(train, 1, None, 1, path)
    return found, torch.load(path, weights_only=True)["model"]


def assert_alike(found, expected, *, since=0):
    losses, norms, rates = expected
    for own_losses, own_norms, own_rates in found:
        assert own_losses == pytest.approx(losses[2 * since :], rel=1e-5)
        assert own_norms == pytest.approx(norms[since:], rel=1e-5)
        assert own_rates == pytest.approx(rates)


@pytest.mark.parametrize(
    "plugin", ["zero", "gemini", *(pytest.param(name, marks=SLOW) for name in ("ddp", "fsdp", "hybrid"))]
)
def test_a_fabric_loop_trains_as_on_one_process(plugin, plain, tmp_path):
    expected, parameters = plain
    assert max(expected[1]) > 0.3, "nothing was clipped"
    assert_alike(run_on_ranks(train, 2, plugin, 2, tmp_path), expected)
    found = parameters_in(tmp_path)
    assert found.keys() == parameters.keys()
    for name, value in parameters.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name


def test_a_fabric_run_resumes_under_another_plugin(plain, tmp_path):
    run_on_ranks(train, 2, "zero", 2, tmp_path, None, 1)
    assert_alike(run_on_ranks(train, 1, "ddp", 1, None, tmp_path), plain[0], since=1)


def test_what_a_booster_can_not_do_for_fabric_is_refused():
    for found in run_on_ranks(misuse, 2, "zero"):
        kinds, messages = zip(*found, strict=True)
        assert kinds == ("ConfigError",) * 2 + ("ConfigError",) + ("ConfigError",) * 3
        remedies = ("mixed_precision", "Use groups of one", "jointly", "model=model", "has one model", "own folder")
        for message, remedy in zip(messages, remedies, strict=True):
            assert remedy in message
