# SPDX-License-Identifier: Apache-2.0
"""suspend and resume: the same processes in another job."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.launch import Job, run_job

# Three ranks; two of them, which change places; three again, the third one at the head.
GROWING = """
    import torch
    torch.set_num_threads(1)
    import commlib.torch as bps
    from tests.launch import announce, give, listen
    from tests.torch import message_of
    told = {"too early": message_of(lambda: bps.resume(1, 0, 0)), "nothing to leave": message_of(bps.suspend)}
    bps.init()
    me = bps.rank()

    def total():
        return bps.rank(), bps.size(), bps.local_size(), bps.push_pull(torch.ones(3) * 10**me, False, "sum").tolist()[0]

    told["running"] = message_of(lambda: bps.resume(1, 0, 0))
    told["three"] = total()
    kept = bps.push_pull(torch.ones(1 << 20), average=False)  # in memory of the job that ends
    handle = bps.push_pull_async(torch.ones(3), name="done")
    handle.wait()
    bps.suspend()
    told["suspended"] = message_of(lambda: bps.push_pull(torch.ones(3)))
    told["again"] = message_of(bps.suspend)
    if me < 2:
        told["contradiction"] = message_of(lambda: bps.resume(1, 0, 5))
        bps.resume(1, 0, 1 - me, local_size=2)
        told["two"] = total()
        kept_sum = bps.push_pull(kept, average=False)
        assert bool((kept_sum == 6).all()) and kept_sum.numel() == 1 << 20
        bps.suspend()
    announce("suspended")
    listen()
    bps.resume(1, 0, {2: 0, 0: 1, 1: 2}[me], context=None, local_size=3)
    told["three again"] = total()
    bps.shutdown()
    told["after shutdown"] = message_of(lambda: bps.resume(1, 0))
    give(told)
"""


def test_a_job_shrinks_and_grows() -> None:
    with Job(GROWING, hosts=[3]) as job:
        job.await_event("suspended", timeout=40)
        for rank in range(3):
            job.tell(rank, "go on")
        outcomes = job.wait(60)
    assert [outcome.status for outcome in outcomes] == [0, 0, 0], "\n".join(map(str, outcomes))
    for me, outcome in enumerate(outcomes):
        told = outcome.value
        assert told["three"] == (me, 3, 3, 111.0)
        assert told["three again"] == ((me + 1) % 3, 3, 3, 111.0)
        if me < 2:
            assert told["two"] == (1 - me, 2, 2, 11.0)
            assert told["contradiction"][0] == "ConfigError"
        for case in ("too early", "nothing to leave", "running", "suspended", "again", "after shutdown"):
            assert told[case][0] == "NotInitializedError", (case, told[case])
        assert "suspend()" in told["too early"][1]


def test_the_first_rank_is_another_process_on_another_host() -> None:
    script = """
        import time
        import torch
        torch.set_num_threads(1)
        import commlib.torch as bps
        from tests.launch import give
        bps.init()
        told = []
        for _ in range(3):
            x = bps.push_pull(torch.ones(3) * (bps.rank() + 1), average=False, name="x")
            told.append((bps.rank(), bps.size(), x.tolist()))
            rank = bps.rank()
            time.sleep(0.3 * rank)  # the other one comes back while this one is still there
            bps.suspend()
            bps.resume(num_workers=2, num_servers=0, global_rank=1 - rank)
        give(told)
        bps.shutdown()
    """
    for me, told in enumerate(run_job(script, hosts=[1, 1], timeout=60)):
        assert told == [((me + turn) % 2, 2, [3.0] * 3) for turn in range(3)]
