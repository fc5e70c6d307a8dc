from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from patience import is_alive

from booster_testing import (
    RankDiedError,
    RankError,
    RankTimeoutError,
    close_ranks,
    expect_on_ranks,
    open_ranks,
    ranks,
    run_on_ranks,
)
from booster_testing.rank_pool import can_fork, worker_pids


@dataclass
class Point:
    x: int


class OddError(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, a, b):
        super().__init__("odd")
        self.pair = a, b


def _sum_of_ranks(offset):
    tensor = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor


def _pid():
    return os.getpid()


def _parent_pid():
    return os.getppid()


def _echo(point, *, scale=1):
    assert isinstance(point, Point)
    return Point(point.x * scale)


def _fail_on(rank, message):
    if dist.get_rank() == rank:
        raise ValueError(message)
    dist.barrier()


def _fail_everywhere():
    msg = f"rank {dist.get_rank()} says no"
    raise KeyError(msg)


def _raise_odd():
    raise OddError(1, 2)


def _sleep_on(rank, seconds):
    if dist.get_rank() == rank:
        time.sleep(seconds)


def _hang_in_collective():
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1))


def _die(how):
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def _dirty():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.manual_seed(5)
    os.environ["DIRT"] = "1"
    os.chdir("/")


def _state():
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.initial_seed(),
        os.environ.get("DIRT"),
        os.environ["OMP_NUM_THREADS"],
    )


def _leave_thread():
    threading.Thread(target=time.sleep, args=(5,), name="forgotten").start()


def _leave_group():
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _make_and_forget_group():
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()


def _environment_variable(name):
    return os.environ.get(name)


def _warn():
    warnings.warn("careful", UserWarning, stacklevel=1)


def _draw():
    return torch.rand(3)


def _fail_assert():
    number = 41
    assert number == 42


def test_ranks_share_a_process_group():
    results = run_on_ranks(_sum_of_ranks, 3, 1)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert all(torch.equal(result[2], torch.tensor([6.0])) for result in results)


def test_workers_are_reused_and_added():
    pids = run_on_ranks(_pid, 1)
    assert run_on_ranks(_pid, 2)[:1] == pids
    assert run_on_ranks(_pid, 1) == pids


@pytest.mark.skipif(not can_fork(), reason="workers are forks on Linux without CUDA")
def test_workers_are_forks_of_one_process_that_outlives_them():
    (parent,) = set(run_on_ranks(_parent_pid, 2))
    close_ranks()
    assert run_on_ranks(_parent_pid, 1) == [parent]
    assert parent in worker_pids()


