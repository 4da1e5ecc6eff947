"""Hardware counters: what Nsight Compute prints is read strictly, and a request for what can't be had is refused before anything is judged."""

import csv
import io
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sandbox.client import SandboxRejected
from sandbox.oracle import counters as oracle_counters
from sandbox.oracle.counters import Counters, CountersUnavailable, looked_at, reported
from sandbox.oracle.draft import Job
from sandbox.oracle.evaluate import Judge
from sandbox.printed import readable
from sandbox.profile import ncu
from sandbox.profile.metrics import DURATION, METRICS
from sandbox.profile.ncu import ReportError, complaint, counters_problem, function_name, read_report, unknown_metrics
from sandbox.protocol import Candidate, CounterSupport, EvaluationResult, KernelCounters, KernelTime, Options, TaskSpec
from sandbox.server import _check_profile, _Refused
from sandbox.settings import Settings, capabilities
from tests.sandbox.helpers import ADD_BIAS, GOOD_BODY, kernel

CYCLES, HITS, BYTES = "sm__cycles_active.avg", "lts__t_sector_hit_rate.pct", "dram__bytes_read.sum"
FIXED = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC")


def page(*launches: tuple[str, dict[str, str]], metrics=(CYCLES, HITS, BYTES), units=("cycle", "%", "byte")) -> str:
    """Output as Nsight Compute prints it for launches (kernel, cells by metric)."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([*FIXED, DURATION, *metrics])
    writer.writerow(["" for _ in FIXED] + ["ns", *units])
    for number, (name, cells) in enumerate(launches):
        fixed = [str(number), "4711", "python3.11", "127.0.0.1", name, "1", "7", "(128, 1, 1)", "(8192, 1, 1)", "0", "9.0"]
        writer.writerow([*fixed, *(cells.get(metric, "") for metric in (DURATION, *metrics))])
    begin = '==PROF== Connected to process 4711 (/usr/bin/python3.11)\n==PROF== Profiling "rows" - 0: 0%....50%....100% - 8 passes\n'
    return f"{begin}{out.getvalue()}==PROF== Disconnected from process 4711\n"


def test_counters_are_means_over_a_kernels_launches_and_the_heaviest_comes_first():
    found = read_report(
        page(
            ("rows", {DURATION: "1,000", CYCLES: "1,234.50", HITS: "50.00", BYTES: "4,194,304"}),
            ("void at::native::reduce_kernel<512, 1>(at::Tensor)", {DURATION: "5,000", CYCLES: "9", HITS: "n/a", BYTES: "1e3"}),
            ("rows", {DURATION: "3,000", CYCLES: "2,234.50", HITS: "n/a", BYTES: "(!) n/a"}),
        )
    )
    assert [(one.kernel, one.launches, one.ns) for one in found] == [("reduce_kernel", 1, 5000.0), ("rows", 2, 4000.0)]
    assert found[1].means == {CYCLES: 1734.5, BYTES: 4194304.0, HITS: 50.0}
    assert HITS not in found[0].means, "a metric that the card does not have is absent"
    assert found[1].units == {CYCLES: "cycle", HITS: "%", BYTES: "byte"}


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("", "no launch was counted"),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "ERR_NVGPUCTRPERM"),
        (page(), "no launch was counted"),
        (page(("rows", {})).replace('"0","4711"', '"4711"'), "number of columns"),
        (page(("rows", {})).replace("Kernel Name", "Name"), "names no columns"),
        (page(("rows", {}), metrics=(CYCLES, CYCLES, BYTES)), "names no columns"),
        (page(("rows", {})).replace('"9.0"', '"9"0"'), "malformed"),
        ('"a"\n' * (ncu.MAX_ROWS + 1), "at most"),
    ],
)
def test_what_is_no_report_is_refused_with_the_reason(output, said):
    with pytest.raises(ReportError, match=said):
        read_report(output)


def test_only_numbers_are_values_and_names_stay_printable():
    cells = {CYCLES: "1,23", HITS: "inf", BYTES: "12; rm"}
    [one] = read_report(page(("k\x1b[2J" + "x" * 999, cells)))
    assert one.means == {} and "\x1b" not in one.kernel and len(one.kernel) <= ncu.MAX_NAME_CHARS


@given(st.text(max_size=300).map(lambda text: page(("rows", {CYCLES: "1"})).replace("rows", text)) | st.text(max_size=300))
def test_whatever_is_printed_is_read_or_refused(output):
    try:
        found = read_report(output)
    except ReportError as error:
        assert str(error)
    else:
        assert all(value == value for one in found for value in one.means.values())


@given(st.floats(min_value=-1e15, max_value=1e15, allow_nan=False), st.integers(0, 6))
def test_numbers_are_read_as_they_were_printed_with_separators(value, digits):
    [one] = read_report(page(("rows", {CYCLES: f"{value:,.{digits}f}"})))
    assert one.means[CYCLES] == float(f"{value:.{digits}f}")


def test_metrics_that_the_program_does_not_know_are_told_from_its_words():
    said = f"==ERROR== Failed to find metric {HITS}\n==WARNING== Metric x{CYCLES} is gone\n==PROF== metric {BYTES}\n"
    assert unknown_metrics(said, METRICS) == [HITS]
    assert complaint(said) == f"Failed to find metric {HITS}; Metric x{CYCLES} is gone"


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("add_kernel", "add_kernel"),
        ("void (anonymous namespace)::softmax<float, 4>(float const*, long)", "softmax"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)", "vectorized_elementwise_kernel"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
    ],
)
def test_the_functions_name_is_found_in_a_demangled_one(demangled, name):
    assert function_name(demangled) == name


def test_there_are_24_counters_and_each_is_asked_for():
    assert len(METRICS) == 24
    command = ncu.arguments(list(METRICS))
    asked = command[command.index("--metrics") + 1].split(",")
    assert asked == [DURATION, *METRICS]
    assert "--kernel-name" not in command and "regex:^(rows)$" in ncu.arguments([], ["rows"])


def times(*entries: tuple[str, float, int, bool]) -> list[KernelTime]:
    return [KernelTime(name=name, share=0.1, ms=ms, launches=launches, own=own) for name, ms, launches, own in entries]


def test_a_call_of_many_launches_is_looked_at_where_it_is_heavy():
    few = times(("rows", 1.0, 2, True), ("void f<1>(int)", 2.0, 1, False))
    assert looked_at(few) == []
    many = times(*((f"void k{n}<1>(int)", float(n), 4, True) for n in range(12)), ("k|.*", 99.0, 1, True))
    assert looked_at(many) == ["k11", "k10", "k9", "k8", "k7"]


def test_whose_a_kernel_is_the_profile_tells_unless_two_share_its_name():
    [one] = read_report(page(("rows", {CYCLES: "7"})))
    assert reported(one, times(("void a::rows<2>(int)", 1.0, 1, True))).own is True
    assert reported(one, times(("rows", 1.0, 1, True), ("void lib::rows<1>()", 1.0, 1, False))).own is None
    assert reported(one, []) == KernelCounters(kernel="rows", own=None, launches=1, metrics={CYCLES: 7.0}, units={CYCLES: "cycle"})


# ------------------------------------------------------------ protocol


@pytest.mark.parametrize(("asked", "taken"), [(True, True), (False, False), ("none", False), ("kernels", True), ("ncu", "ncu")])
def test_a_profile_is_asked_for_by_word_or_as_before_by_yes_and_no(asked, taken):
    options = Options.model_validate({"profile": asked})
    assert options.profile == taken and type(options.profile) is type(taken)
    assert Options.model_validate_json(options.model_dump_json()) == options


def test_an_unknown_profile_is_refused_with_those_that_there_are():
    with pytest.raises(ValidationError, match="'nsys' is not known: .*ncu") as refused:
        Options(profile="nsys")
    assert refused.value.errors()[0]["loc"] == ("profile",)


def test_counters_cross_the_wire_and_are_printed():
    counted = KernelCounters(kernel="rows", own=True, launches=2, metrics={CYCLES: 1234.5}, units={CYCLES: "cycle"})
    result = EvaluationResult(id="1", state="done", outcome="ok", counters=[counted])
    assert EvaluationResult.model_validate_json(result.model_dump_json()) == result
    text = readable(result, "c.py", "t.py")
    assert "rows (own), mean of 2 launches" in text and "1,234.5 cycle" in text


# ------------------------------------------------------------ refusals


def test_a_request_for_counters_of_a_cpu_is_refused_at_once(sandbox, task):
    with pytest.raises(SandboxRejected, match="hardware counters are a GPU's") as refused:
        sandbox.evaluate(task, [kernel(GOOD_BODY)], Options(profile="ncu"))
    assert refused.value.status == 422 and "options.profile" in str(refused.value)
    offered = sandbox.capabilities().counters
    assert not offered.available and "no NVIDIA GPU" in offered.problem


def test_a_request_for_counters_that_cannot_be_had_is_refused_with_what_to_do():
    gpu = TaskSpec(reference=ADD_BIAS, device="cuda:0")
    lacking = SimpleNamespace(counters=CounterSupport(available=False, problem="ncu is not there: install it"))
    with pytest.raises(_Refused) as refused:
        _check_profile(Options(profile="ncu"), [gpu], lacking)
    assert refused.value.status == 422 and "install it" in refused.value.reply.hint
    _check_profile(Options(profile=True), [gpu], lacking)
    _check_profile(Options(profile="ncu"), [gpu], SimpleNamespace(counters=CounterSupport(available=True, problem="")))


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Sets what a host has: host(ncu=True, admins_only=False, administrator=False)."""

    def has(*, program: bool = True, admins_only: bool = False, administrator: bool = False):
        parameters = tmp_path / "params"
        parameters.write_text(f"ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: {int(admins_only)}\n")
        monkeypatch.setattr(ncu, "DRIVER_PARAMETERS", parameters)
        monkeypatch.setattr(ncu, "find_ncu", lambda: "/opt/ncu" if program else None)
        monkeypatch.setattr(ncu.syscalls, "has_capability", lambda capability: administrator)

    return has


