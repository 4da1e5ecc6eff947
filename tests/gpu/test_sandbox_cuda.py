"""CUDA sources through an unchanged `load_inline`: built once for what the compiler sees."""

LIMITS = {"build_s": 240, "memory_bytes": 16 << 30}
"""The compilers parse the framework's headers with several GB at once."""


def test_load_inline_builds_runs_and_is_reused_whatever_python_surrounds_it(judge):
    cold = judge("task_add", "add_load_inline", language="cuda", **LIMITS)
    assert cold.outcome == "ok"
    assert cold.coverage > 0.95
    assert 0.7 < cold.timing.speedup < 1.5

    warm = judge("task_add", "add_load_inline", language="cuda", suffix="\n# other Python, same kernel\n")
    assert warm.outcome == "ok"
    assert warm.coverage > 0.95
    assert not warm.cached
    assert warm.stage_s["build"] < 0.3 * cold.stage_s["build"]  # a compiler's work, however fast, and none
    # It launches on no stream that it names, which is recorded all the same: its launches are not held against it.
    assert not [note for note in warm.notes if "not recorded" in note]

    again = judge("task_add", "add_load_inline", language="cuda", suffix="\n# other Python, same kernel\n")
    assert again.cached


def test_a_compilers_error_is_a_failed_build_with_its_words(judge):
    result = judge("task_add", "add_load_inline", language="cuda", change=("y[i];", "z[i];"), **LIMITS)
    assert result.outcome == "build_failed"
    assert '"z" is undefined' in result.feedback
    assert "/tmp" not in result.feedback