def test_a_rank_that_cannot_load_the_function_is_named(tmp_path, monkeypatch):
    (tmp_path / "loads_once.py").write_text(
        textwrap.dedent(f"""
        import os
        from pathlib import Path

        if os.getpid() != {os.getpid()}:
            Path({str(tmp_path / "first")!r}).open("x").close()

        def nothing():
            pass
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankError, match="RuntimeError: another rank could not load the function") as caught:
        run_on_ranks(importlib.import_module("loads_once").nothing, 2)
    assert isinstance(caught.value.__cause__, FileExistsError)


def test_classes_of_the_test_file_can_be_arguments_and_results():
    assert run_on_ranks(_echo, 2, Point(3), scale=2) == [Point(6), Point(6)]


def _call(function):
    return function()


def test_functions_of_a_file_that_is_not_importable_can_be_arguments(tmp_path, monkeypatch):
    file = tmp_path / "apart.py"
    file.write_text("def answer():\n    return 42\n")
    name = "not_importable.apart"  # as pytest names a file below a folder
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "not_importable", types.ModuleType("not_importable"))
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert run_on_ranks(_call, 2, module.answer) == [42, 42]


def test_exception_has_its_rank_and_traceback():
    with pytest.raises(RankError, match=r"failed on ranks 1, 0 of 2; on rank 1:\n(.|\n)*_fail_on") as caught:
        run_on_ranks(_fail_on, 2, 1, "no luck")
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) == "no luck"
    assert set(caught.value.exceptions) == {0, 1}


def test_all_exceptions_are_reported():
    with pytest.raises(RankError, match="rank 0 says no") as caught:
        run_on_ranks(_fail_everywhere, 2)
    assert "rank 1 says no" in str(caught.value)


def test_exception_that_cannot_be_unpickled_is_reported_as_text():
    with pytest.raises(RankError, match="OddError: odd") as caught:
        run_on_ranks(_raise_odd, 1)
    assert caught.value.exceptions == {0: None}


def test_failed_assert_shows_local_variables():
    with pytest.raises(RankError, match="number = 41"):
        run_on_ranks(_fail_assert, 1)


def _skip():
    pytest.skip("there is no moon")


def test_a_skip_on_ranks_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match=r"^there is no moon$"):
        run_on_ranks(_skip, 2)


def test_expect_on_ranks_returns_the_exceptions():
    exceptions = expect_on_ranks(LookupError, "says no", _fail_everywhere, 2)
    assert [str(exception) for exception in exceptions] == ["'rank 0 says no'", "'rank 1 says no'"]


@pytest.mark.parametrize(
    ("error_type", "match", "complaint"),
    [
        (ValueError, "luck", "rank 0 raised something else"),
        ((ValueError, RuntimeError), "luck", "rank 0's message does not match 'luck'"),
    ],
)
def test_expect_on_ranks_requires_the_error_on_every_rank(error_type, match, complaint):
    with pytest.raises(AssertionError, match=complaint):
        expect_on_ranks(error_type, match, _fail_on, 2, 1, "no luck")


def test_expect_on_ranks_fails_on_success():
    with pytest.raises(AssertionError, match="rank 1 raised nothing"):
        expect_on_ranks(ValueError, "", _pid, 2)


def test_hang_is_ended_with_stacks():
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"did not end within 1 s on ranks 1 of 2(.|\n)*in _sleep_on"):
        run_on_ranks(_sleep_on, 2, 1, 60, timeout_seconds=1)
    assert time.monotonic() - start < 20
    assert run_on_ranks(_pid, 2)[0] in worker_pids()


def test_hang_in_a_collective_is_ended_with_stacks():
    with pytest.raises(RankTimeoutError, match=r"on ranks 1 of 2(.|\n)*in _hang_in_collective"):
        run_on_ranks(_hang_in_collective, 2, timeout_seconds=1)


@pytest.mark.parametrize(("how", "words"), [("exit", "ended with exit code 7"), ("kill", "was killed by SIGKILL")])
def test_process_death_is_detected_at_once(monkeypatch, how, words):
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(RankDiedError, match=f"the process of rank 1 {words}"):
        run_on_ranks(_die, 2, how)
    assert time.monotonic() - start < 20
    assert len(run_on_ranks(_pid, 2)) == 2


def test_each_call_starts_from_a_clean_state():
    before = run_on_ranks(_state, 1)
    run_on_ranks(_dirty, 1)
    assert run_on_ranks(_state, 1) == before == [(torch.float32, True, 1, 0, None, "1")]


def test_seeds_are_the_same_in_every_call_and_rank():
    first, second = run_on_ranks(_draw, 2)
    assert torch.equal(first, second)
    assert torch.equal(first, run_on_ranks(_draw, 1)[0])


def test_leaked_thread_is_named():
    with pytest.raises(RankError, match="left behind on rank 0: thread 'forgotten'"):
        run_on_ranks(_leave_thread, 1)


def test_leaked_process_group_is_named():
    with pytest.raises(RankError, match="left behind on rank 0: a process group that it initialized itself"):
        run_on_ranks(_leave_group, 1)


class _Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self):
        self.itself = self


_kept = {}


def _make_cycles():
    _kept["forgotten"] = weakref.ref(_Cycle())
    _kept["kept"] = _Cycle()


def _forget():
    _kept["kept"] = weakref.ref(_kept["kept"])


def _which_live():
    return {name: reference() is not None for name, reference in _kept.items()}


def test_reference_cycles_of_a_call_are_collected():
    run_on_ranks(_make_cycles, 1)
    run_on_ranks(_forget, 1)
    assert not run_on_ranks(_which_live, 1)[0]["forgotten"]


def _import_much():
    import torch.distributed.fsdp  # noqa: F401 - one of those that make many objects


def _num_objects():
    return len(gc.get_objects())


def test_imported_modules_do_not_slow_later_calls():
    run_on_ranks(_import_much, 1)
    assert run_on_ranks(_num_objects, 1)[0] < 20_000


def test_subgroups_of_the_default_group_are_not_a_leak():
    run_on_ranks(_make_and_forget_group, 2)


def test_workers_get_the_environment_of_the_test(monkeypatch):
    monkeypatch.setenv("COLOUR", "blue")
    assert run_on_ranks(_environment_variable, 2, "COLOUR") == ["blue", "blue"]
    monkeypatch.delenv("COLOUR")
    assert run_on_ranks(_environment_variable, 1, "COLOUR") == [None]


def test_workers_apply_the_warning_filters_of_the_test():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RankError, match="UserWarning: careful"):
            run_on_ranks(_warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_on_ranks(_warn, 1) == [None]


@pytest.mark.parametrize("fn", [lambda: None, time.sleep])
def test_function_that_is_not_at_top_level_raises(fn):
    with pytest.raises(TypeError, match="top level of a module's file"):
        run_on_ranks(fn, 1)


@pytest.mark.parametrize("world_size", [0, 9])
def test_world_size_out_of_range_raises(world_size):
    with pytest.raises(ValueError, match=f"`world_size={world_size}` is not between 1 and 8"):
        run_on_ranks(_pid, world_size)


def test_script_can_run_its_own_functions(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        from booster_testing import run_on_ranks

        class Answer:
            pass

        def answer(kind):
            assert kind is Answer
            return kind()

        if __name__ == "__main__":
            assert all(isinstance(result, Answer) for result in run_on_ranks(answer, 2, Answer))
            with open("runs", "a") as runs:  # gloo of torch 2.10 prints to stdout
                runs.write("once ")
        """)
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, (tmp_path / "runs").read_text()) == (0, "once "), done.stderr