def test_what_forbids_counters_is_told_with_what_to_do(host):
    host(program=False)
    assert "install it" in counters_problem("strict")
    host()
    assert counters_problem("strict") == counters_problem("none") == ""
    assert "level strict is needed" in counters_problem("standard")
    host(admins_only=True)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in counters_problem("strict") and "ERR_NVGPUCTRPERM" in counters_problem("none")
    host(admins_only=True, administrator=True)
    assert counters_problem("none") == "", "an administrator's processes without walls keep the right"
    assert "--isolation none" in counters_problem("strict"), "a jailed process never has it"


def test_the_program_is_found_on_the_path_or_where_it_is_installed(monkeypatch, tmp_path):
    def program(folder) -> str:
        (tmp_path / folder).mkdir(parents=True)
        file = tmp_path / folder / "ncu"
        file.write_text("")
        file.chmod(0o755)
        return str(file)

    monkeypatch.setattr(ncu, "FOLDERS", (str(tmp_path / "cuda" / "bin"), str(tmp_path / "opt")))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert ncu.find_ncu() is None
    older, newer = program("opt/2024.1.0"), program("opt/2025.3.1")
    assert ncu.find_ncu() == newer
    assert {tmp_path / "opt", tmp_path / "opt" / "2024.1.0"} <= set(ncu.installation(older))
    with_toolkit = program("cuda/bin")
    assert ncu.find_ncu() == with_toolkit
    on_path = program("path")
    assert ncu.find_ncu() == on_path


