"""Requests that wait for a change go on one at a time, and the event loop looks at others in between."""

from __future__ import annotations

import asyncio
import itertools

from atoll.server.coordinator.long_polls import FairEvent


def test_the_loop_serves_others_between_two_waiters() -> None:
    """A heartbeat that comes while 100 wait is not behind all of them."""

    async def main() -> list[str]:
        event, seen = FairEvent(), list[str]()

        async def waits(name: str) -> None:
            await event.wait(60)
            seen.append(name)

        async def beats() -> None:
            while len(seen) < 200:
                seen.append("beat")
                await asyncio.sleep(0)

        waiting = [asyncio.create_task(waits(f"w{number:03}")) for number in range(100)]
        await asyncio.sleep(0)
        event.set()
        await beats()
        await asyncio.gather(*waiting)
        return seen

    seen = asyncio.run(main())
    workers = [name for name in seen if name != "beat"]
    assert workers == [f"w{number:03}" for number in range(100)]
    assert not any(a != "beat" != b for a, b in itertools.pairwise(seen)), "two went on at once"


def test_opened_again_it_wakes_each_waiter_exactly_once() -> None:
    async def main() -> list[int]:
        event, seen = FairEvent(), list[int]()

        async def waits(number: int) -> None:
            await event.wait(60)
            seen.append(number)

        tasks = [asyncio.create_task(waits(number)) for number in range(3)]
        await asyncio.sleep(0)
        event.set()
        tasks.append(asyncio.create_task(waits(3)))
        await asyncio.sleep(0)
        event.set()
        await asyncio.gather(*tasks)
        return seen

    assert asyncio.run(main()) == [0, 1, 2, 3]


def test_a_waiter_that_gave_up_holds_up_no_other() -> None:
    async def main() -> None:
        event = FairEvent()
        gone = asyncio.create_task(event.wait(60))
        stays = asyncio.create_task(event.wait(60))
        await event.wait(0)  # the time is over at once: it returns
        event.set()  # both are due
        gone.cancel()
        async with asyncio.timeout(10):
            await stays
        assert gone.cancelled() or gone.done()

    asyncio.run(main())
