"""The part of `PluginConformance` that tests checkpoints, against one device and on other numbers of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from booster_core.plugin import Capability
from booster_runtime.rounding import ADAPTIVE, EXACT, tolerance_for
from booster_testing import checkpoint_runs as runs
from booster_testing.compare import DTYPES, assert_same_tensors
from booster_testing.models import TinyStateful
from booster_testing.rank_test_case import RankTestCase
from booster_testing.ranks import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from booster_testing.checkpoint_runs import Continued, Snapshot
    from booster_testing.training import Training


class CheckpointConformance(RankTestCase):
    """Test that a plugin's checkpoint is complete, exact, and any other plugin's: in bf16, which has masters to keep.

    Attributes:
        other_world_size: Number of ranks on which the checkpoint of ``world_size`` ranks is loaded; ``None`` for one
            rank more.
    """

    other_world_size: ClassVar[int | None]

    def checkpoint_training(self, precision: str) -> Training:
        """Return the training that is saved; skip the test if the plugin does not declare its precision."""
        self.needs(Capability(precision))
        factory = type(self).make_model or TinyStateful
        return self.training(model_factory=factory, precision=None if precision == "fp32" else precision)

    @pytest.mark.parametrize("precision", ["bf16"])
    def test_resumed_run_continues_exactly(self, precision: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.needs(Capability.SYNCHRONOUS)
        training = self.checkpoint_training(precision)
        saved, root = self._saved(training, tmp_path_factory)
        loaded = self.call(runs.load_and_continue, training, root)
        for before, after in zip(saved, loaded, strict=True):
            assert_same_state(after.snapshot, before.snapshot)
            assert_same_tensors(after.parameters, before.parameters, EXACT)
            assert after.losses == before.losses
            assert_same_tensors(after.next_parameters, before.next_parameters, EXACT)

    @pytest.mark.parametrize("precision", ["bf16"])
    def test_checkpoint_loads_on_one_device(self, precision: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        training = self.checkpoint_training(precision)
        saved, root = self._saved(training, tmp_path_factory)
        (loaded,) = self.call(runs.load_and_continue, runs.on_one_device(training), root, world_size=1)
        assert_same_state(loaded.snapshot, saved[0].snapshot)
        self._assert_same_next_step(saved, loaded, precision)

    @pytest.mark.parametrize("precision", ["bf16"])
    def test_checkpoint_of_one_device_loads(self, precision: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        training = self.checkpoint_training(precision)
        saved, root = saved_on_one_device(runs.on_one_device(training), tmp_path_factory, type(self).prepare)
        loaded = self.call(runs.load_and_continue, training, root)
        for of_rank in loaded:
            assert_same_state(of_rank.snapshot, saved.snapshot, rounded_to=DTYPES[precision])
        self._assert_same_next_step(loaded, saved, precision)

    def test_loads_at_another_world_size(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.needs(Capability.SYNCHRONOUS, Capability.DATA_PARALLEL)
        training = self.checkpoint_training("fp32")
        saved, root = self._saved(training, tmp_path_factory)
        other = self.other_world_size or self.world_size + 1
        loaded = self.call(runs.load_and_continue, training, root, world_size=other)
        for of_rank in loaded:
            assert_same_state(of_rank.snapshot, saved[0].snapshot)
        self._assert_same_next_step(loaded, saved[0], "fp32")

    def test_a_file_holds_what_every_rank_holds(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Ranks train on different samples here: replicas that drift apart may not be written as a mixture."""
        self.needs(Capability.DATA_PARALLEL)
        folder = str(tmp_path_factory.mktemp("apart"))
        found = self.call(runs.differing_from_file, self.checkpoint_training("fp32"), folder)
        for rank, differ in enumerate(found):
            assert not differ, f"rank {rank} holds other values than the file: {differ}"

    def _saved(self, training: Training, folders: pytest.TempPathFactory) -> tuple[list[Continued], str]:
        """Return what the run of a class that saved went on to, and the folder."""

        def save() -> tuple[list[Continued], str]:
            root = str(folders.mktemp("checkpoint"))
            return self.call(runs.save_and_continue, training, root), root

        saved: tuple[list[Continued], str] = self.remembered(("saved", training.precision), save)
        return saved

    def _assert_same_next_step(self, found: list[Continued], expected: Continued, precision: str) -> None:
        """Compare the step after loading; it is only the same where a step is that of one process."""
        if Capability.SYNCHRONOUS in self.plugin_class.capabilities:
            assert_same_next_step(found, expected, precision)


_saved_on_one_device: dict[Any, tuple[Any, str]] = {}


def saved_on_one_device(
    training: Training, folders: pytest.TempPathFactory, prepare: Callable[[], None] | None = None
) -> tuple[Continued, str]:
    """Return what a run on one device that saved went on to, and the folder; the same for all test classes."""
    key = (training.precision, training.model_factory, training.device, training.optimizer)
    if key not in _saved_on_one_device:
        root = str(folders.mktemp("one_device"))
        (saved,) = run_on_ranks(runs.save_and_continue, 1, training, root, prepare=prepare)
        _saved_on_one_device[key] = (saved, root)
    return _saved_on_one_device[key]


def assert_same_state(actual: Snapshot, expected: Snapshot, *, rounded_to: torch.dtype | None = None) -> None:
    """Assert that two states are the same, bit for bit, whatever the dtypes and devices that they are kept in.

    Args:
        actual: The loaded state.
        expected: The saved state.
        rounded_to: A parameter may also have the expected value, rounded to this dtype: that of a run that keeps its
            parameters in low precision, loaded from one that does not.

    Raises:
        AssertionError: If they differ; names what does.
    """
    for name in ("values", "buffers", "optimizer"):
        ours, theirs = ({k: v.double() for k, v in getattr(each, name).items()} for each in (actual, expected))
        if name == "values" and rounded_to is not None:
            rounded = {key: value.to(rounded_to).double() for key, value in theirs.items()}
            theirs |= {key: value for key, value in rounded.items() if key in ours and torch.equal(ours[key], value)}
        assert_same_tensors(ours, theirs, EXACT)
    assert actual.extra_state == expected.extra_state
    assert actual.loss_scale == expected.loss_scale
    assert actual.schedule == expected.schedule
    assert len(actual.groups) == len(expected.groups)
    for (names, options), (their_names, their_options) in zip(actual.groups, expected.groups, strict=True):
        assert sorted(names) == sorted(their_names)
        shared = options.keys() & their_options.keys()  # strategies add options of their own
        assert {key: options[key] for key in shared} == {key: their_options[key] for key in shared}


def assert_same_next_step(found: Sequence[Continued], expected: Continued, precision: str | None) -> None:
    """Assert that the step after the state was loaded is the same.

    Raises:
        AssertionError: If parameters or buffers differ by more than the precision's rounding; names them.
    """
    tolerance = tolerance_for(DTYPES[precision]) if precision in ("bf16", "fp16") else ADAPTIVE
    for of_rank in found:
        assert_same_tensors(of_rank.next_parameters, expected.next_parameters, tolerance)
