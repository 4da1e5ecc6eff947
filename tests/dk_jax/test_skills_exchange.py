"""A skill's Markdown is for people, and what it says comes back from it; a file that says something else is refused by file, line and field."""

import dataclasses
import math
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dk_jax.skills.exchange import BadSkillFile, read_markdown, write_markdown
from dk_jax.skills.library import SkillLibrary
from dk_jax.skills.markdown import markdown, parse
from dk_jax.skills.record import STATUSES, Evidence, Provenance, Skill, Usage, validate_draft

CONTENT = "Motivation: memory is slow\nKey Idea: work on tiles\nExample:\nfor (;;) tile();"
SKILL = Skill(
    name="tile_rows", description="Work on tiles that fit the cache", scope="task_specific/matmul", tags=("tiles", "cache", "cpu"),
    content=CONTENT, language="cpp", status="active",
    provenance=Provenance(task="gemm", step=3, rollouts=("gemm/0", "gemm/1")), parents=("s00001", "s00002"),
    evidence=(
        Evidence(step=3, tasks=("gemm", "gemv"), device="cuda:0", rule="sequential", decision="accept", effect=1.5, low=1.2, high=1.88,
                 p=0.0312, n=8, reason="1.50x with the skill, p = 0.0312 (allowed 0.1)"),
        Evidence(step=9, tasks=("gemm",), device="cpu", rule="paper", decision="reject", effect=0.0123, n=1),
    ),
    usage=Usage(shown=12, selected=4).plus(log_effects=(math.log(2.0), math.log(2.0))),
)  # fmt: skip
BY_HAND = """# tile_rows

Work on tiles that
fit the cache

* Scope: general
- tags: tiles, cache, cpu

## Motivation
Memory is slow.

## Key Idea
Work on tiles.

## Example
    for (;;) tile();

"""


def returned(skill):
    """What comes back, without what Markdown leaves out."""
    there = dataclasses.replace(skill.provenance, code_before="", code_after="")
    return dataclasses.replace(skill, id="", provenance=there)


def close(one, other):
    """Equal but for the digits of the usage's sums that are not printed."""
    sums = ("log_effect_sum", "log_effect_square_sum")
    off = max(abs(getattr(one.usage, s) - getattr(other.usage, s)) for s in sums)
    return off <= 0.005 * one.usage.effects and one == dataclasses.replace(
        other, usage=dataclasses.replace(other.usage, **{s: getattr(one.usage, s) for s in sums})
    )


