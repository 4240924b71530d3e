"""A site misses a round, and looks at the newest model before it submits."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from kit import build_model, serve, together, train_

import atoll

LATE = {"rounds.min_sites": 1, "rounds.quorum": 1, "rounds.deadline_s": 0.5, "rounds.total": 4}


def test_a_late_site_may_look_at_the_newest_model_and_goes_on(tmp_path: Path) -> None:
    looked, has_begun, others = threading.Event(), threading.Event(), threading.Event()
    trained, seen = [], build_model()

    def fast(worker: atoll.Worker) -> None:
        model = build_model()
        for fl_round in worker:
            fl_round.load_into(model)
            if fl_round.number == 1:
                assert has_begun.wait(30)
            if fl_round.number == 3:  # two rounds were closed without b
                others.set()
                assert looked.wait(30)
            train_(model, "a", fl_round.number)
            fl_round.submit(model)

    def late(worker: atoll.Worker) -> None:
        model = build_model()
        for fl_round in worker:
            fl_round.load_into(model)
            if fl_round.number == 1:
                before = {name: value.clone() for name, value in model.state_dict().items()}
                has_begun.set()
                assert others.wait(30)
                worker.load_into(seen)
                assert not torch.equal(seen.state_dict()["0.weight"], before["0.weight"])
                assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            trained.append(fl_round.number)
            train_(model, "b", fl_round.number)
            fl_round.submit(model)
            looked.set()

    with serve(tmp_path, **LATE) as server:

        def site(name: str) -> None:
            with atoll.join(server.url, site=name, folder=tmp_path / "workers") as worker:
                {"a": fast, "b": late}[name](worker)

        together(lambda: site("a"), lambda: site("b"))
        server.run()
    assert trained[0] == 1
    assert len(trained) > 1


def test_loading_the_newest_model_serves_as_the_base_of_a_round_that_starts_from_it(tmp_path: Path) -> None:
    model = build_model()
    with serve(tmp_path, sites=1, rounds=2) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            for fl_round in worker:
                worker.load_into(model)
                train_(model, "a", fl_round.number)
                fl_round.submit(model)
        server.run()
