"""Generated C++ kernels do what their intent says, when compiled with the flags of the bare kernel form."""

import ctypes
import math
import re
import subprocess

import pytest

torch = pytest.importorskip("torch")

from dk_jax.sft.cpp_kernels import TECHNIQUES, cpp_variants  # noqa: E402
from dk_jax.sft.skill_topics import skill_catalogue, topic_for  # noqa: E402
from dk_jax.skills.record import validate_draft  # noqa: E402
from dk_jax.tasks.builtin import builtin_suite  # noqa: E402
from dk_jax.tasks.generate import generate_tasks  # noqa: E402
from dk_jax.tasks.render import forward_lines  # noqa: E402
from dk_jax.tasks.spec import Branch, OpSpec, Scalar, Tensor, Unary  # noqa: E402
from dk_jax.tasks.task import Task  # noqa: E402

SUITE = builtin_suite("cpu")
FLAGS = "-std=c++17 -O2 -march=native -fopenmp -ffast-math -fPIC".split()
INCLUDES = "#include <math.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <omp.h>\n"
# One task of each kind and level; all others are of the same generators.
SAMPLE = list({(task.spec.kind, task.level, task.split): task for task in SUITE if task.level != 1}.values())
GENERATED = generate_tasks(7, 40)
MARK = re.compile(r"// (\d+): .*(?:\n *)?")


def sizes(task):
    """The constants that the sandbox puts before a kernel."""
    lines = []
    for name, shape in [*task.arguments, ("out", task.spec.out_shape)]:
        lines.append(f"constexpr long {name}_n = {math.prod(shape)};")
        lines += [f"constexpr long {name}_d{i} = {size};" for i, size in enumerate(shape)]
    return "\n".join(lines) + "\n"


def compiled(task, sources, directory):
    """Kernels of one task in one library: sources[i] becomes kernel_i."""
    text = INCLUDES + sizes(task)
    for i, source in enumerate(sources):
        text += f"#define kernel kernel_{i}\n{source}#undef kernel\n"
    path = directory / "kernels.cpp"
    path.write_text(text)
    subprocess.run(["g++", *FLAGS, "-c", str(path), "-o", str(path.with_suffix(".o"))], check=True)
    library = path.with_suffix(".so")
    subprocess.run(
        ["g++", "-shared", "-fopenmp", str(path.with_suffix(".o")), "-o", str(library), "-lm"], check=True
    )
    return ctypes.CDLL(str(library))


def judged(task, sources, directory):
    """Whether each kernel agrees with the reference."""
    space = {}
    exec(task.reference, space)
    torch.manual_seed(0)
    model, inputs = space["Model"](*space["get_init_inputs"]()), space["get_inputs"]()
    with torch.no_grad():
        expected = model(*inputs)
    tensors = [*inputs, *(p.detach() for p in model.parameters())]
    library = compiled(task, sources, directory)
    verdicts = []
    for i in range(len(sources)):
        out = torch.full_like(expected, math.nan)
        getattr(library, f"kernel_{i}")(*(ctypes.c_void_p(t.data_ptr()) for t in [*tensors, out]))
        verdicts.append(torch.allclose(out, expected, atol=1e-4, rtol=1e-4))
    return verdicts


@pytest.mark.parametrize("task", SAMPLE, ids=lambda task: task.name)
def test_right_kernels_are_right_and_wrong_ones_wrong(task, tmp_path):
    variants = [v for v in cpp_variants(task) if v.intent != "broken"]
    chosen = variants[::3] + variants[-2:]
    assert judged(task, [v.source for v in chosen], tmp_path) == [v.intent != "wrong" for v in chosen]


