"""The bare path of a round, without anything that makes it safe: what a round cannot cost less than, on this machine.

Absolute seconds differ from machine to machine; `python bench/round.py` divided by this does not so much. One aiohttp
server on one event loop, urllib3 workers, parts of 16 MiB with BLAKE3, rewritten slots, one chunked pass with a
fused step. There is no journal, no ticket, no base file, no outbox, no check of values, no retry; the base is a
second copy of the model in memory.

    python bench/bare_round.py --gb 1 --workers 4 --rounds 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import urllib3
from aiohttp import web
from blake3 import blake3

PART, RUN = 16 * 2**20, 2**20


def spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, size):
        yield start, min(start + size, total)


def serve(folder: Path, total: int, workers: int, ready: Any) -> None:
    torch.set_num_threads(1)
    version = [os.open(folder / f"version-{i}", os.O_RDWR | os.O_CREAT) for i in range(2)]
    spool = [os.open(folder / f"spool-{i}", os.O_RDWR | os.O_CREAT) for i in range(workers)]
    for fd in (*version, *spool):
        os.posix_fallocate(fd, 0, total)
    head, arrived, closed = 0, 0, asyncio.Condition()

    def reduce(parts: Iterator[tuple[int, int]], lock: threading.Lock) -> None:
        torch.set_num_threads(1)
        theta, row, acc = (torch.empty(RUN // 4) for _ in range(3))
        leaf = torch.nn.Parameter(theta)
        step = torch.optim.SGD([leaf], lr=1.0, fused=True)
        while True:
            with lock:
                span = next(parts, None)
            if span is None:
                return
            hasher = blake3()
            for start, stop in spans(span[1] - span[0], RUN):
                at, count = span[0] + start, (stop - start) // 4
                memory = [bytes_of(x)[: count * 4] for x in (theta, row)]
                for index, fd in enumerate(spool):
                    os.preadv(fd, [memory[1]], at)
                    acc.copy_(row) if index == 0 else acc.add_(row)
                os.preadv(version[head % 2], [memory[0]], at)
                leaf.grad = acc.div_(workers)
                step.step()
                os.pwrite(version[(head + 1) % 2], memory[0], at)
                hasher.update(memory[0])

    async def get(request: web.Request) -> web.StreamResponse:
        start, stop = int(request.query["start"]), int(request.query["stop"])
        response = web.StreamResponse()
        response.content_length = stop - start
        await response.prepare(request)
        for low, high in spans(stop - start, RUN):
            await response.write(os.pread(version[head % 2], high - low, start + low))
        return response

    async def put(request: web.Request) -> web.StreamResponse:
        fd, at, hasher = spool[int(request.match_info["worker"])], int(request.query["start"]), blake3()
        async for data in request.content.iter_any():
            hasher.update(data)
            os.pwrite(fd, data, at)
            at += len(data)
        return web.Response(text=hasher.hexdigest())

    async def done(_: web.Request) -> web.StreamResponse:
        nonlocal head, arrived
        async with closed:
            arrived, mine = arrived + 1, head
            if arrived == workers:
                parts, lock = spans(total, PART), threading.Lock()
                await asyncio.gather(*(asyncio.to_thread(reduce, parts, lock) for _ in range(2)))
                head, arrived = head + 1, 0
                closed.notify_all()
            else:
                await closed.wait_for(lambda: head > mine)
        return web.Response(text="closed")

    async def main() -> None:
        app = web.Application(client_max_size=2**62)
        app.add_routes([web.get("/v", get), web.put("/u/{worker}", put), web.post("/done", done)])
        runner = web.AppRunner(app, access_log=None, read_bufsize=RUN // 2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ready.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of an fp32 tensor."""
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def work(port: int, index: int, total: int, rounds: int, told: Any) -> None:
    torch.set_num_threads(1)
    model, base = torch.zeros(total // 4), torch.empty(total // 4)
    memory, base_memory = map(bytes_of, (model, base))
    http = urllib3.HTTPConnectionPool("127.0.0.1", port, maxsize=2)

    def pull(span: tuple[int, int]) -> None:
        hasher, at = blake3(), span[0]
        answer = http.request("GET", f"/v?start={span[0]}&stop={span[1]}", preload_content=False)
        for data in answer.stream(RUN):
            hasher.update(data)
            memory[at : at + len(data)] = base_memory[at : at + len(data)] = data
            at += len(data)
        answer.release_conn()

    def push(span: tuple[int, int]) -> None:
        scratch = torch.empty(RUN // 4)
        hasher = blake3()

        def runs() -> Iterator[memoryview]:
            for start, stop in spans(span[1] - span[0], RUN):
                low, high = (span[0] + start) // 4, (span[0] + stop) // 4
                torch.sub(base[low:high], model[low:high], out=scratch[: high - low])
                data = bytes_of(scratch)[: stop - start]
                hasher.update(data)
                yield data

        headers = {"Content-Length": str(span[1] - span[0])}
        answer = http.request("PUT", f"/u/{index}?start={span[0]}", body=cast(Any, runs()), headers=headers)
        assert answer.data.decode() == hasher.hexdigest()

    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in range(rounds):
            begin = time.monotonic()
            list(pool.map(pull, spans(total, PART)))
            model.add_(1e-3 * (index + 1))
            list(pool.map(push, spans(total, PART)))
            http.request("POST", "/done", timeout=600)
            told.put(time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    total = int(options.gb * 1e9) // 4 * 4
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        ready, told = context.Queue(), context.Queue()
        server = context.Process(target=serve, args=(Path(name), total, options.workers, ready), daemon=True)
        server.start()
        port = ready.get()
        for index in range(options.workers):
            context.Process(target=work, args=(port, index, total, options.rounds, told), daemon=True).start()
        seconds = [max(told.get() for _ in range(options.workers)) for _ in range(options.rounds)]
        server.kill()
        steady = statistics.median(seconds[2:] or seconds[1:] or seconds)  # as `python bench/round.py`
        print(json.dumps({"steady_round_s": round(steady, 4), "rounds_s": [round(s, 4) for s in seconds]}))


if __name__ == "__main__":
    main()
