"""`check_policy`: prove, before anything is split, that split layers compute and differentiate as the whole ones do.

One module of each kind that a plan changes runs on random weights: whole, by the model's own code, and split, for every
rank within this process, with the plan installed on the user's own modules and then undone. So what is checked is the
object that trains, closures and all. Outputs and all gradients are compared. Random weights show differences that a
model's own hide, and exist for lazy models too. Nothing is communicated, so all ranks come to the same verdict.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.modules import ModulePatches
from booster_hybrid.policy.base import Style
from booster_hybrid.probe.calls import (
    MOST_POSITIONS,
    Call,
    RecordedCalls,
    Split,
    call_of_other_length,
    calls_of_model,
    clear_number,
    copied,
    record_calls,
    with_choices,
)
from booster_hybrid.probe.in_process import InProcessRank, on_ranks
from booster_hybrid.probe.running import (
    Difference,
    NoValuesError,
    Result,
    Runner,
    Setting,
    holding,
    random_values,
    restored,
    settings_of,
)
from booster_hybrid.probe.units import (
    ProbeTarget,
    around,
    calls_of,
    is_torchs_own,
    name_around,
    structural_key,
    units_of,
)
from booster_hybrid.tensor_parallel.linear import is_linear
from booster_hybrid.tensor_parallel.plan import COLUMNS, ROWS, TensorParallelModel, TensorPlan
from booster_hybrid.tensor_parallel.split import is_repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.policy.base import ShardingPolicy

    SplitSequence = Callable[
        [nn.Module, Sequence[Sequence[nn.Module]], InProcessRank, TensorParallelModel, ModulePatches], object
    ]


class ReadOutsideError(ConfigError):
    """A parameter that a policy splits is read outside of the module that holds it.

    Args:
        plan: What is split.
        reads: Names of such parameters, with the function that reads each.

    Attributes:
        policy: The policy without its rules for tables of such a parameter; ``None`` where other rules split it.
    """

    def __init__(self, plan: TensorPlan, reads: Mapping[str, str]) -> None:
        name, function = next(iter(reads.items()))
        super().__init__(
            f"The policy of {type(plan.model).__name__} splits '{name}', which `{function}` reads outside of the "
            "module that holds it, where each rank would have a part. Leave it whole by a `custom_policy` without a "
            "rule for it, or use it by calling its module only, as a tied head does that has a rule of its own."
        )
        read = {each for key in reads for each in plan.names.names_of[id(plan.names.parameters[key])]}
        targets = {target for target in plan.targets if target in read or f"{target}.weight" in read}
        is_table = all(plan.targets[target].style in (Style.VOCABULARY, Style.HEAD) for target in targets)
        kept = tuple(rule for rule in plan.policy.rules if targets.isdisjoint(plan.matching(rule)))
        self.policy: ShardingPolicy | None = replace(plan.policy, rules=kept) if is_table else None


_SAMPLES = 2
"""In batches of random hidden states."""


class CheckedPolicy(NamedTuple):
    """What a check of a policy has found.

    Args:
        unchecked: What could not be checked, by name, with the reasons.
        left_whole: Lists of layers of which the policy splits nothing and that no batch has reached: their sequences
            stay whole.
    """

    unchecked: dict[str, str]
    left_whole: frozenset[str] = frozenset()


class _UncheckableError(Exception):
    """A unit can't be compared; the message says why."""


def check_policy(
    model: nn.Module,
    policy: ShardingPolicy,
    size: int,
    device: torch.device,
    *,
    batch: Callable[[], Any] | None = None,
    split_sequence: SplitSequence | None = None,
) -> CheckedPolicy:
    """Raise if a policy changes what a layer computes, or its gradients.

    Args:
        model: The user's model, whole; everything that is changed for the check is put back.
        policy: How it is split.
        size: Number of tensor parallel ranks.
        device: Where layers are run.
        batch: Returns a batch, for layers whose forward needs more than hidden states; ``None`` where there is none.
        split_sequence: Splits the sequences of lists of layers, as ``"split_gather"`` does, given the model, the lists,
            the rank, the result of the installed plan, and what notes the changes; ``None`` leaves them whole.

    Raises:
        ConfigError: Naming the first layer that differs, by how much, and what to correct in the policy.
    """
    plan = TensorPlan(model, policy, size, parallel_output=False)
    with restored(plan.model, device):
        return _Probe(plan, device, batch, split_sequence).run()