def test_generated_tasks_get_right_kernels_too(tmp_path):
    for i, task in enumerate(GENERATED[::8]):
        rights = [v for v in cpp_variants(task) if v.intent in ("good", "slow")]
        directory = tmp_path / str(i)
        directory.mkdir()
        assert all(
            judged(task, [v.source for v in (rights[0], rights[-1], rights[len(rights) // 2])], directory)
        ), task.name


@pytest.mark.parametrize("task", SAMPLE[::3], ids=lambda task: task.name)
def test_broken_kernels_do_not_compile(task, tmp_path):
    for variant in cpp_variants(task):
        path = tmp_path / "kernel.cpp"
        path.write_text(INCLUDES + sizes(task) + variant.source)
        if variant.intent == "broken":
            run = subprocess.run(["g++", *FLAGS, "-fsyntax-only", str(path)], capture_output=True, text=True)
            assert run.returncode != 0 and "error" in run.stderr


@pytest.mark.parametrize("task", [*SUITE.tasks, *GENERATED], ids=lambda task: task.name)
def test_every_task_has_each_intent_in_distinct_compact_sources(task):
    variants = cpp_variants(task)
    assert variants == cpp_variants(task)
    assert len({v.source for v in variants}) == len(variants)
    intents = [v.intent for v in variants]
    assert set(intents) == {"good", "slow", "wrong", "broken"}
    assert intents.index("wrong") > max(intents.index("good"), intents.index("slow"))
    for variant in variants:
        assert variant.techniques <= set(TECHNIQUES)
        assert len(MARK.sub("", variant.source).split()) <= (250 if task.level < 3 else 450)
        assert variant.intent == "broken" or variant.source.startswith(task.cpp_signature + " {\n")


def test_reference_lines_become_statements_in_order_with_the_same_constants():
    (first, *_) = cpp_variants(SUITE.get("shift_square_mix_half"))
    wanted = [
        "float v = x[i];",
        "// 1: x = x - 0.5",
        "v = v - 0.5f;",
        "// 2: x = x * x",
        "v = v * v;",
        "// 3: x = x * scale",
        "v = v * scale[i % scale_n];",
        "// 4: x = x + 0.5 * y",
        "v = v + 0.5f * y[i];",
    ]
    assert re.findall(r"^ +((?://.*|(?:float )?v = .*))$", first.source, re.MULTILINE) == wanted


@pytest.mark.parametrize("kind", ["map", "reduce", "norm", "column"])
def test_comments_quote_the_reference_lines_and_none_is_missing(kind):
    """Every line has its statement, and within a pass marks only ever rise."""
    for task in SUITE:
        if task.spec.kind != kind:
            continue
        lines = [line for line in task.compact.splitlines() if line.startswith("//")]
        assert [int(MARK.match(line).group(1)) for line in lines] == list(range(1, len(task.spec.stages) + 1))
        for variant in cpp_variants(task):
            if variant.intent not in ("good", "slow"):
                continue
            assert set(re.findall(r"//.*", variant.source)) == set(lines), variant.source
            marks = [int(n) for n in MARK.findall(variant.source)]
            assert set(marks) == set(range(1, len(lines) + 1)), variant.source
            for one_pass in re.split(r"float v = \w+\[", variant.source)[1:]:
                found = [int(n) for n in MARK.findall(one_pass)]
                assert found == sorted(found), variant.source


def test_lines_of_a_branch_are_counted_as_the_reference_writes_them():
    stages = (Branch(name="r", stages=(Unary(fn="relu"), Scalar(op="mul", value=2.0))), Unary(fn="abs"), Branch(name="q"), Tensor(op="add", name="r"))
    spec = OpSpec(rows=64, cols=64, stages=stages)
    assert len(forward_lines(spec)) == 5
    assert [stage.line for stage in spec.stages] == [1, 3, 4, 5]
    assert [stage.line for stage in spec.stages[0].stages] == [1, 2]
    assert spec == OpSpec(rows=64, cols=64, stages=spec.stages)


def test_a_task_without_spec_is_refused():
    task = Task(name="file", level=1, family="file", split="train", reference="")
    with pytest.raises(ValueError, match="'file' has no spec"):
        cpp_variants(task)


def test_every_technique_is_used():
    used = {t for task in SUITE for v in cpp_variants(task) for t in v.techniques}
    assert used == set(TECHNIQUES)


def test_skill_topics_are_valid_short_and_in_several_words():
    topics = skill_catalogue()
    assert 12 <= len(topics) <= 16
    names = [draft.name for topic in topics for draft in topic.phrasings]
    assert len(set(names)) == len(names)
    for topic in topics:
        assert topic.techniques <= set(TECHNIQUES) and 2 <= len(topic.phrasings) <= 4
        for draft in topic.phrasings:
            assert validate_draft(draft) == []
            assert len(re.findall(r"\w+|[^\w\s]", draft.content)) <= 75


def test_topic_for_picks_the_most_telling_topic():
    assert topic_for({"simd", "parallel", "thread_private"}).topic == "thread_private"
    assert topic_for({"simd"}).topic == "simd"
    assert topic_for({"strided_access"}) is None
