"""How a load goes: everything is checked on all ranks before the first value is changed on any.

A load is made, which checks, and then run, which changes; so several of them can be checked before one is run.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.names import MODEL, OPTIMIZER
from booster_checkpoint.files.safetensors_file import holds_low_bits
from booster_checkpoint.load.fill import ShardLoader
from booster_checkpoint.load.naming import as_model_names, excluder
from booster_checkpoint.load.source import Source, open_source
from booster_core.errors import CheckpointAbsentError, CheckpointError
from booster_core.matching import (
    Expectation,
    check_same_parameters,
    check_states,
    compare,
    listed_states,
    states_by_parameter,
)
from booster_core.state import OptimizerInfo, may_have_load_hooks, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from contextlib import ExitStack

    from torch import nn

    from booster_checkpoint.files.checksums import CheckedReads
    from booster_checkpoint.files.composed import ComposedTensors
    from booster_checkpoint.load.fill import ReadableTensors
    from booster_checkpoint.load.load_hooks import Renaming
    from booster_checkpoint.session import Session
    from booster_checkpoint.storage import Location
    from booster_core.checkpoint_io import LoadReport, LoadRequest, ModelState
    from booster_core.state import StateAdapter

    Checks = Callable[[Location], CheckedReads | None]
    """Returns what verifies a file while it is read; ``None`` for a file without checksums."""


class ModelLoad:
    """A model that is to be read from any of the forms that `save_model` and Hugging Face libraries write.

    Names, shapes, dtypes and sizes of files are checked when it is made. Floating values are converted to the model's
    dtype. For what wins in a folder that holds several forms, see `booster_checkpoint.load.source`.

    Args:
        session: The ranks.
        state: The model.
        path: The request's path, or a folder below it.
        request: The call.
        stack: Closes the files.
        bucket_bytes: Most memory to use besides the shards, in bytes.
        checks: Returns what verifies a file while it is read, by its path; a training state knows its checksums.
        listed: What the folder holds, by a manifest; it is not listed then.
        left_out: Names of tensors that keep their values, as the checkpoint was saved without them.

    Attributes:
        report: What fits and what does not.

    Raises:
        CheckpointError: If the checkpoint can't be read, is damaged, or does not fit.

    Collective: every rank.
    """

    def __init__(
        self,
        session: Session,
        state: ModelState,
        path: Location,
        request: LoadRequest,
        stack: ExitStack,
        *,
        bucket_bytes: int,
        checks: Checks = lambda _: None,
        listed: Mapping[str, int | None] | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        self._session, self._adapter, self._path, self._request = session, state.adapter, path, request
        source: Source | None = None
        self._extra: tuple[str, ...] = ()

        def look() -> Expectation:
            nonlocal source
            source = stack.enter_context(
                open_source(
                    path,
                    MODEL,
                    checks=checks,
                    listed=listed,
                    dequantized=not holds_low_bits(state.module),
                )
            )
            excluded, kept_names = excluder(request.exclude), frozenset(left_out)

            def is_out(name: str) -> bool:
                return name in kept_names or excluded(name)

            self._extra = tuple(name for name in self._adapter.extra_state() if not is_out(name))
            found = Expectation.of(self._adapter, self._extra)
            kept = {name: meta for name, meta in found.tensors.items() if not is_out(name)}
            return replace(found, tensors=kept)

        expected = Expectation.merge(session.gather(request.call, self._path, look))
        assert source is not None, "opened on every rank, or on none"
        with session.together(request.call, self._path):
            known = (*expected.tensors, *expected.aliases, *expected.extra)
            self._named: ComposedTensors = as_model_names(
                source, state.module, known, rename=request.rename, exclude=request.exclude
            )
        self.report, homes = compare(self._named.tensors, self._named.values, expected)
        if request.call == "load_model":  # a training state was not written by way of a state dict
            self._run_load_hooks(state.module, expected)
            self.report, homes = compare(self._named.tensors, self._named.values, expected)
        if request.strict and not self.report.is_complete:
            msg = f"'{path}' does not fit the model. {self.report.problems()} {_remedy(self.report, request.call)}"
            raise CheckpointError(msg)
        self._metas = {name: self._named.tensors[key] for name, key in homes.items()}
        stored = {name: single for name, key in homes.items() if (single := self._named.layouts[key].single)}
        self._fill = ShardLoader(
            session, request.call, path, source, self._named, homes, stored, request.num_threads, bucket_bytes
        )

    def _run_load_hooks(self, module: nn.Module | None, expected: Expectation) -> None:
        """Name tensors as the load hooks of the user's modules do, and compute what they compute.

        Collective: every rank.
        """
        call, path, named, fits = self._request.call, self._path, self._named, self.report.is_complete
        hooked: Mapping[str, nn.Module] = {}
        own: Renaming | None = None

        def look() -> Renaming | None:
            nonlocal hooked, own
            if module is not None and may_have_load_hooks(module):
                from booster_checkpoint.load.load_hooks import hooked_modules, renaming_by

                hooked = hooked_modules(module)
                own = renaming_by(hooked, named, expected, fits=fits) if hooked else None
            return own

        renamings = [each for each in self._session.gather(call, path, look) if each is not None and each.changes]
        if not renamings:
            return
        from booster_checkpoint.load.load_hooks import HookedTensors, computed_by

        with self._session.together(call, path, for_long=True):
            values = {} if own is None else computed_by(hooked, named, expected, own, fits=fits)
        self._named = HookedTensors(named, renamings, values)

    def run(self) -> LoadReport:
        """Read the values.

        Collective: every rank.
        """
        adapter = self._adapter
        self._fill.run(lambda: adapter.model_targets(self._metas), keeps_values=adapter.keeps_values)
        with self._session.together(self._request.call, self._path):
            adapter.load_extra_state(self._named.extra_values(self._extra))
        # Not inside of `together`: an adapter may communicate here, and then all ranks fail or none.
        adapter.finish_load(model=True, optimizer=False)
        return self.report


class OptimizerLoad:
    """An optimizer whose state and parameter groups are to be read; options become those of the checkpoint.

    Arguments and errors are those of `ModelLoad`.

    Collective: every rank.
    """

    def __init__(
        self,
        session: Session,
        adapter: StateAdapter,
        path: Location,
        request: LoadRequest,
        stack: ExitStack,
        *,
        bucket_bytes: int,
        checks: Checks = lambda _: None,
        listed: Mapping[str, int | None] | None = None,
    ) -> None:
        self._session, self._adapter, self._path, self._call = session, adapter, path, request.call
        source: Source | None = None
        saved: OptimizerInfo | None = None

        def look() -> list[Any]:
            nonlocal source, saved
            source = stack.enter_context(open_source(path, OPTIMIZER, checks=checks, listed=listed))
            is_by_position = {"state", "param_groups"} <= source.values.keys()  # as torch saves its `state_dict`
            saved = None if is_by_position else read_optimizer_info(source)
            return OptimizerInfo.of(adapter).entries()

        gathered = session.gather_each(request.call, self._path, look)
        here = OptimizerInfo.merge(gathered)
        assert source is not None, "opened on every rank, or on none"
        named: ReadableTensors = source
        if saved is None:
            from booster_checkpoint.load.optimizer_positions import by_name

            with session.together(request.call, self._path):
                named, saved = by_name(source, here, [groups for groups, *_ in gathered])
        assert saved is not None, "an error was raised on every rank"
        check_same_parameters(self._path, saved, here)
        self._states = states_by_parameter(self._path, named.tensors, saved)
        self._saved, self._tensors = saved, named.tensors
        # State that exists is kept where its shape is that of the checkpoint; its kind must be, too.
        misfits: dict[str, str] = {}
        for _, theirs in session.gather(request.call, self._path, lambda: listed_states(adapter, self._tensors)):
            misfits |= {key: reason for key, reason in theirs.items() if not reason.startswith("shape ")}
        check_states(self._path, self._tensors, [(list(self._tensors), misfits)])
        stored = {key: key for key in self._tensors} if named is source else {}
        homes = {key: key for key in self._tensors}
        self._fill = ShardLoader(
            session, request.call, path, source, named, homes, stored, request.num_threads, bucket_bytes
        )

    def run(self) -> None:
        """Read the values.

        Collective: every rank.
        """
        adapter, tensors = self._adapter, self._tensors
        adapter.prepare_optimizer_load(self._states, self._saved.scalars, self._saved.groups)
        told = self._session.gather(self._call, self._path, lambda: listed_states(adapter, tensors))
        check_states(self._path, tensors, told)
        self._fill.run(adapter.optimizer_shards, keeps_values=adapter.keeps_values)
        adapter.finish_load(model=False, optimizer=True)


def _remedy(report: LoadReport, call: str) -> str:
    if call != "load_model":
        return "Build the model as in the run that saved it, or pass `strict=False` to load what fits."
    if report.missing and report.unexpected:
        return (
            "If names differ, pass `rename=` ({pattern: replacement}), or load the file into the model before `boost` "
            "by its own means. `strict=False` would leave what is missing as it is."
        )
    return "Pass `strict=False` to load what fits, and leave the rest as it is."


@contextmanager
def changing(what: str) -> Iterator[None]:
    """Let errors of the body, which runs loads, say that values of the model or the optimizer may have changed."""
    try:
        yield
    except CheckpointError as error:
        msg = f"{error} The values of {what} are partly those of this checkpoint now."
        raise type(error)(msg) from error


def read_optimizer_info(source: Source) -> OptimizerInfo:
    """Return parameter groups and other state: from the file itself, or from the file next to the index."""
    if "optimizer" in source.values:
        return OptimizerInfo.from_json(source.values["optimizer"], str(source.path))
    place = source.groups_path
    written = None if place is None else place.read_bytes()
    if place is None or written is None:
        msg = f"'{source.path}' holds no optimizer checkpoint: it comes without parameter groups ('param_groups.json')."
        raise CheckpointAbsentError(msg)
    return OptimizerInfo.from_json(parse_json(written, str(place)), str(place))
