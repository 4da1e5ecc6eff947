"""On a GPU an evaluation holds the device for the length of an order; memory that others took is nobody's failure."""

import os
from contextlib import contextmanager

import pytest

from sandbox.build.artifacts import ArtifactStore
from sandbox.jail import nvml
from sandbox.jail.execution import describe_error
from sandbox.jail.faults import JailReply
from sandbox.oracle import room
from sandbox.oracle.draft import Job
from sandbox.oracle.evaluate import Gate, Judge
from sandbox.oracle.failures import Failure, blamed_on_candidate
from sandbox.oracle.reference import References, TaskRejected
from sandbox.oracle.turns import Turns
from sandbox.protocol import Options
from tests.sandbox.helpers import GOOD_BODY, kernel


class WatchedGate(Gate):
    """Notes who holds what, and fails where one evaluation would wait for itself."""

    def __init__(self):
        self.log, self._shared, self._alone = [], 0, False

    @contextmanager
    def shared(self, resource, finishing):
        assert not self._alone and self._shared == 0
        self._shared += 1
        self.log.append("finishing" if finishing else "shared")
        yield
        self._shared -= 1

    @contextmanager
    def exclusive(self, resource):
        assert not self._alone and self._shared == 0
        self._alone = True
        self.log.append("exclusive")
        yield
        self._alone = False


def test_a_turn_lasts_as_long_as_an_order_and_is_left_for_work_of_the_host():
    gate = WatchedGate()
    turns = Turns(lambda finishing: gate.shared("cuda:0", finishing))
    with turns.of("run"):
        assert gate._shared == 1
        with turns.left():
            assert gate._shared == 0
        assert gate._shared == 1
    assert gate._shared == 0 and gate.log == ["shared", "shared"]
    with turns.of("start_profiler"), turns.left():
        assert gate._shared == 0
    with turns.alone(), turns.of("time_block"), turns.left():
        assert gate._shared == 0
    assert gate.log == ["shared", "shared"]
    with turns.finishing(), turns.of("run"), turns.of("profile"):
        assert gate._shared == 1
    with turns.of("run"):
        assert gate.log == ["shared", "shared", "finishing", "shared"]


def test_a_turn_ends_with_an_order_that_fails_and_a_refused_one_was_never_held():
    gate = WatchedGate()
    turns = Turns(lambda finishing: gate.shared("cuda:0", finishing))
    with pytest.raises(ZeroDivisionError), turns.of("run"):
        raise ZeroDivisionError
    gate._shared = 0  # the gate of the test is no try ... finally

    def refused(finishing):
        raise KeyboardInterrupt

    turns = Turns(refused)
    with pytest.raises(KeyboardInterrupt), turns.of("run"):
        raise AssertionError("not reached")
    with turns.left():
        pass


def test_an_evaluation_takes_turns_and_is_alone_only_while_it_is_timed(tmp_path, task, monkeypatch):
    gate = WatchedGate()
    (tmp_path / "scratch").mkdir(mode=0o711)
    tmp_path.chmod(0o711)
    judge = Judge(
        scratch=tmp_path / "scratch", store=ArtifactStore(tmp_path / "store"), threads=1, gate=gate, isolation="none"
    )
    turns = Turns(lambda finishing: gate.shared("cpu", finishing))
    monkeypatch.setattr(Judge, "_turns_on", lambda self, device: turns)
    monkeypatch.setattr(
        type(judge._loader), "_on_device", lambda self, runner, device: setattr(runner, "turns", turns)
    )
    try:
        result = judge.evaluate(Job(id="a", task=task, candidate=kernel(GOOD_BODY), options=Options(audit=False)))
    finally:
        judge.close()
    assert result.outcome == "ok" and result.timing is not None
    assert gate.log.count("exclusive") == 1
    assert gate.log.count("shared") > 8


class Card:
    """A card of 80 GiB whose free memory the test sets."""

    def __init__(self, monkeypatch, free_gib, held=None):
        self.free_bytes = int(free_gib * (1 << 30))
        whole = nvml.Gpu(index=0, name="card", capability=(9, 0), total_bytes=80 << 30, driver="1")
        monkeypatch.setattr(nvml, "gpu", lambda index: whole)
        monkeypatch.setattr(nvml, "free_bytes", lambda index: self.free_bytes)
        monkeypatch.setattr(nvml, "memory_by_process", lambda index: held or {})
        monkeypatch.setattr(room, "members", lambda supervisor: [supervisor])


def test_warm_references_are_given_up_until_enough_of_the_card_is_free(monkeypatch):
    card, given = Card(monkeypatch, 1), []

    def evict():
        given.append(1)
        card.free_bytes += 3 << 30
        return True

    room.make_room("cuda:0", evict)
    assert len(given) == 3
    room.make_room("cuda:0", lambda: pytest.fail("there is room"))
    card.free_bytes = 0
    room.make_room("cuda:0", lambda: False)
    room.make_room("cpu", lambda: pytest.fail("a CPU has none"))


def test_an_oracle_gives_up_what_is_more_than_its_part_of_a_card_with_enough_free(monkeypatch):
    """Twelve oracles with six warm references each had filled a card of 139 GiB between one look at its free memory and the next."""
    held, given = {os.getpid(): 1 << 30, 7: 9 << 30, 8: 40 << 30}, []
    Card(monkeypatch, 30, held)
    monkeypatch.setattr(room, "watched_members", lambda pid: [pid, 7])

    def evict():
        given.append(1)
        held[7] -= 2 << 30
        return True

    room.keep_to_part("cuda:0", evict, 1 / 12)
    assert len(given) == 4 and held[7] == 1 << 30, "of 72 GiB six are one oracle's, and three for what it keeps"
    held[7] = 30 << 30
    room.keep_to_part("cuda:0", lambda: pytest.fail("it has the card to itself"), 1.0)
    room.keep_to_part("cuda:0", lambda: False, 1 / 12)
    room.keep_to_part("cpu", lambda: pytest.fail("a CPU has none"), 1 / 12)