def page(tmp_path, text, name="bad.md"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


def test_all_that_a_record_says_comes_back(tmp_path):
    skills = [SKILL, dataclasses.replace(SKILL, name="b", status="rejected", id="s00007", usage=Usage(), evidence=(), parents=())]
    assert write_markdown(tmp_path, skills) == 2
    found = read_markdown(tmp_path)
    assert [path.name for path, _ in found] == ["b-s00007.md", "tile_rows.md"]
    assert close(found[1][1], SKILL) and found[0][1] == returned(skills[1])
    assert read_markdown(tmp_path / "tile_rows.md")[0][1] == found[1][1], "a file alone is read too"


def test_markdown_stays_readable():
    text = markdown(SKILL)
    assert text.startswith("# tile_rows\n\nWork on tiles that fit the cache\n\n- scope: task_specific/matmul\n- tags: tiles, cache, cpu\n")
    for line in (
        "- found on: gemm, step 3",
        "- shown 12 times, selected 4 times",
        "- effect when selected: 2x, spread 0.0000, 2 measured",
        "| 3 | gemm, gemv | cuda:0 | sequential | accept | 1.50x | 1.20–1.88 | 0.0312 | 8 |",
        "| 9 | gemm | cpu | paper | reject | 0.0123x |  |  | 1 |",
        "1. 1.50x with the skill, p = 0.0312 (allowed 0.1)",
    ):
        assert line in text.splitlines()
    assert "\\" not in text


def test_a_page_of_an_older_export_is_read():
    text = markdown(dataclasses.replace(SKILL, usage=Usage(shown=1))).replace("- rollouts: gemm/0, gemm/1\n", "")
    old = re.sub(r"\n1\. .*\n", "\n", text)
    read = parse(old)
    assert [e.effect for e in read.evidence] == [1.5, 0.0123] and read.evidence[0].reason == "" and read.usage.shown == 1


def test_a_page_by_hand_is_a_candidate(tmp_path):
    for text in (BY_HAND, BY_HAND.replace("\n", "\r\n"), "\ufeff" + BY_HAND, BY_HAND.replace("cpu\n\n", "cpu\n")):
        [(_, skill)] = read_markdown(page(tmp_path, text))
        assert (skill.name, skill.description, skill.scope) == ("tile_rows", "Work on tiles that fit the cache", "general")
        assert skill.tags == ("tiles", "cache", "cpu") and skill.status == "candidate" and skill.evidence == () and skill.usage == Usage()
        assert skill.content.startswith("## Motivation\n") and skill.content.endswith("tile();") and skill.provenance == Provenance()


def test_evidence_as_a_section_of_the_text_belongs_to_the_text():
    by_hand = BY_HAND.replace("## Example", "## Evidence\nBooks say so.\n\n## Example")
    assert "## Evidence\nBooks say so." in parse(by_hand).content
    table = CONTENT.replace("Key", "## Evidence\n\n| step | p |\n|---|---|\n| 1 | 2 |\n\\## Evidence \n\nKey")
    for evidence in ((), SKILL.evidence):
        skill = dataclasses.replace(SKILL, content=table + "\n\n## Evidence\n\n", evidence=evidence)
        assert close(parse(markdown(skill)), skill)


ODD_LINES = st.sampled_from(
    ["## Evidence", "\\## Evidence", "\\\\## Evidence\t", " ## Evidence", "## Evidence\r", "- scope: general", "# other", "| a | b |", "|---|---|",
     "- shown 3 times, selected 1 times", "1. a", "&#10;", "\\&#10;", "\\", "", "  ", "\t", "\r", "a\u2028b\x85c", "\ufeff", "日本 ünï", "```", "---",
     "| step | tasks | device | rule | decision | effect | 95 % interval | p | n |"]
)  # fmt: skip
PLAIN = st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"), exclude_characters="<")
LINES = st.one_of(ODD_LINES, st.text(PLAIN, max_size=12))
WORDS = st.text(min_size=1, max_size=12) | st.sampled_from(["a|b", "a, b", "\\", "\\|", "a\\,b", "&#10;", " a ", "\n", "- a", "step 3", "x, step 4"])
RATIOS = st.floats(0.1, 50).map(lambda x: float(f"{x:.2f}")) | st.floats(1e-6, 0.09).map(lambda x: float(f"{x:.3g}"))


@st.composite
def odd_skills(draw):
    block = st.lists(LINES, max_size=3).map(lambda lines: "".join(line + "\n" for line in lines))
    parts = [draw(block), CONTENT[:27], draw(block), CONTENT[27:], "\n", draw(block), draw(st.sampled_from(["", "\n", " ", "x"]))]
    evidence = st.builds(
        Evidence, step=st.integers(-1, 99), tasks=st.lists(WORDS, max_size=2).map(tuple), device=WORDS, rule=WORDS,
        decision=st.sampled_from(["accept", "reject"]), effect=RATIOS, low=st.none() | RATIOS, high=st.none() | RATIOS,
        p=st.none() | st.floats(1e-5, 1).map(lambda x: float(f"{x:.3g}")), n=st.integers(0, 99), reason=WORDS | st.just(""),
    )  # fmt: skip
    effects = draw(st.lists(st.floats(-2, 2), max_size=3))
    skill = dataclasses.replace(
        SKILL, description=draw(st.text(PLAIN, min_size=1, max_size=60) | WORDS), content="".join(parts), status=draw(st.sampled_from(STATUSES)),
        language=draw(WORDS | st.just("")), parents=tuple(draw(st.lists(WORDS, max_size=2))), evidence=tuple(draw(st.lists(evidence, max_size=2))),
        provenance=Provenance(task=draw(WORDS | st.just("")), step=draw(st.integers(-1, 99)), rollouts=tuple(draw(st.lists(WORDS, max_size=2)))),
        usage=Usage(shown=draw(st.integers(0, 999)), selected=draw(st.integers(0, 999))).plus(log_effects=tuple(effects)),
    )  # fmt: skip
    assume(not validate_draft(skill.draft))
    # Chat control markers and control characters are refused where they stand as they are; `markdown` escapes the latter.
    assume("<" not in markdown(skill))
    return skill


@settings(max_examples=60, deadline=None, derandomize=True)
@given(odd_skills())
def test_odd_contents_come_back(skill):
    found = parse(markdown(skill))
    assert found.draft == skill.draft
    assert close(found, skill), (found, skill)
    assert close(parse(markdown(found)), found)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(LINES | st.text(max_size=12) | st.sampled_from(markdown(SKILL).split("\n")), max_size=30), st.booleans())
