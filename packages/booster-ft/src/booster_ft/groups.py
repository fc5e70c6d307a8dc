"""`ReplicaGroups`: this replica group among the others. Who takes part, what is averaged, and whether a step counts.

torchft does the work: its lighthouse knows which groups are alive, its `Manager` connects those that take part in a
step, sends state to those that come back, and lets the ranks of a group commit a step together or not at all.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch does not list it as public

from booster_core.errors import ConfigError, GradientError, LaunchError
from booster_core.ranks import current_world
from booster_ft.averaging import agree, average
from booster_ft.lighthouse import MissingGroups
from booster_ft.liveness import RankWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from booster_core.plugin import BoostContext, OptimizerWrapper
    from booster_ft.config import FaultToleranceConfig
    from booster_ft.manager import GroupManager
    from booster_ft.state import GroupState


_present: list[ReplicaGroups] = []
"""The training of this process that takes part; at most one."""


def require_torchft() -> None:
    """Import torchft, whose log begins at warnings unless ``RUST_LOG`` says otherwise: it has nine lines for each step.

    Raises:
        ConfigError: If that is not possible.
    """
    is_set = "RUST_LOG" in os.environ
    os.environ.setdefault("RUST_LOG", "warn")  # which torchft reads when it is imported
    try:
        import torchft  # noqa: F401 - whether it can be imported is the question
    except ImportError as error:
        msg = (
            f"Plugin 'ft' needs torchft, which can't be imported: {error}. Run `pip install 'torchft>=0.2'`; there are "
            "wheels for Linux on x86_64 and Python 3.9 to 3.13. Elsewhere, use the inner plugin itself and resume from "
            "checkpoints by `booster.load_checkpoint(folder, ..., resume=True)`."
        )
        raise ConfigError(msg) from error
    finally:
        if not is_set:
            del os.environ["RUST_LOG"]


class ReplicaGroups:
    """This replica group among the others; what `booster_core.plugin.GradientScaling.replicas` is.

    Between two steps, `begin` lets the groups that are there agree on who takes part in the next one. A group whose
    step is behind takes over the state of one that is ahead, before its forward.

    Args:
        optimizer: The boosted optimizer.
        config: With the values of the environment.
        state: What a group sends to another one.
        context: Of the ``boost``.
        facts: What must be the same in all groups.
    """

    def __init__(
        self,
        optimizer: OptimizerWrapper,
        config: FaultToleranceConfig,
        state: GroupState,
        context: BoostContext,
        facts: str,
    ) -> None:
        self._optimizer, self._config, self._state, self._facts = optimizer, config, state, facts
        self._device, self._coordinator = context.device, context.coordinator
        self._joined: GroupManager | None = None
        self._closing: list[Callable[[], object]] = []
        self._is_begun = self._is_averaged = False
        self._problem: Exception | None = None
        self.num_commits = 0
        """Steps that this process has taken since it began, or has loaded values."""
        self._first_values = ""
        self._missing = MissingGroups(config, context.device)
        self._has_left = False
        current_world().at_close.append(self.close)

    # ---- what others ask

    @property
    def manager(self) -> GroupManager:
        """The manager of torchft, made when it is first needed; from then on other groups wait for this one.

        Another training of this process, such as one before in a notebook, no longer takes part.

        Raises:
            ConfigError: If another one takes part since.

        Collective: every rank of the group, at the first time.
        """
        if self._joined is None:
            self._check_place()
            if _present:
                _present.pop().close()
            self._joined = self._join()
            _present.append(self)
        return self._joined

    def _check_place(self) -> None:
        if self._has_left and _present:
            msg = "Another model was trained in this process since, and takes part in its place. Boost this one again."
            raise ConfigError(msg)

    @property
    def step(self) -> int:
        """Number of steps that the run has committed, whichever groups took part."""
        return 0 if self._joined is None else self._joined.current_step()

    @property
    def num_participants(self) -> int:
        """Number of groups whose gradients count in the present step; 0 before the first."""
        return 0 if self._joined is None else self._joined.num_participants()

    def is_first(self) -> bool:
        """Return whether this is the first of the groups that take part in the present step."""
        return self._joined is not None and self._joined.participating_rank() == 0

    def first_values(self) -> str:
        """Return a digest of the values that were there when it was asked for first."""
        self._first_values = self._first_values or self._state.digest()
        return self._first_values

    def restart(self) -> None:
        """Forget the step, since values were loaded: groups that are ahead send theirs at the next step."""
        self._is_begun = self._is_averaged = False
        self.num_commits, self._first_values = 0, ""
        if self._joined is not None:
            self._joined.load_state_dict({"step": 0, "batches_committed": 0})

    def close(self) -> None:
        """Leave the other groups, which no longer wait for this one."""
        for callback in reversed(self._closing):
            with suppress(RuntimeError):
                callback()
        self._closing.clear()
        self._has_left = self._has_left or self._joined is not None
        self._joined = None
        if self in _present:
            _present.remove(self)

    # ---- a step

    def begin(self) -> None:
        """Agree with the other groups on who takes part in the next step, and catch up with those that are ahead.

        Raises:
            LaunchError: If the lighthouse does not answer, or too few groups come.
            ConfigError: If groups at the first step have different values, or another group trains another model.

        Collective: every rank of the group.
        """
        if self._is_begun:
            return
        self._is_begun, self._is_averaged = True, False
        self.manager.start_quorum()  # which calls `_meet`

    def average(self) -> None:
        """Average the gradients over the groups that take part, unless that is done.

        Gradients that are added to an average are averaged with it again: the average is the same in all groups.

        A group that lacks an average does not take part in what follows, so that a step is committed only by groups
        that have averages of the same gradients.

        Collective: every rank of the group.
        """
        if self._is_averaged:
            return
        self.begin()
        self._is_averaged = True
        layout = self._optimizer.gradient_layout()
        is_same: bool | None = None
        for gradients in self._optimizer.gradients_in_parts():
            if is_same is None:
                sizes = [(str(each.dtype), each.numel()) for each in gradients]
                is_same = self._compare(f"{self._settings()} {layout} {sizes}", _different_gradients())
            average(self.manager, gradients, self._device)
        self._compare("end", _different_gradients())

    def commits(self) -> bool:
        """Return whether this group takes the step; all of its ranks, or none.

        Raises:
            ConfigError: If groups have different gradients or values, on every rank.

        Collective: every rank of the group.
        """
        self.average()
        manager = self.manager
        self._is_begun = self._is_averaged = False
        try:
            is_committed = manager.should_commit()
        except RuntimeError as error:
            msg = (
                f"A rank of replica group {self._config.replica_id} did not come to the end of a step within "
                f"{self._config.timeout_seconds:g} s ({error}). Restart the group: it catches up with the others."
            )
            raise LaunchError(msg) from error
        if is_committed:
            self.num_commits += 1
            return True
        with self._coordinator.together("step"):
            if self._problem is not None:
                raise self._problem
        return False

    def forget(self) -> None:
        """Learn that the gradients were dropped, or are about to be added to."""
        self._is_averaged = False

    # ---- parts

    def _no_quorum(self, error: Exception) -> LaunchError:
        config = self._config
        return LaunchError(
            f"Replica group {config.replica_id} found no quorum ({error}). The lighthouse at {config.lighthouse} does "
            f"not answer, fewer than min_replicas={config.min_replicas} groups came within "
            f"{config.quorum_timeout_seconds:g} s (`quorum_timeout_seconds`), or rank 0 of this group has ended. Start "
            "the lighthouse at the same address, and restart this group."
        )

    def _meet(self, manager: GroupManager, before: dict[str, int]) -> bool:
        """Do what follows a quorum: catch up with groups that are ahead, and compare the values of the first step.

        Returns:
            Whether the step can be taken: a run does not begin while a group that lives is missing.

        Collective: every rank of the group.
        """
        self._catch_up(manager, before)
        if manager.current_step() > 0:
            return True
        with self._coordinator.together("step"):
            is_awaited = self._coordinator.rank == 0 and self._missing.are_awaited(manager)
        if self._coordinator.broadcast_object(is_awaited, name="step"):
            return False
        self._compare(f"start {self._facts} {self.first_values()}", _different_values())
        return True

    def _catch_up(self, manager: GroupManager, before: dict[str, int]) -> None:
        """Take over what another group has sent, if every rank of this one has received its part.

        Collective: every rank of the group.
        """
        failed, received = manager.errored() is not None, manager.take_received()
        counts = torch.tensor([failed, received is not None], dtype=torch.int32, device=self._device)
        if self._coordinator.world_size > 1:
            dist.all_reduce(counts)
        num_failed, num_received = counts.tolist()
        if num_failed:
            if num_received:  # another part than others', so that none is taken
                manager.load_state_dict(before)
            if not failed:
                manager.report_error(RuntimeError("another rank of the group could not connect to its peers"))
            return
        if num_received:
            self._state.restore(received, manager.current_step(), is_new=self.num_commits == 0)

    def _settings(self) -> str:
        """Return what the step does with the average."""
        options = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]
        scaler = self._optimizer.loss_scaler
        return repr((self._facts, options, None if scaler is None else scaler.state_dict()))

    def _compare(self, text: str, problem: Exception) -> bool:
        """Return whether all groups say the same; where not, note the problem, which the step's end raises."""
        is_same = agree(self.manager, text, self._device)
        if not is_same:
            self._problem = problem
            self.manager.report_error(problem)
        return is_same

    def _join(self) -> GroupManager:
        """Connect this rank to the lighthouse and to its peers of other groups.

        Collective: every rank of the group.
        """
        from torchft import ProcessGroupGloo, ProcessGroupNCCL
        from torchft.manager import WorldSizeMode

        from booster_ft.manager import GroupManager

        config, rank = self._config, self._coordinator.rank
        limit = timedelta(seconds=config.timeout_seconds)
        host = socket.gethostname()
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit) if rank == 0 else None
        lighthouse = config.lighthouse or (self._own_lighthouse() if rank == 0 else None)
        address = (host, None if store is None else store.port)
        host, port = self._coordinator.broadcast_object(address, name="step")
        watch = RankWatch(host, port, rank, self._coordinator.world_size, config.timeout_seconds)
        pg = ProcessGroupNCCL(limit) if self._device.type == "cuda" else ProcessGroupGloo(limit)
        manager = GroupManager(
            pg=pg,
            on_quorum=self._meet,
            no_quorum=self._no_quorum,
            state_dict=self._state.capture,
            min_replica_size=config.min_replicas,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=timedelta(seconds=config.quorum_timeout_seconds),
            connect_timeout=limit,
            rank=rank,
            world_size=self._coordinator.world_size,
            world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if config.spares else WorldSizeMode.DYNAMIC,
            store_addr=host,
            store_port=port,
            lighthouse_addr=lighthouse,
            replica_id=f"group_{config.replica_id}",
            hostname=host,
            # Values at the first step are compared, since at most one rank would get another group's.
            init_sync=False,
            quorum_retries=int(config.quorum_timeout_seconds),  # one each second, while no lighthouse answers
        )
        self._closing += [lambda: store, pg.shutdown, manager.shutdown, watch.close]
        return manager

    def _own_lighthouse(self) -> str:
        """Start a lighthouse for a group that is alone, and return its address."""
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
        self._closing.append(server.shutdown)
        address: str = server.address()
        return address


def _different_values() -> ConfigError:
    return ConfigError(
        "Replica groups start with different values, options or numbers of ranks, so that their averages would mean "
        "nothing. Seed all groups alike (`launch(seed=...)` does), start them by the same script, and load the same "
        "checkpoint in each."
    )


def _different_gradients() -> GradientError:
    return GradientError(
        "Replica groups have gradients of different parameters in this step, or different learning rates or loss "
        "scales, so that their parameters would part. Step schedulers alike in all groups; use every layer in each "
        "step, or add `0.0 * sum(p.sum() for p in layer.parameters())` to the loss for layers that batches may skip."
    )