class FakeReference:
    def __init__(self, name):
        self.name, self.alive, self.closed = name, True, False

    def close(self):
        self.closed = True


def test_the_reference_in_use_is_never_given_up(task):
    references = References(3)
    made = [FakeReference(n) for n in range(3)]
    for number, reference in enumerate(made):
        references.get(task.model_copy(update={"reference": f"# {number}"}), lambda reference=reference: reference)
    assert references.give_up(keep=made[0]) and made[1].closed
    assert references.give_up(keep=made[0]) and made[2].closed
    assert not references.give_up(keep=made[0]) and not made[0].closed
    assert references.give_up() and made[0].closed


class FakeRunner:
    pid = 7

    def __init__(self):
        self.excuse = lambda supervisor: room.crowded("cuda:0", supervisor)


def out_of_memory(runner):
    with blamed_on_candidate(runner, "running", 10, 1 << 30):
        raise JailReply("out_of_memory", "OutOfMemoryError: CUDA out of memory")


@pytest.mark.parametrize(
    ("free_gib", "own_gib", "excused"), [(1, 2, True), (1, 30, False), (7.9, 2, True), (8.1, 2, False), (8.1, 30, False)]
)
def test_only_a_modest_process_on_a_crowded_card_is_excused(monkeypatch, free_gib, own_gib, excused):
    Card(monkeypatch, free_gib, {7: own_gib << 30})
    with pytest.raises(room.DeviceFull if excused else Failure) as caught:
        out_of_memory(FakeRunner())
    if excused:
        assert "fewer workers" in str(caught.value) and "holds 2048" in str(caught.value)
    else:
        assert caught.value.outcome == "out_of_memory"


def test_on_a_cpu_running_out_of_memory_is_the_candidates_doing():
    runner = FakeRunner()
    runner.excuse = None
    with pytest.raises(Failure):
        out_of_memory(runner)


class FullDevice:
    """Stands in for the loader: its references run out of memory `times` times."""

    def __init__(self, times):
        self.times, self.asked = times, 0

    def reference(self, job):
        self.asked += 1
        if self.asked <= self.times:
            raise TaskRejected("the reference fails: CUDA out of memory", out_of_memory=True)
        return FakeReference("made")


@pytest.mark.parametrize(("times", "error"), [(1, None), (2, room.DeviceFull)])
def test_a_reference_that_found_no_room_is_made_again_once_the_warm_ones_are_gone(
    tmp_path, task, monkeypatch, times, error
):
    Card(monkeypatch, 2)
    judge = Judge(scratch=tmp_path, store=ArtifactStore(tmp_path / "store"), threads=1, isolation="none")
    judge._loader = loader = FullDevice(times)
    warm = FakeReference("warm")
    judge._references.get(task.model_copy(update={"reference": "# other"}), lambda: warm)
    monkeypatch.setattr("sandbox.oracle.evaluate.make_room", lambda *more: None)  # all looked free enough
    job = Job(
        id="a", task=task.model_copy(update={"device": "cuda:0"}), candidate=kernel(GOOD_BODY), options=Options()
    )
    if error:
        with pytest.raises(error):
            judge._reference(job)
    else:
        assert judge._reference(job).name == "made"
    assert warm.closed and loader.asked == 2


@pytest.mark.parametrize(
    ("free_gib", "candidate_gib", "outcome"), [(1, 2, "infra_error"), (40, 2, "task_rejected"), (1, 30, "task_rejected")]
)
def test_a_reference_that_finds_a_card_full_of_others_in_the_middle_of_its_work_is_judged_again(
    tmp_path, task, monkeypatch, free_gib, candidate_gib, outcome
):
    card = Card(monkeypatch, free_gib)
    judge = Judge(scratch=tmp_path, store=ArtifactStore(tmp_path / "store"), threads=1, isolation="none")
    warm = FakeReference("warm")
    judge._references.get(task, lambda: warm)

    def candidate_ends():
        card.free_bytes += candidate_gib << 30

    def evaluate(job, verdict):
        judge._left.append(candidate_ends)
        raise TaskRejected("the reference fails: CUDA out of memory", out_of_memory=True)

    monkeypatch.setattr(judge, "_evaluate", evaluate)
    on_gpu = task.model_copy(update={"device": "cuda:0"})
    result = judge.evaluate(Job(id="a", task=on_gpu, candidate=kernel(GOOD_BODY), options=Options()))
    assert result.outcome == outcome and result.transient is warm.closed is (outcome == "infra_error")
    assert ("MiB of cuda:0 are free: start the sandbox with fewer workers" if result.transient else "out of memory") in result.feedback


def test_the_words_about_a_cuda_error_are_the_errors_own():
    text = (
        "CUDA error: an illegal memory access was encountered\n"
        "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/ for more information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    message = describe_error(RuntimeError(text), stage="run")["message"]
    assert message == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_an_exception_that_cannot_be_told_still_has_a_kind_and_its_name():
    class Mute(RuntimeError):
        def __str__(self):
            raise ValueError("no")

    told = describe_error(Mute(), stage="run")
    assert told["kind"] == "runtime_error" and told["message"].startswith("Mute: (an exception that cannot")
