import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

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


def _sum_of_ranks(offset):
    tensor = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor


def _pid():
    return os.getpid()


def _parent_pid():
    return os.getppid()


def _fail_on(rank, message):
    if dist.get_rank() == rank:
        raise ValueError(message)
    dist.barrier()


def _sleep_on(rank, seconds):
    if dist.get_rank() == rank:
        time.sleep(seconds)


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


def test_ranks_share_a_process_group():
    results = run_on_ranks(_sum_of_ranks, 3, 1)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert all(torch.equal(result[2], torch.tensor([6.0])) for result in results)


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


def test_exception_has_its_rank_and_traceback():
    with pytest.raises(RankError, match=r"failed on ranks 1, 0 of 2; on rank 1:\n(.|\n)*_fail_on") as caught:
        run_on_ranks(_fail_on, 2, 1, "no luck")
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) == "no luck"
    assert set(caught.value.exceptions) == {0, 1}


def _fail_alike():
    msg = "only here"
    raise ValueError(msg)


def test_tracebacks_that_are_alike_are_told_once_and_begin_with_the_function():
    with pytest.raises(RankError) as caught:
        run_on_ranks(_fail_alike, 2)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("on ranks 0, 1:") or lines[0].endswith("on ranks 1, 0:")
    assert "_fail_alike" in lines[2]
    assert len(lines) <= 6


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


def test_leaked_thread_is_named():
    with pytest.raises(RankError, match="left behind on rank 0: thread 'forgotten'"):
        run_on_ranks(_leave_thread, 1)


@pytest.mark.parametrize("fn", [lambda: None, time.sleep])
def test_function_that_is_not_at_top_level_raises(fn):
    with pytest.raises(TypeError, match="top level of a module's file"):
        run_on_ranks(fn, 1)


@pytest.mark.parametrize("world_size", [0, 9])
def test_world_size_out_of_range_raises(world_size):
    with pytest.raises(ValueError, match=f"`world_size={world_size}` is not between 1 and 8"):
        run_on_ranks(_pid, world_size)


@pytest.mark.parametrize("end", [pytest.param("exit", marks=pytest.mark.slow), "kill"])
def test_script_can_run_its_own_functions_and_workers_end_with_it(tmp_path, end):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import os, signal, sys
        from booster_testing import run_on_ranks

        class Answer:
            def __init__(self):
                self.pid = os.getpid()

        def answer(kind):
            assert kind is Answer
            return kind()

        if __name__ == "__main__":
            answers = run_on_ranks(answer, 2, Answer)
            with open("pids", "a") as pids:  # gloo of torch 2.10 prints to stdout
                print(*(each.pid for each in answers), file=pids)
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    done = subprocess.run(
        [sys.executable, "script.py", end], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == (0 if end == "exit" else -signal.SIGKILL), done.stderr
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2, "it runs once"
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


def test_an_open_group_is_opened_again_after_an_error_a_death_and_a_call_on_others():
    with open_ranks(2) as opened:
        with pytest.raises(RankError, match="only here"):
            opened.call(_fail_on, 1, "only here")
        assert [count for count, _ in opened.call(_group_through_its_store)] == [1, 1]
        opened.expect(ValueError, "only here", _fail_alike)
        assert [count for count, _ in opened.call(_group_through_its_store)] == [1, 1]
        with pytest.raises(RankDiedError):
            opened.call(_ends)
        assert [count for count, _ in opened.call(_group_through_its_store)] == [1, 1]
        assert len(run_on_ranks(_group_through_its_store, 3)) == 3
        assert [count for count, _ in opened.call(_group_through_its_store)] == [1, 1]


def _ends():
    os._exit(3)


def test_what_calls_on_an_open_group_leave_behind_is_told_when_it_closes():
    opened = ranks.Ranks(2)
    opened.call(_leave_thread)
    assert len(opened.call(_pid)) == 2
    with pytest.raises(RankError, match="The calls left behind on rank 0: thread 'forgotten'"):
        opened.close()
