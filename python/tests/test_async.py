"""Tests of asyncio, jobs and the event descriptor."""

from __future__ import annotations

import asyncio
import selectors
import urllib.request

import pytest
from conftest import MakeNamespace, in_threads, paused, value

from penstock import BusyError, CanceledError, ClosedError, InvalidError, Job, KeyResult, MismatchError, Namespace, Store, testing


def test_async_calls(make: MakeNamespace) -> None:
    ns = make(flat=True)

    async def main() -> None:
        put = await ns.aio.put(["a", "b"], [value(ns, 0), value(ns, 1)])
        assert put.ok == 2
        assert (await ns.aio.match(["a", "b", "c"])).prefix == 2
        into = [bytearray(ns.value_bytes) for _ in range(2)]
        assert (await ns.aio.get(["a", "b"], into)).ok == 2
        assert into[1] == value(ns, 1)
        assert (await ns.aio.touch(["a", "x"])).done() == [True, False]
        assert (await ns.aio.delete(["a"])).ok == 1
        assert (await ns.aio.exists(["a"])).ok == 0
        assert (await ns.aio.exists([])).ok == 0

    asyncio.run(main())
    asyncio.run(main())  # in a second event loop


def test_many_at_once_with_blocking_calls_between(make: MakeNamespace) -> None:
    ns = make(flat=True)

    async def one(i: int) -> None:
        key = f"{i}"
        assert (await ns.aio.put([key], [value(ns, i)])).ok == 1
        assert ns.exists([key]).ok == 1  # a blocking call in the thread of the event loop
        into = bytearray(ns.value_bytes)
        assert (await ns.aio.get([key], [into])).ok == 1
        assert into == value(ns, i)

    async def main() -> None:
        await asyncio.gather(*(one(i) for i in range(100)))

    asyncio.run(main())


def test_loops_in_several_threads(make: MakeNamespace) -> None:
    ns = make(flat=True)

    async def main(t: int) -> None:
        for i in range(30):
            key = f"{t} {i}"
            assert (await ns.aio.put([key], [value(ns, i)])).ok == 1
            assert (await ns.aio.exists([key])).ok == 1

    in_threads(4, lambda t: asyncio.run(main(t)))


def test_errors_of_async_calls(ns: Namespace) -> None:
    async def main() -> None:
        with pytest.raises(InvalidError):
            await ns.aio.get(["a"], [b""])
        ns.bump()
        with pytest.raises((MismatchError, InvalidError)):
            await ns.aio.get(["a"], [bytearray(1)])

    asyncio.run(main())


def test_a_canceled_task_ends_after_its_job() -> None:
    with paused() as (_, _, ns):

        async def main() -> None:
            into = bytearray(ns.value_bytes)
            task = asyncio.ensure_future(ns.aio.get(["a"], [into], timeout=60))
            await asyncio.sleep(0)
            with pytest.raises(BufferError):
                into.append(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            into.append(0)

            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(ns.aio.get(["a"], [bytearray(ns.value_bytes)], timeout=60), 0.05)

        asyncio.run(main())


def test_a_canceled_match_leaves_no_lease() -> None:
    """The task is cancelled when its match has a lease already."""
    with testing.node() as n, Store(n.address) as store:
        ns = store.namespace("canceled", block_tokens=4, layers=2, token_bytes=64)
        ns.put(["a"], [value(ns, 0)])

        def open_leases() -> float:
            with urllib.request.urlopen(f"http://{n.http}/metrics", timeout=60) as reply:
                lines = reply.read().decode().splitlines()
            return next(float(line.split()[1]) for line in lines if line.startswith("penstock_lease_open "))

        async def main() -> None:
            task = asyncio.ensure_future(ns.aio.match(["a"], lease=600))
            await asyncio.sleep(0)
            with selectors.DefaultSelector() as selector:
                selector.register(store.fileno(), selectors.EVENT_READ)
                assert selector.select(60), "no completion within a minute"
            assert open_leases() == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        assert open_leases() == 0


def test_closing_ends_async_calls() -> None:
    with paused() as (_, store, ns):

        async def main() -> None:
            calls = [asyncio.ensure_future(ns.aio.get(["a"], [bytearray(ns.value_bytes)], timeout=60)) for _ in range(3)]
            await asyncio.sleep(0)
            store.close()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, ClosedError)

        asyncio.run(main())


def test_closing_from_another_thread_ends_async_calls() -> None:
    with paused() as (_, store, ns):

        async def main() -> None:
            call = asyncio.ensure_future(ns.aio.exists(["a"], timeout=60))
            await asyncio.sleep(0)
            await asyncio.get_running_loop().run_in_executor(None, store.close)
            with pytest.raises(ClosedError):
                await call

        asyncio.run(main())


def collect(store: Store, want: int) -> list[Job]:
    """Drain a store whenever its descriptor is readable, and return the first ``want`` jobs."""
    jobs: list[Job] = []
    with selectors.DefaultSelector() as selector:
        selector.register(store.fileno(), selectors.EVENT_READ)
        while len(jobs) < want:
            assert selector.select(60), "no completion within a minute"
            jobs += store.drain()
    assert store.drain() == []
    return jobs


def test_jobs_are_drained_by_the_descriptor(store: Store, make: MakeNamespace) -> None:
    ns = make(flat=True)
    puts = {ns.jobs.put([f"{i}"], [value(ns, i)]).id for i in range(50)}
    done = collect(store, 50)
    assert {job.id for job in done} == puts
    assert all(job.complete and job.error() is None and job.result().ok == 1 for job in done)
    into = [bytearray(ns.value_bytes) for _ in range(50)]
    gets = [ns.jobs.get([f"{i}", "absent"], [into[i], bytearray(ns.value_bytes)]) for i in range(50)]
    collect(store, 50)
    assert all(list(job.codes) == [KeyResult.OK, KeyResult.MISS] for job in gets)
    assert into == [value(ns, i) for i in range(50)]
    match = ns.jobs.match(["1", "2", "absent"])
    collect(store, 1)
    assert match.result().prefix == 2


def test_blocking_calls_do_not_appear_in_drain(store: Store, make: MakeNamespace) -> None:
    ns = make(flat=True)
    job = ns.jobs.exists(["a"])
    ns.exists(["b"])
    assert [j.id for j in collect(store, 1)] == [job.id]


def test_waiting_for_a_job(store: Store, ns: Namespace) -> None:
    job = ns.jobs.put(["a"], [value(ns, 0)])
    assert job.wait().ok == 1
    assert job.wait().ok == 1, "the second wait returns the same result"
    assert store.drain() == [], "wait has returned the completion already"
    job.cancel()  # the job is complete: no effect and no error


def test_a_job_that_takes_longer_than_the_wait() -> None:
    with paused(jobs_max=2) as (n, _, ns):
        job = ns.jobs.exists(["a"], timeout=60)
        with pytest.raises(InvalidError, match="not complete"):
            job.result()
        with pytest.raises(TimeoutError):
            job.wait(0.01)
        other = ns.jobs.exists(["a"], timeout=60)
        with pytest.raises(BusyError):
            ns.jobs.exists(["a"])
        other.cancel()
        with pytest.raises(CanceledError):
            other.wait()
        n.resume()
        assert job.wait().ok == 1