class _Probe:
    def __init__(
        self,
        plan: TensorPlan,
        device: torch.device,
        batch: Callable[[], Any] | None,
        split_sequence: SplitSequence | None,
    ) -> None:
        self._plan, self._device, self._batch, self._split_sequence = plan, device, batch, split_sequence
        self._has_split_sequences = False
        self._model_name = type(plan.model).__name__
        whole, lists = plan.policy.whole_sequences, plan.policy.layers
        self._whole_sequences = tuple(f"{name}." for name in whole)
        self._lists = tuple(f"{name}." for name in lists)
        rank = InProcessRank(None, 0, plan.size)
        changes = ModulePatches()
        try:
            self._splits = plan.install(rank, changes).splits
        finally:
            changes.undo()

    def run(self) -> CheckedPolicy:
        kinds: dict[Hashable, list[ProbeTarget]] = {}
        units = units_of(self._plan)
        if self._split_sequence is not None:
            units += self._whole_layers(units)
        for unit in units:
            inside = len(unit.name) + 1 if unit.name else 0
            rules = {name[inside:]: replace(self._plan.targets[name], pattern="") for name in unit.targets}
            kinds.setdefault(structural_key(unit.module, unit.place, rules), []).append(unit)
        recordings = self._record(list(kinds.values()))
        recording = recordings[0]
        if recording.reads_outside:
            raise ReadOutsideError(self._plan, recording.reads_outside)
        unchecked: dict[str, str] = {}
        called: set[str] = set()
        unreached: set[str] = set()  # layers of which the plan splits nothing, and which the batch does not reach
        for alike in kinds.values():
            try:
                called |= self._check_in_place(alike[0], list(kinds.values()), recording)
                for other in recordings[1:] if self._with_split_sequences(alike[0]) else ():
                    with contextlib.suppress(_UncheckableError):  # not all models take every length
                        self._check_in_place(alike[0], list(kinds.values()), other, is_first=False)
            except _UncheckableError as error:
                unchecked.update({unit.name or "(the model)": str(error) for unit in alike})
                if not alike[0].targets and recording.failure is None and alike[0].name not in recording.calls:
                    unreached |= {unit.name for unit in alike}
            else:
                for unit in alike[1:]:
                    called |= {each for each in unit.targets if alike[0].name + each[len(unit.name) :] in called}
        unreached = unreached if self._has_split_sequences else set()
        unchecked = {name: reason for name, reason in unchecked.items() if name not in unreached}
        left_whole = frozenset(name.rpartition(".")[0] for name in unreached)
        return CheckedPolicy(unchecked | self._without_calls(called, unchecked), left_whole)

    def _whole_layers(self, units: Sequence[ProbeTarget]) -> list[ProbeTarget]:
        """Return the layers of which the plan splits nothing, but whose sequences would be split."""
        known = {layer for unit in units for layers in unit.layers for layer in layers}
        found = []
        for path in self._plan.policy.layers:
            layers = self._plan.names.modules.get(path)
            for key, layer in layers.named_children() if isinstance(layers, nn.ModuleList) else ():
                if layer not in known and not f"{path}.".startswith(self._whole_sequences):
                    found.append(ProbeTarget(f"{path}.{key}", layer, (), int(key), ((layer,),)))
        return found

    def _record(self, kinds: Sequence[Sequence[ProbeTarget]]) -> list[RecordedCalls]:
        """Run the model where there is a batch, and again at another length where sequences are split."""
        if self._batch is None:
            return [RecordedCalls(failure="there was no batch")]
        try:
            batch = self._batch()
        except Exception as error:  # noqa: BLE001 - whatever a data set raises, training tells of it
            return [RecordedCalls(failure=f"there was no batch ({type(error).__name__}: {error})")]
        names = self._plan.names
        watched = {alike[0].name: alike[0].module for alike in kinds}
        outside = [name_around(self._plan, alike[0]) for alike in kinds if alike[0].place is not None]
        watched |= {name: names.outermost[name] for name in outside}
        alike = {unit.module: units[0].name for units in kinds for unit in units[1:] if unit.place is not None}
        split = self._readers()
        model, values = self._plan.model, {}
        if any(is_repeated(parameter) for parameter in model.parameters()):  # a lazy model, without values yet
            # Torch's own linear layers and embeddings take what stands in for values; other code may not.
            plain = {id(each) for module in model.modules() if is_torchs_own(module) for each in module.parameters()}
            every = {id(each) for each in model.parameters()}
            try:
                values = random_values(model, self._device, torch.float32, every, plain)
            except NoValuesError as error:
                return [RecordedCalls(failure=str(error))]
        split = {id(values[key]) if key in values else key: each for key, each in split.items()}
        with (
            holding(model, values, self._device, torch.float32) if values else contextlib.nullcontext(),
            torch.autocast(self._device.type, enabled=False),
        ):
            # Where sequences are split, of lengths that can be told from other sizes.
            batches = () if self._split_sequence is None else with_choices(batch)
            size = self._plan.size
            for each, call in ((one, call) for one in batches for call in calls_of_model(model, one, size)):
                args, kwargs = call
                recording = record_calls(model, copied(kwargs or args), watched, alike, split)
                if recording.failure is None:
                    other = call_of_other_length(model, each, size, call)
                    if other is None:
                        return [recording]
                    return [recording, record_calls(model, copied(other[1] or other[0]), watched, alike, split)]
            return [record_calls(model, copied(batch), watched, alike, split)]

    def _readers(self) -> dict[int, Split]:
        """Return the parameters that are split, with the modules that may read them."""
        split: dict[int, Split] = {}
        names = self._plan.names
        for name in self._splits:
            parameter = names.parameters.get(name)
            owner = name.rpartition(".")[0]
            if parameter is not None:
                readers = split.setdefault(id(parameter), (name, []))[1]
                readers += [names.modules[owner], *({names.outermost[owner]} - {names.modules[owner]})]
                if owner and name in self._plan.targets:  # as of a convolution that its parent computes
                    readers.append(names.parent(owner))
        return split

    def _check_in_place(
        self,
        unit: ProbeTarget,
        kinds: Sequence[Sequence[ProbeTarget]],
        recording: RecordedCalls,
        *,
        is_first: bool = True,
    ) -> set[str]:
        """Raise if a unit computes something else when it is split, also where the layers around it are split."""
        try:
            return self._check(unit, recording, is_first=is_first)
        except ConfigError:
            if unit.place is None or name_around(self._plan, unit) not in recording.calls:
                raise
            # It may be given something that a layer before it has made for this rank, as a bias of its heads.
            changes = ModulePatches()
            try:
                return self._check(around(self._plan, unit, kinds, changes), recording, is_first=is_first)
            except (ConfigError, _UncheckableError):
                pass
            finally:
                changes.undo()
            raise

    def _check(self, unit: ProbeTarget, recording: RecordedCalls, *, is_first: bool) -> set[str]:
        """Raise if a unit computes something else when it is split; return which targets were called."""
        if unit.targets == (unit.name,) and is_torchs_own(unit.module):
            return {unit.name}
        reasons = []
        try:
            length = self._length(unit) if is_first else 2 * self._plan.size + 1
            for call in calls_of(self._plan, unit, recording.calls.get(unit.name), self._device, length):
                for setting in settings_of(unit.module):
                    comparison = _Comparison(self._plan, unit, call, setting, self._device, self._splits)
                    try:
                        whole = comparison.runner.whole(comparison.values)
                    except Exception as error:  # noqa: BLE001 - the unit needs to be called in another way
                        reasons.append(f"{type(error).__name__}: {error}")
                        continue
                    if whole is None:
                        reasons.append("it gives other outputs in each call, or infinite ones")
                        continue
                    return self._compare(comparison, whole, unit, is_first=is_first)
        except NoValuesError as error:
            raise _UncheckableError(str(error)) from error
        shown = "" if unit.name in recording.calls else f"no batch showed how it is called ({recording.failure})"
        if reasons and shown:
            msg = f"on random hidden states alone it fails with {reasons[0]}, and {shown}"
        else:
            msg = reasons[0] if reasons else f"it can't be called on random hidden states, and {shown}"
        raise _UncheckableError(msg)

    def _length(self, unit: ProbeTarget) -> int:
        """Return a number of positions for random hidden states."""
        size = self._plan.size
        clear = None if self._split_sequence is None else clear_number(unit.module, _SAMPLES, MOST_POSITIONS // size)
        return 2 * size + 1 if clear is None else clear * size

    def _compare(self, comparison: _Comparison, whole: Result, unit: ProbeTarget, *, is_first: bool) -> set[str]:
        what = f"The sharding policy of {self._model_name} changes what {unit.title} computes"
        called: set[str] = set()
        if is_first:
            remedy = _remedy(self._plan, unit, self._splits)
            called = comparison.compare(whole, what, remedy, self._of_gradients(unit))
        layers = self._with_split_sequences(unit)
        if self._split_sequence is None or not layers:
            return called
        what = (
            f"`sequence_parallelism_mode='split_gather'` changes what {unit.title} of {self._model_name} computes, "
            "which looks at several positions of a sequence outside of the modules that the policy splits"
        )
        remedy = (
            "Move that into a module of its own with submodules, which gets whole sequences, or leave "
            "`sequence_parallelism_mode` out."
        )
        split = functools.partial(self._split_sequence, self._plan.model, layers)
        comparison.compare(whole, what, remedy, lambda found: f"{what}: {found}. {remedy}", split)
        self._has_split_sequences = True
        return called

    def _with_split_sequences(self, unit: ProbeTarget) -> list[tuple[nn.Module, ...]]:
        """Return the layers of a unit whose sequences would be split, list by list."""
        paths = {module: f"{name}." for name, module in self._plan.names.outermost.items()}
        return [
            each
            for each in unit.layers
            if not paths[each[0]].startswith(self._whole_sequences)
            and (not self._lists or paths[each[0]].startswith(self._lists))
        ]

    def _of_gradients(self, unit: ProbeTarget) -> Callable[[str], str]:
        return lambda found: (
            f"The sharding policy of {self._model_name} changes the gradients of {unit.title}, not its outputs: "
            f"{found}. In `custom_policy`, a parameter or module that is whole on every rank but works on split "
            "activations, such as a norm of each head, needs `Style.SUMMED_GRADIENT`; see docs/sharding-policies.md."
        )

    def _without_calls(self, called: set[str], unchecked: Mapping[str, str]) -> dict[str, str]:
        """Return the rules of linear layers of which none was called, with the first of these."""
        by_rule: dict[int, list[str]] = {}
        for name, rule in self._plan.targets.items():
            if rule.style in (*COLUMNS, *ROWS, Style.VOCABULARY):
                by_rule.setdefault(id(rule), []).append(name)
        missed = [names[0] for names in by_rule.values() if called.isdisjoint(names)]
        return {
            name: "no call of the model reached it"
            for name in missed
            if not any(name.startswith(f"{each}.") or each in (name, "(the model)") for each in unchecked)
        }


class _Comparison:
    """Runs one unit whole, and split for all ranks.

    Args:
        plan: The plan.
        unit: The unit.
        call: What it is called with.
        setting: How it runs.
        device: Where it runs.
        splits: The first rank's parts of the model's parameters, by name.

    Attributes:
        runner: Runs the unit.
        values: Those of its parameters, whole, by ``id``.
    """

    def __init__(
        self,
        plan: TensorPlan,
        unit: ProbeTarget,
        call: Call,
        setting: Setting,
        device: torch.device,
        splits: Mapping[str, Any],
    ) -> None:
        self._plan, self._unit, self._setting, self._device = plan, unit, setting, device
        own = {id(parameter) for parameter in unit.module.parameters()}
        inside = {
            id(parameter): splits[name]
            for parameter in unit.module.parameters()
            for name in plan.names.names_of[id(parameter)]
            if name in splits
        }
        light = {key for key, split in inside.items() if key in own and not split.is_shared}
        self.values = random_values(unit.module, device, setting.dtype, light)
        self.runner = Runner(unit.module, call, setting, device)
        self._names = {id(parameter): name for name, parameter in unit.module.named_parameters()}

    def compare(
        self,
        whole: Result,
        what: str,
        remedy: str,
        of_gradients: Callable[[str], str],
        split_sequence: Callable[..., object] | None = None,
    ) -> set[str]:
        """Raise if the unit gives something else when it is split.

        Returns:
            The targets that were called.
        """
        called: set[str] = set()
        run = functools.partial(self._on_rank, whole, called, split_sequence)
        try:
            differences = on_ranks(self._plan.size, run, self._plan.model.modules(), self._device)
        except ConfigError:
            raise
        except Exception as error:
            msg = f"{what}: split over {self._plan.size} ranks it fails with {type(error).__name__}: {error}. {remedy}"
            raise ConfigError(msg) from error
        for key, found in (each for each in differences if each is not None):
            if key is None:
                msg = f"{what}: {found}. {remedy}"
                raise ConfigError(msg)
            raise ConfigError(of_gradients(f"the gradient of '{self._names.get(key, f'(input {key})')}' {found}"))
        return called

    def _on_rank(
        self,
        whole: Result,
        called: set[str],
        split_sequence: Callable[..., object] | None,
        rank: InProcessRank,
    ) -> Difference:
        """Return what differs on a rank."""
        changes, plan = ModulePatches(), self._plan
        try:
            result = plan.install(rank, changes, self._unit.targets)
            if split_sequence is not None:
                split_sequence(rank, result, changes)
            for name in self._unit.targets:
                module = plan.names.modules.get(name)
                if module is not None:
                    changes.hook(module.register_forward_pre_hook(lambda *_, name=name: called.add(name)))
            parts = {
                key: next((result.splits[name] for name in plan.names.names_of[key] if name in result.splits), None)
                for key in self.values
            }
            local = {
                key: values if parts[key] is None else _part(values, parts[key]) for key, values in self.values.items()
            }
            found = self.runner.run(local)
        finally:
            changes.undo()
        return found.differs_from(
            whole,
            self._setting.tolerance,
            lambda key, whole: whole if parts.get(key) is None else parts[key].take(whole),  # type: ignore[union-attr]
        )


def _part(values: Tensor, split: Any) -> Tensor:
    if not values.requires_grad and len(split.ranges) == 1:  # large: a view of it serves
        (start, stop), *_ = split.ranges
        return values.narrow(split.dim, start, stop - start)
    part: Tensor = split.take(values.detach())
    return part.requires_grad_(values.requires_grad)


def _remedy(plan: TensorPlan, unit: ProbeTarget, splits: Mapping[str, Any]) -> str:
    """Return what to correct, with the linear layers that look fused."""
    of = {name: splits[f"{name}.weight"] for name in unit.targets if plan.targets[name].style in (*COLUMNS, *ROWS)}
    inputs = {each.global_shape[each.dim] for name, each in of.items() if plan.targets[name].style is Style.ROW}
    fused = []
    for name, each in of.items():
        length = each.global_shape[each.dim]
        count = next((number for number in (3, 2) if length in {number * size for size in inputs}), None)
        if plan.targets[name].style in COLUMNS and len(each.ranges) == 1 and count is not None:
            fused.append(f"'{name}' looks like {count} fused projections: `num_blocks={count}`")
    hint = f"{'; '.join(fused)}. " if fused else ""
    modules = plan.names.modules
    own = sorted({type(modules[name]).__name__ for name in of if not is_linear(modules[name])})
    if own:
        hint += f"{', '.join(own)} has code of its own, in whose place split layers compute a plain linear map. "
    return (
        f"{hint}In `custom_policy`, a linear layer that computes several projections needs `num_blocks=` (3 for q, "
        "k and v; 2 for gate and up), one that computes attention heads needs `units=`, counts of heads in its "
        "parent need `scaled=`, and a parent that views or divides by the width of its input, as in "
        "`view(B, T, C)`, needs `local_width=True`; see docs/sharding-policies.md."
    )