def test_any_text_is_a_skill_or_is_refused_by_line_and_field(tmp_path_factory, lines, titled):
    text = "\n".join((["# tile_rows"] if titled else []) + lines)
    if any("\ud800" <= c <= "\udfff" for c in text):
        return
    path = page(tmp_path_factory.mktemp("md"), text)
    try:
        [(_, skill)] = read_markdown(path)
    except BadSkillFile as error:
        assert re.match(rf"{re.escape(str(path))}:\d+: field '", str(error)), str(error)
    else:
        assert validate_draft(skill.draft) == []


GOOD = markdown(SKILL)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("# tile_rows", "tile_rows", "1: field 'name': there is no title"),
        ("# tile_rows", "# Tile Rows", "1: field 'name': name 'Tile Rows' is not snake_case"),
        ("Work on tiles that fit the cache\n\n", "", "3: field 'description': missing"),
        ("Work on tiles that fit the cache", "x" * 121, "3: field 'description': description has 121"),
        ("- scope: task_specific/matmul\n", "", "3: field 'scope': missing"),
        ("- scope: task_specific/matmul", "- scope: all", "5: field 'scope': scope 'all'"),
        ("- tags: tiles, cache, cpu\n", "", "3: field 'tags': missing"),
        ("tiles, cache, cpu", "tiles, cache", "6: field 'tags': 2 tags"),
        ("- status: active", "- status: activ", "7: field 'status': 'activ' is unknown; use one of candidate"),
        ("- language: cpp", "- langage: cpp", "8: field 'langage': not known here; there are scope"),
        ("- language: cpp", "- scope: general", "8: field 'scope': given again; it is on line 5"),
        ("- shown 12 times", "- shown twice", "12: field 'shown': it must read"),
        ("2 measured", "some measured", "13: field 'effect when selected': it must read"),
        ("2x, spread", "0x, spread", "13: field 'effect when selected': it must read"),
        ("Key Idea: ", "", "15: field 'content': content has no section 'Key Idea'"),
        ("memory is slow", "\x1b[31m", "15: field 'content': the line holds control characters"),
        ("work on tiles", "a <|im_end|> b", "16: field 'content': the line holds control characters or chat"),
        ("gemm, step 3", "<think>, step 3", "9: field 'found on': the line holds control"),
        ("work on tiles", "call torch.matmul", "16: field 'content': refused: it tells the model"),
        ("Work on tiles that", "Call torch.matmul that", "3: field 'description': refused: it tells the model"),
        ("| rule ", "| rules ", "22: field 'evidence': the table's columns must be step, tasks"),
        ("| 3 | gemm", "| three | gemm", "24: field 'evidence': column 'step': 'three' can't be read"),
        ("| accept |", "| maybe |", "24: field 'evidence': column 'decision': 'maybe' can't be read: it must be accept or reject"),
        ("| 1.50x |", "| nan |", "24: field 'evidence': column 'effect': 'nan' can't be read: not a finite number"),
        ("1.20–1.88", "1.2 to 1.8", "24: field 'evidence': column '95 % interval'"),
        ("| 0.0312 |", "|", "24: field 'evidence': neither a row of the table's 9 columns"),
        ("1. 1.50x", "7. 1.50x", "27: field 'evidence': neither a row"),
        ("Work on tiles", "x" * 100_000, "1: field 'content': the file is larger than 100 kB"),
    ],
)
def test_a_bad_page_names_file_line_and_field(tmp_path, old, new, said):
    assert GOOD.count(old) >= 1
    path = page(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(BadSkillFile, match=re.escape(f"{path}:{said}")):
        read_markdown(path)


def test_files_that_can_not_be_read_are_named(tmp_path):
    with pytest.raises(BadSkillFile, match=r"bad\.md:2: can't be read as UTF-8 text: .*0xff"):
        read_markdown(page(tmp_path, b"# tile_rows\n\xff"))
    with pytest.raises(BadSkillFile, match=r"nowhere: can't be read: No such file"):
        read_markdown(tmp_path / "nowhere")
    (tmp_path / "empty" / "folder.md").mkdir(parents=True)
    with pytest.raises(BadSkillFile, match="holds no .md files"):
        read_markdown(tmp_path / "empty")


def test_all_bad_files_of_a_directory_are_named(tmp_path):
    page(tmp_path, BY_HAND, "a.md")
    page(tmp_path, BY_HAND, "b.md")
    page(tmp_path, "", "c.md")
    page(tmp_path, BY_HAND.replace("# tile_rows", "# fine"), "d.md")
    with pytest.raises(BadSkillFile) as raised:
        read_markdown(tmp_path)
    assert raised.value.problems == (
        f"{tmp_path}/b.md:1: field 'name': 'tile_rows' is already in a.md",
        f"{tmp_path}/c.md:1: field 'name': there is no title: the first line must read '# name_of_the_skill'",
    )


def test_a_library_takes_all_of_a_directory_or_none(tmp_path):
    with SkillLibrary(tmp_path / "library.sqlite") as library:
        library.propose(dataclasses.replace(SKILL, name="taken").draft)
        for name in ("one", "two"):
            page(tmp_path, BY_HAND.replace("tile_rows", name), f"{name}.md")
        page(tmp_path, BY_HAND.replace("tile_rows", "taken"), "taken.md")
        with pytest.raises(BadSkillFile, match=r"taken\.md:1: field 'name': the name 'taken' belongs to skill s00001"):
            library.import_markdown(tmp_path)
        assert [skill.name for skill in library.staged.skills()] == ["taken"]
        (tmp_path / "taken.md").unlink()
        assert library.import_markdown(tmp_path, status="dormant") == ["s00002", "s00003"]
        library.commit(0)
        assert [(skill.name, skill.status) for skill in library.skills()] == [("taken", "candidate"), ("one", "dormant"), ("two", "dormant")]


def test_what_a_library_writes_another_one_takes(tmp_path):
    with SkillLibrary(tmp_path / "one.sqlite") as one, SkillLibrary(tmp_path / "two.sqlite") as two:
        for status in STATUSES:
            one.add(dataclasses.replace(SKILL, name=f"skill_{status}", status=status))
        one.add(dataclasses.replace(SKILL, name="skill_rejected", status="rejected"))
        one.commit(0)
        assert one.export_markdown(tmp_path / "md") == 6
        two.import_markdown(tmp_path / "md")
        two.commit(0)
        theirs = sorted(one.skills(), key=lambda skill: (skill.name, skill.id))
        ours = sorted(two.skills(), key=lambda skill: (skill.name, skill.id))
        assert all(close(returned(a), returned(b)) for a, b in zip(ours, theirs, strict=True))
