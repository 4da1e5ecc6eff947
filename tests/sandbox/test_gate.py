"""The gate keeps timings alone and lets nobody starve."""

import random

from sandbox.gate import Gate


class Bench:
    """A gate with a clock of its own and a record of who is in."""

    def __init__(self, shared_limit=2, patience_s=1.0):
        self.now = 0.0
        self.gate = Gate(shared_limit, patience_s, lambda: self.now)
        self.inside = []

    def ask(self, name, exclusive=False, finishing=False):
        self.gate.acquire(name, exclusive=exclusive, finishing=finishing, grant=lambda: self.inside.append(name))

    def leave(self, name):
        if name in self.inside:
            self.inside.remove(name)
        self.gate.release(name)


def test_ordinary_work_shares_up_to_the_limit():
    bench = Bench()
    for name in "abc":
        bench.ask(name)
    assert bench.inside == ["a", "b"]
    bench.leave("a")
    assert bench.inside == ["b", "c"]


def test_time_alone_is_counted_also_while_it_lasts():
    bench = Bench()
    bench.now = 1.0
    bench.ask("T", exclusive=True)
    bench.now = 3.0
    assert bench.gate.alone_s == 2.0
    bench.leave("T")
    bench.ask("a")
    bench.now = 9.0
    bench.leave("a")
    assert bench.gate.alone_s == 2.0
    bench.ask("U", exclusive=True)
    bench.now = 9.5
    bench.gate.release("withdrawn")
    assert bench.gate.alone_s == 2.5


def test_timing_is_alone():
    bench = Bench()
    bench.ask("a")
    bench.ask("T", exclusive=True)
    assert bench.inside == ["a"]
    bench.leave("a")
    assert bench.inside == ["T"]
    bench.ask("b")
    bench.ask("U", exclusive=True)
    assert bench.inside == ["T"]
    bench.leave("T")
    assert bench.inside == ["U"], "all timings that wait go before ordinary work"
    bench.leave("U")
    assert bench.inside == ["b"]


def test_ordinary_work_passes_a_patient_timing_but_not_an_impatient_one():
    bench = Bench()
    bench.ask("a")
    bench.ask("T", exclusive=True)
    bench.ask("b")
    assert bench.inside == ["a", "b"]
    bench.leave("b")
    bench.now = 2.0
    bench.ask("c")
    assert bench.inside == ["a"]
    bench.leave("a")
    assert bench.inside == ["T"]


def test_what_a_timed_one_still_has_to_do_comes_between_two_timings():
    bench = Bench(shared_limit=0)
    bench.ask("T", exclusive=True)
    bench.ask("U", exclusive=True)
    bench.ask("a")
    bench.now = 9.0
    bench.ask("t", finishing=True)
    bench.leave("t")
    bench.ask("t", finishing=True)
    assert bench.inside == ["T"]
    bench.leave("T")
    assert bench.inside == ["t"]
    bench.leave("t")
    assert bench.inside == ["U"]


def test_a_request_can_be_withdrawn():
    bench = Bench()
    bench.ask("a")
    bench.ask("T", exclusive=True)
    bench.leave("T")
    bench.leave("a")
    bench.ask("U", exclusive=True)
    assert bench.inside == ["U"]


def test_under_random_load_timings_are_alone_and_everybody_gets_in():
    rng = random.Random(3)
    bench = Bench(shared_limit=3, patience_s=0.5)
    served, asked, waiting, finishing = set(), 0, {}, set()
    for step in range(3000):
        bench.now += 0.1
        if len(waiting) < 6:
            exclusive = rng.random() < 0.4
            waiting[step] = exclusive
            asked += 1
            if not exclusive and rng.random() < 0.2:
                finishing.add(step)
            bench.ask(step, exclusive, finishing=step in finishing)
        if bench.inside and rng.random() < 0.7:
            name = rng.choice(bench.inside)
            served.add(name)
            del waiting[name]
            bench.leave(name)
        alone = [name for name in bench.inside if waiting[name]]
        assert len(bench.inside) == 1 if alone else len(set(bench.inside) - finishing) <= 3
        oldest = min(waiting, default=step)
        assert step - oldest < 200, "somebody starves"
    assert len(served) > 1000
