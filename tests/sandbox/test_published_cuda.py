"""What scripts/bench/published_cuda.py reads from a file of published kernels, and keeps of verdicts."""

import importlib

import pytest

from sandbox.protocol import Build, EvaluationResult
from tests.sandbox.helpers import ROOT

BUILDS = "from torch.utils.cpp_extension import load_inline\next = load_inline('x', 'int f();')\nclass ModelNew: pass\n"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    return importlib.import_module("published_cuda")


def entry(task_id, code):
    return {"task_id": task_id, "ref_code": f"reference {task_id}", "custom_code": code, "score": 1.5}


def test_distinct_candidates_that_build_extensions_are_taken(bench):
    data = {"1": [entry(3, BUILDS), entry(4, "import torch\n"), entry(5, None), entry(6, BUILDS)], "2": [entry(3, BUILDS + "# another\n")]}
    found = bench.published(data)
    assert [(kernel.name, kernel.reference) for kernel in found] == [("1/3", "reference 3"), ("2/3", "reference 3")]
    assert found[0].candidate == BUILDS


@pytest.mark.parametrize("data", [[], {"1": 3}, {"1": [{"task_id": 1}]}, {"1": ["text"]}])
def test_a_file_of_another_form_is_refused(bench, data):
    with pytest.raises(ValueError, match="not a file of levels"):
        bench.published(data)


def test_feedback_comes_without_the_candidate_s_lines(bench):
    source = 'cuda = """\n  int total = missing + 1;\n  float y;\n"""\n'
    said = (
        "main.cpp:1:15: error: 'missing' was not declared\n    1 |   int total = missing + 1;\n      |               ^~~~~~~\n"
        'cuda.cu(2): error: identifier "z" is undefined\n    float y;\n          ^\n\n1 error'
    )
    kept = "main.cpp:1:15: error: 'missing' was not declared\ncuda.cu(2): error: identifier \"z\" is undefined\n1 error"
    assert bench.without_source(said, source) == kept


def result(outcome, *roads, feedback=""):
    builds = [Build(name="x", road=road, seconds=1.234) for road in roads]
    return EvaluationResult(id="1", state="done", outcome=outcome, builds=builds, feedback=feedback)


def test_rows_shares_and_differences(bench):
    kernels = bench.published({"1": [entry(n, f"{BUILDS}# {n}\n") for n in range(3)]})
    results = [result("ok", "lean", "lean", feedback="fine"), result("build_failed", None, feedback="x" * 999), result("ok", "plain")]
    rows = [bench.row(kernel, given) for kernel, given in zip(kernels, results, strict=True)]
    assert rows[0]["roads"] == ["lean", "lean"] and rows[0]["build_s"] == [1.23, 1.23] and rows[0]["feedback"] == ""
    assert rows[1]["feedback"] == "x" * bench.FEEDBACK_CHARS
    shares = bench.by_road(rows)
    assert shares == {"extensions_by_road": {"lean": 2, "none": 1, "plain": 1}, "share_by_road": {"lean": 0.6667, "plain": 0.3333}}
    again = [bench.row(kernels[1], result("build_failed", None)), bench.row(kernels[2], result("incorrect", "plain"))]
    assert bench.differences(rows, again) == [{"task": "1/2", "all_roads": "ok", "plain": "incorrect", "roads": ["plain"]}]
    assert bench.by_road([]) == {"extensions_by_road": {}, "share_by_road": {}}