@pytest.mark.parametrize("end", [pytest.param("exit", marks=pytest.mark.slow), "kill"])
def test_workers_end_with_their_parent(tmp_path, end):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        import script
        from booster_testing import run_on_ranks

        def pid():
            return os.getpid()

        def sleep():
            time.sleep(100)

        if __name__ == "__main__":
            with open("pids", "w") as pids:  # gloo of torch 2.10 prints to stdout
                print(*run_on_ranks(script.pid, 2), file=pids)
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    done = subprocess.run(
        [sys.executable, "script.py", end], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == (0 if end == "exit" else -signal.SIGKILL), done.stderr
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def _group_through_its_store():
    """Return what stays while a group is open: its store's count of calls, and torch's own group."""
    store = dist.distributed_c10d._get_default_store()
    count = store.add(f"calls of rank {dist.get_rank()}", 1)
    dist.barrier()
    return count, id(dist.group.WORLD)


def _fails_on_the_last():
    if dist.get_rank() == 1:
        msg = "only here"
        raise ValueError(msg)


def test_calls_share_an_open_group_and_its_store():
    with open_ranks(2) as opened:
        first, again = opened.call(_group_through_its_store), opened.call(_group_through_its_store)
        assert [count for count, _ in first] == [1, 1]
        assert [(2, group) for _, group in first] == again
    assert [count for count, _ in run_on_ranks(_group_through_its_store, 2)] == [1, 1]


def test_an_open_group_starts_each_call_from_the_same_random_state():
    with open_ranks(2) as opened:
        assert torch.equal(opened.call(_random)[0], opened.call(_random)[1])


def test_an_open_group_is_opened_again_after_an_error_a_death_and_a_call_on_others():
    with open_ranks(2) as opened:
        with pytest.raises(RankError, match="only here"):
            opened.call(_fails_on_the_last)
        assert [count for count, _ in opened.call(_group_through_its_store)] == [1, 1]
        opened.expect(ValueError, "only here", _raise_everywhere)
        assert [count for count, _ in opened.call(_group_through_its_store)] == [1, 1]
        with pytest.raises(RankDiedError):
            opened.call(_ends)
        assert [count for count, _ in opened.call(_group_through_its_store)] == [1, 1]
        assert len(run_on_ranks(_group_through_its_store, 3)) == 3
        assert [count for count, _ in opened.call(_group_through_its_store)] == [1, 1]


def _raise_everywhere():
    msg = "only here"
    raise ValueError(msg)


def _random():
    return torch.rand(3)


def _ends():
    os._exit(3)


def _leaves_a_thread():
    threading.Thread(target=time.sleep, args=(60,)).start()


def test_what_calls_on_an_open_group_leave_behind_is_told_when_it_closes():
    opened = ranks.Ranks(2)
    opened.call(_leaves_a_thread)
    assert len(opened.call(_random)) == 2
    with pytest.raises(RankError, match="The calls left behind on rank 0: thread"):
        opened.close()
