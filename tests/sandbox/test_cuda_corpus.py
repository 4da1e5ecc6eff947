"""The corpus of CUDA candidates: enough of each kind, each of its own, and all of it Python."""

import ast
from collections import Counter

from tests.cuda_corpus import CASES


def test_the_corpus_holds_what_it_says():
    assert len(CASES) >= 120 and len({case.name for case in CASES}) == len(CASES)
    assert len({case.candidate for case in CASES}) == len(CASES)
    meant = Counter(case.meant for case in CASES)
    assert meant["ok"] >= 100 and min(meant[kind] for kind in ("build_failed", "incorrect", "runtime_error")) >= 4
    for case in CASES:
        task, candidate = ast.parse(case.task), ast.parse(case.candidate)
        defined = {node.name for node in task.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert {"Model", "get_inputs", "get_init_inputs"} <= defined, case.name
        assert any(isinstance(node, ast.ClassDef) and node.name == "ModelNew" for node in candidate.body), case.name
        assert "load_inline" in case.candidate, case.name
