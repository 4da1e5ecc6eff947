"""Every known attack and fault has its test, every named test exists, and no case is left out of the map."""

import ast
from pathlib import Path

from tests.gpu.redteam import attacks, attacks_audit, ported
from tests.redteam import honest, suite
from tests.redteam.coverage_map import ATTACKS, FAULTS, OTHER_KINDS

GPU_CASES = [*attacks.CASES, *attacks_audit.CASES]
ROOT = Path(__file__).resolve().parents[2]
ENTRIES = {**ATTACKS, **FAULTS}


def mapped(kind: str) -> set[str]:
    return {name for entry in ENTRIES.values() for name in getattr(entry, kind)}


def test_every_number_is_there():
    assert set(ATTACKS) == set(range(1, 54))
    assert list(FAULTS) == [f"G{number}" for number in range(1, 22)]


def test_what_cannot_run_on_a_cpu_says_why_and_runs_on_a_gpu():
    for number, entry in ENTRIES.items():
        on_cpu = entry.cpu + tuple(test for test in entry.tests if not test.startswith("tests/gpu/"))
        assert bool(on_cpu) != bool(entry.reason), f"{number}, {entry.what}: a case or a reason, not both"
        assert on_cpu or entry.gpu, f"{number}, {entry.what}: no case on any device"


def test_every_attack_runs_on_a_gpu_too():
    moved = {case.name for case in ported.CASES}
    for number, entry in ATTACKS.items():
        on_gpu = [*entry.gpu, *moved.intersection(entry.cpu), *(test for test in entry.tests if test.startswith("tests/gpu/"))]
        assert on_gpu, f"{number}, {entry.what}"
    assert set(ported.MEANINGLESS) <= {case.name for case in suite.CASES}
    names = [case.name for case in GPU_CASES]
    assert len(names) == len(set(names))


def test_every_named_case_and_test_exists():
    known = {case.name for case in (*suite.CASES, *honest.CASES)}
    assert mapped("cpu") <= known, mapped("cpu") - known
    known_on_gpu = {case.name for case in GPU_CASES}
    assert mapped("gpu") <= known_on_gpu, mapped("gpu") - known_on_gpu
    for test in mapped("tests"):
        path, function = test.split("::")
        names = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert function in names, test


def test_no_attack_is_left_out_of_the_map():
    left = {case.name for case in suite.CASES} - mapped("cpu") - set(OTHER_KINDS)
    assert not left, left
    assert not {case.name for case in GPU_CASES} - mapped("gpu")


def test_a_case_is_mapped_under_its_own_number():
    for case in (*suite.CASES, *GPU_CASES):
        if case.number:
            entry = ATTACKS[case.number]
            names = entry.cpu if case in suite.CASES else entry.gpu
            assert case.name in names, (case.number, case.name)