def test_a_driver_that_says_nothing_forbids_nothing(host, monkeypatch, tmp_path):
    host(admins_only=True)
    monkeypatch.setattr(ncu, "DRIVER_PARAMETERS", tmp_path / "absent")
    assert counters_problem("strict") == ""


def test_the_server_says_what_it_lacks(host, tmp_path):
    host(admins_only=True)
    settings = Settings(devices=("cuda:0", "cpu"), workers=1, threads=1, cores=1, isolation="strict", cache=tmp_path)
    assert "NVreg_RestrictProfilingToAdminUsers" in capabilities(settings).counters.problem
    host()
    assert capabilities(settings).counters == CounterSupport(available=True, problem="")


def test_an_oracle_tries_once_and_says_the_same_again(monkeypatch):
    tries = []

    def problem(level):
        tries.append(level)
        return "ncu is gone"

    monkeypatch.setattr(oracle_counters, "counters_problem", problem)
    counters = Counters(SimpleNamespace(level="strict"), alone=None)
    for _ in range(2):
        with pytest.raises(CountersUnavailable, match="no hardware counters: ncu is gone"):
            counters.check("cuda:0")
    assert tries == ["strict"]


def test_what_a_try_has_found_holds_for_a_card_and_a_program(monkeypatch, tmp_path):
    program = tmp_path / "ncu"
    program.touch()
    kept = {}

    def found_once(device, what, measure):
        return kept.setdefault((device, *what), {"metrics": [HITS, CYCLES, "of another version"]})

    monkeypatch.setattr(oracle_counters, "find_ncu", lambda: str(program))
    monkeypatch.setattr(oracle_counters, "counters_problem", lambda level: "")
    loader = SimpleNamespace(level="strict", card=SimpleNamespace(found_once=found_once))
    assert Counters(loader, alone=None).check("cuda:0") == Counters(loader, alone=None).check("cuda:0") == (CYCLES, HITS)
    [(device, *what)] = kept
    assert device == "cuda:0" and {"strict", str(program), *METRICS} <= set(what)


def test_an_oracle_refuses_before_it_judges_and_blames_nobody(tmp_path, store):
    judge = Judge(scratch=tmp_path, store=store, threads=1)
    job = Job(id="1", task=TaskSpec(reference="no Python at all"), candidate=Candidate(source="", language="cpp"), options=Options(profile="ncu"))
    result = judge.evaluate(job)
    assert result.outcome == "infra_error" and not result.transient and "device cuda:N" in result.feedback
    assert result.stage == "queued" and result.reward.total == 0
