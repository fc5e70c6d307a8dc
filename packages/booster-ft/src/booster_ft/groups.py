"""`ReplicaGroups`: this replica group among the others. Who takes part, what is averaged, and whether a step counts.

torchft does the work: its lighthouse knows which groups are alive, its `Manager` connects those that take part in a
step, sends state to those that come back, and lets the ranks of a group commit a step together or not at all.
"""

from __future__ import annotations

import socket
import time
import warnings
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch does not list it as public
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import WorldSizeMode

from booster_core.errors import ConfigError, GradientError, LaunchError
from booster_core.log import log
from booster_core.plugin import hookimpl, register_hooks, unregister_hooks, unwrap_model
from booster_core.ranks import current_world
from booster_ft.averaging import agree, average, total
from booster_ft.liveness import RankWatch, groups_outside

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext, ModelWrapper, OptimizerWrapper
    from booster_ft.config import FaultToleranceConfig
    from booster_ft.state import GroupState

_present: list[ReplicaGroups] = []
"""The training of this process that takes part; at most one."""


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
        self._joined: _GroupManager | None = None
        self._closing = ExitStack()
        self._is_begun = self._is_averaged = False
        self._problem: Exception | None = None
        self.num_commits = 0
        """Steps that this process has taken since it began, or has loaded values."""
        self._first_values = ""  # their digest
        self._waits_since: float | None = None
        for before in _present:
            before.close()
        _present[:] = [self]
        register_hooks(self)
        self._closing.callback(unregister_hooks, self)
        current_world().at_close.append(self.close)

    def join(self) -> Manager:
        """Return the manager of torchft, made at the first call; from then on other groups wait for this one.

        Raises:
            ConfigError: If another model was boosted since, such as in a notebook.

        Collective: every rank of the group, at the first time.
        """
        if self._joined is None:
            if self not in _present:
                msg = "Another model was boosted in this process since, and takes part instead. Boost this one again."
                raise ConfigError(msg)
            self._joined = self._connect()
        return self._joined

    @property
    def step(self) -> int:
        """Number of steps that the run has committed, whichever groups took part."""
        return 0 if self._joined is None else self._joined.current_step()

    @property
    def num_participants(self) -> int:
        """Number of groups whose gradients count in the present step; 0 before the first."""
        return 0 if self._joined is None else self._joined.num_participants()

    def close(self) -> None:
        """Leave the other groups, which no longer wait for this one."""
        with suppress(RuntimeError):
            self._closing.close()
        self._joined = None
        _present[:] = [each for each in _present if each is not self]

    def begin(self) -> None:
        """Agree with the other groups on who takes part in the next step, and catch up with those that are ahead.

        Raises:
            LaunchError: If the lighthouse does not answer, or too few groups come.
            ConfigError: If groups at the first step have different values, or another group trains another model.

        Collective: every rank of the group.
        """
        if not self._is_begun:
            self._is_begun, self._is_averaged = True, False
            self.join().start_quorum()  # which calls `_meet`

    def average(self) -> None:
        """Average the gradients over the groups that take part, unless that is done.

        Gradients that are added to an average are averaged with it again: the average is the same in all groups. A
        group that lacks one does not take the step.

        Collective: every rank of the group.
        """
        if self._is_averaged:
            return
        self.begin()
        self._is_averaged = True
        self._compare(f"{self._settings()} {self._optimizer.gradient_layout()}", _different_gradients())
        for gradients in self._optimizer.gradients_in_parts():
            average(self.join(), gradients, self._device)

    def commits(self) -> bool:
        """Return whether this group takes the step; all of its ranks, or none.

        Raises:
            ConfigError: If groups have different gradients or values, on every rank.

        Collective: every rank of the group.
        """
        self.average()
        self._is_begun = self._is_averaged = False
        try:
            is_committed: bool = self.join().should_commit()
        except RuntimeError as error:
            msg = (
                f"A rank of replica group {self._config.replica_id} did not come to the end of a step within "
                f"{self._config.timeout_seconds:g} s ({error}). Restart the group: it catches up with the others."
            )
            raise LaunchError(msg) from error
        self.num_commits += is_committed
        if not is_committed:
            with self._coordinator.together("step"):
                if self._problem is not None:
                    raise self._problem
        return is_committed

    def step_apart(self, model: ModelWrapper, outer_optimizer: Callable[[Any], Optimizer] | None) -> None:
        """Synchronize the model's parameters after some steps, in place of gradients in each: LocalSGD, or DiLoCo.

        Collective: every rank of the group, which joins the others.
        """
        self._first_values = self._state.digest()
        module, optimizer, sync_every = unwrap_model(model), self._optimizer.unwrap(), self._config.sync_every
        if outer_optimizer is None:
            LocalSGD(self.join(), module, optimizer, sync_every).__enter__()
        else:
            outer = outer_optimizer([each for each in module.parameters() if each.requires_grad])
            pin = torch.cuda.is_available()
            DiLoCo(self.join(), [module], optimizer, outer, sync_every, pin_memory=pin).__enter__()

    def forget(self) -> None:
        """Learn that the gradients were dropped, or are about to be added to."""
        self._is_averaged = False

    @hookimpl
    def after_load(self, kind: str) -> None:
        """Forget the step: what was loaded is as old as the file, and groups that are ahead send theirs."""
        if kind in ("checkpoint", "model", "lora", "optimizer"):
            self._is_begun = self._is_averaged = False
            self.num_commits, self._first_values = 0, ""
            if self._joined is not None:
                self._joined.load_state_dict({"step": 0, "batches_committed": 0})

    def _no_quorum(self, error: Exception) -> LaunchError:
        config = self._config
        return LaunchError(
            f"Replica group {config.replica_id} found no quorum ({error}). The lighthouse at {config.lighthouse} does "
            f"not answer, fewer than min_replicas={config.min_replicas} groups came within "
            f"{config.quorum_timeout_seconds:g} s (`quorum_timeout_seconds`), or rank 0 of this group has ended. Start "
            "the lighthouse at the same address, and restart this group."
        )

    def _meet(self, before: dict[str, int], received: Any) -> bool:
        """Do what follows a quorum: catch up with groups that are ahead, and compare the values of the first step.

        Args:
            before: The manager's state before the quorum.
            received: The state of another group, if this one is behind.

        Returns:
            Whether the step can be taken: a run does not begin while a group that lives is missing.

        Collective: every rank of the group.
        """
        self._catch_up(before, received)
        if self.step > 0:
            return True
        with self._coordinator.together("step"):
            is_one_awaited = self._coordinator.rank == 0 and self._awaits_others()
        if self._coordinator.broadcast_object(is_one_awaited, name="step"):
            time.sleep(0.5)
            return False
        self._first_values = self._first_values or self._state.digest()
        self._compare(f"start {self._facts} {self._first_values}", _different_values())
        return True

    def _catch_up(self, before: dict[str, int], received: Any) -> None:
        """Take over what another group has sent, if every rank of this one has received its part.

        Collective: every rank of the group.
        """
        manager = self.join()
        failed = manager.errored() is not None
        counts = torch.tensor([failed, received is not None], dtype=torch.int32, device=self._device)
        if self._coordinator.world_size > 1:
            dist.all_reduce(counts)
        num_failed, num_received = counts.tolist()
        if num_failed:
            if num_received:  # another part than others', so that none is taken
                manager.load_state_dict(before)
            if not failed:
                manager.report_error(RuntimeError("another rank of the group could not connect to its peers"))
        elif num_received:
            self._state.restore(received, self.step, is_new=self.num_commits == 0)

    def _awaits_others(self) -> bool:
        """Return whether any group of the quorum sees one that lives and is not in it. Called by the first rank.

        Such as the only survivor of a failure, while it is in the step that failed and the others are back already: a
        quorum without it would begin the run a second time, at step 0.

        Raises:
            LaunchError: If it has not come within the time limit of a quorum.
        """
        config, manager = self._config, self.join()
        if config.lighthouse is None or manager.errored() is not None:
            return False
        try:
            missing = groups_outside(config.lighthouse, f"group_{config.replica_id}", config.timeout_seconds)
        except OSError as error:
            manager.report_error(error)  # this step is not taken
            return False
        (num_missing,) = total(manager, [len(missing)], self._device)
        if not num_missing:
            self._waits_since = None
            return False
        names = ", ".join(missing) or "a group that others see"
        if self._waits_since is None:
            self._waits_since = time.monotonic()
            log.warning(
                "Replica group %d waits for %s: it lives, and may have the steps of this run.", config.replica_id, names
            )
        if time.monotonic() - self._waits_since > config.quorum_timeout_seconds:
            msg = (
                f"Replica group {config.replica_id} would begin at step 0 without {names}, which lives, may have the "
                f"steps of this run, and did not come within {config.quorum_timeout_seconds:g} s. If it hangs, end it. "
                "`quorum_timeout_seconds` says how long to wait."
            )
            raise LaunchError(msg)
        return True

    def _settings(self) -> str:
        """Return what the step does with the average."""
        groups = self._optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        scaler = self._optimizer.loss_scaler
        return repr((self._facts, options, None if scaler is None else scaler.state_dict()))

    def _compare(self, text: str, problem: Exception) -> None:
        """Note a problem, which the step's end raises, unless all groups say the same."""
        if not agree(self.join(), text, self._device):
            self._problem = problem
            self.join().report_error(problem)

    def _connect(self) -> _GroupManager:
        """Connect this rank to the lighthouse and to its peers of other groups.

        Collective: every rank of the group.
        """
        config, coordinator, lighthouse = self._config, self._coordinator, self._config.lighthouse
        limit, quorum_limit = (timedelta(seconds=s) for s in (config.timeout_seconds, config.quorum_timeout_seconds))
        own_host = socket.gethostname()
        address = (own_host, 0)
        if coordinator.rank == 0:
            store = TCPStore(own_host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            self._closing.callback(lambda: store)  # which keeps it
            address = (own_host, store.port)
            if lighthouse is None:  # for a group that is alone
                server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
                self._closing.callback(server.shutdown)
                lighthouse = server.address()
        host, port = coordinator.broadcast_object(address, name="step")
        pg = ProcessGroupNCCL(limit) if self._device.type == "cuda" else ProcessGroupGloo(limit)
        self._closing.callback(pg.shutdown)
        manager = _GroupManager(
            self._meet,
            self._no_quorum,
            pg=pg,
            state_dict=self._state.capture,
            min_replica_size=config.min_replicas,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=quorum_limit,
            connect_timeout=limit,
            rank=coordinator.rank,
            world_size=coordinator.world_size,
            world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if config.spares else WorldSizeMode.DYNAMIC,
            store_addr=host,
            store_port=port,
            lighthouse_addr=lighthouse,
            replica_id=f"group_{config.replica_id}",
            # Values at the first step are compared, since at most one rank would get another group's.
            init_sync=False,
            quorum_retries=int(config.quorum_timeout_seconds),  # one each second, while no lighthouse answers
        )
        self._closing.callback(manager.shutdown)
        self._closing.callback(RankWatch(coordinator, config.timeout_seconds).close)
        return manager


class _GroupManager(Manager):  # type: ignore[misc] # torchft has no types
    """A manager whose received state is taken by all ranks of the group together, after the quorum.

    torchft hands each rank what it has received, also where another rank of the group has received nothing.

    Args:
        on_quorum: `ReplicaGroups._meet`.
        no_quorum: Returns what to raise in place of an error of the quorum.
        **options: Those of torchft's manager.
    """

    def __init__(
        self,
        on_quorum: Callable[[dict[str, int], Any], bool],
        no_quorum: Callable[[Exception], Exception],
        **options: Any,
    ) -> None:
        self._on_quorum, self._no_quorum, self._received = on_quorum, no_quorum, None
        super().__init__(load_state_dict=partial(setattr, self, "_received"), **options)

    def start_quorum(self, *arguments: Any, **options: Any) -> None:
        """Wait for the quorum of the next step, and for what follows it."""
        while True:
            before, self._received = self.state_dict(), None
            try:
                with warnings.catch_warnings():
                    # Of torchft itself, which takes a warning that raises for an error of the connection.
                    warnings.simplefilter("ignore")
                    super().start_quorum(*arguments, **options)
            except Exception as error:
                raise self._no_quorum(error) from error
            if self._on_quorum(before, self._received):
                return


def _different_values() -> ConfigError:
    return ConfigError(
        "Replica groups start with different values, options or numbers of ranks. Seed all groups alike "
        "(`launch(seed=...)` does), start them by the same script, and load the same checkpoint in each."
    )


def _different_gradients() -> GradientError:
    return GradientError(
        "Replica groups have gradients of different parameters in this step, or different learning rates or loss "
        "scales, so that their parameters would part. Step schedulers alike in all groups; use every layer in each "
        "step, or add `0.0 * sum(p.sum() for p in layer.parameters())` to the loss for layers that batches may skip."
    )
