"""Each command of scripts/skills.py on a small library: what it prints, what it leaves, and how it says that something is wrong."""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dk_jax.skills import cli
from dk_jax.skills.library import SkillLibrary
from dk_jax.skills.printed import differences, table
from dk_jax.skills.record import Evidence, Provenance, Skill, SkillDraft

ROOT = Path(__file__).parents[2]


def draft(name, scope="general", content="Motivation: memory is slow\nKey Idea: {0} it is\nExample: for (;;) {0}();"):
    return SkillDraft(name=name, description=f"About {name}", scope=scope, tags=("a", "b", "c"), content=content.format(name))


def evidence(step, decision="accept", effect=1.5):
    return Evidence(
        step=step, tasks=("gemm", "gemv"), device="cpu", rule="sequential", decision=decision, effect=effect,
        low=effect - 0.3, high=effect + 0.4, p=0.01, n=8, reason="so it is",
    )  # fmt: skip


def build(folder):
    """Steps 1 to 4: two skills that are used, one that is not, two of a name that are rejected; step 5 is rolled back."""
    with SkillLibrary(folder / "library.sqlite") as library:
        origin = Provenance(task="gemm", step=1, code_before="one\n\x1b[31mtwo", code_after="one\nthree")
        fuse = library.propose(draft("fuse_rows"), origin, language="cpp")
        tile = library.propose(draft("tile_rows", scope="task_specific/matmul"))
        for skill_id, effect in ((fuse, 1.5), (tile, 2.0)):
            library.record_evidence(skill_id, evidence(1, effect=effect))
            library.activate(skill_id, "accepted")
        library.commit(1)
        for _ in range(2):
            library.use(fuse, shown=1)
            library.use(tile, shown=1, selected=1, log_effects=[0.5])
            bad = library.propose(draft("bad_idea"))
            library.record_evidence(bad, evidence(library.step + 1, "reject", 0.9))
            library.reject(bad, "no gain")
            library.commit(library.step + 1)
        lazy = library.propose(draft("lazy_lanes"))
        library.activate(lazy)
        library.use(fuse, shown=5)
        library.commit(4)
        library.set_status(tile, "dormant", "tired")
        library.commit(5)
        assert library.rollback_to(4) == 1
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run_folder(built, tmp_path):
    return shutil.copytree(built, tmp_path / "run")


@pytest.fixture
def call(capsys):
    def call(*argv, fails=False):
        status = cli.main([str(a) for a in argv])
        out, err = capsys.readouterr()
        if not fails:
            assert (status, err) == (0, ""), err
            return out
        assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and len(err) > 10, err
        return err[7:-1]

    return call


def names(out):
    return [line.split()[0] for line in out.splitlines()[2:]]


def test_list_has_one_aligned_line_a_skill(call, run_folder):
    lines = call("list", run_folder).splitlines()
    assert lines[0] == f"{run_folder}/library.sqlite: step 4, 5 skills (3 active, 2 rejected)"
    assert lines[1:] == [
        "name        status    scope    shown  sel  verified           when selected  step",
        "fuse_rows   active    general      7    0  1.50x (1.20–1.90)                    1",
        "tile_rows   active    matmul       2    2  2.00x (1.70–2.40)  1.65x of 2        1",
        "bad_idea    rejected  general      0    0  0.90x (0.60–1.30)                    2",
        "bad_idea    rejected  general      0    0  0.90x (0.60–1.30)                    3",
        "lazy_lanes  active    general      0    0                                       4",
    ]
    assert call("list", run_folder / "library.sqlite").splitlines() == lines, "the file names the library too"


def test_list_chooses_and_sorts(call, run_folder):
    assert names(call("list", run_folder, "--status=active", "--sort=name")) == ["fuse_rows", "lazy_lanes", "tile_rows"]
    assert names(call("list", run_folder, "--status=active,rejected", "--sort=used"))[:2] == ["tile_rows", "fuse_rows"]
    assert names(call("list", run_folder, "--sort=effect")) == ["tile_rows", "fuse_rows", "bad_idea", "bad_idea", "lazy_lanes"]
    assert names(call("list", run_folder, "--step=1")) == ["fuse_rows", "tile_rows"]
    assert call("list", run_folder, "--status=dormant").endswith("\nno skills\n")


def test_a_narrow_terminal_loses_scopes_and_then_ends_of_names(call, run_folder, monkeypatch):
    for width, there, header in ((80, "task_specific", "scope"), (66, "a_rather_long_name", "status")):
        rows = [("name", "status", "scope"), ("a_rather_long_name" * 3, "active", "task_specific")]
        text = table(rows, width=width, spare=2)
        assert max(map(len, text.splitlines())) <= width and there in text and header in text
    assert table(rows, width=20, spare=2) == "name          status\na_rather_lo…  active"
    monkeypatch.setattr(cli, "_width", lambda: 72)
    out = call("list", run_folder)
    assert "scope" not in out and "matmul" not in out and "lazy_lanes" in out and all(len(line) <= 72 for line in out.splitlines()[1:])


def test_show_has_the_record_the_code_and_the_history(call, run_folder):
    out = call("show", run_folder, "fuse_rows")
    assert out.startswith("# fuse_rows\n\nAbout fuse_rows\n\n- scope: general\n") and "| accept | 1.50x | 1.20–1.90 | 0.01 | 8 |" in out
    assert "--- before\n+++ after\n@@ -1,2 +1,2 @@\n one\n-\\x1b[31mtwo\n+three\n" in out, "and no control character reaches the terminal"
    told = [line.split("  ")[-1] for line in out.split("## History\n\n")[1].splitlines()]
    assert told == [
        "proposed as fuse_rows", "verified: accept by rule sequential, 1.50x, 1.20–1.90, p 0.01, n 8", "active: accepted", "shown 7, selected 0",
    ]  # fmt: skip
    assert "step 2-4 " in out and "\x1b" not in out


def test_show_looks_back_and_marks_what_was_undone(call, run_folder):
    with SkillLibrary(run_folder / "library.sqlite") as library:
        library.commit(9)
    assert "[undone] dormant: tired" in call("show", run_folder, "tile_rows")
    past = call("show", run_folder, "tile_rows", "--step=2")
    assert "tired" not in past and "- shown 1 times, selected 1 times" in past and past.rstrip().endswith("shown 1, selected 1, effect 1.65x of 1")


def test_show_finds_rejected_skills_too(call, run_folder):
    out = call("show", run_folder, "bad_idea")
    assert "- status: rejected (id s00004)" in out and out.endswith("also of this name: s00003 (show them by id)\n")
    assert "- status: rejected (id s00003)" in call("show", run_folder, "s00003")


def test_search_ranks_active_skills(call, run_folder):
    lines = call("search", run_folder, "tile", "LANES", "-k", 2).splitlines()
    assert lines[1].split() == ["score", "name", "description"] and len(lines) == 4
    ranked = [line.split() for line in lines[2:]]
    assert {row[2] for row in ranked} == {"tile_rows", "lazy_lanes"} and float(ranked[0][1]) >= float(ranked[1][1]) > 0
    assert call("search", run_folder, "bad").endswith("no active skill holds any of: bad\n")


def test_diff_between_steps_of_a_library(call, run_folder):
    with SkillLibrary(run_folder / "library.sqlite") as library:
        library.set_status("s00001", "retired", "old")
        library.record_evidence("s00002", evidence(6, "reject", 0.8))
        library.commit(6)
    lines = [" ".join(line.split()) for line in call("diff", run_folder, 2, 6).splitlines()]
    assert lines[0] == f"{run_folder}/library.sqlite: step 2 -> 6: 2 added, 1 retired, 2 usage, 1 evidence"
    assert lines[1:] == [
        "added bad_idea rejected, 0.90x (0.60–1.30)",
        "added lazy_lanes active",
        "retired fuse_rows active -> retired",
        "usage fuse_rows shown 1 -> 7",
        "evidence tile_rows reject 0.80x at step 6",
        "usage tile_rows shown 1 -> 2, selected 1 -> 2, effect 1.65x of 1 -> 1.65x of 2",
    ]
    assert call("diff", run_folder, 2).splitlines()[1:] == call("diff", run_folder, 2, 6).splitlines()[1:]
    assert call("diff", run_folder, 4, 4) == f"{run_folder}/library.sqlite: step 4 -> 4: no difference\n"
    assert "gone" in call("diff", run_folder, 4, 1)


def test_diff_between_libraries_goes_by_name(call, run_folder, tmp_path):
    with SkillLibrary(tmp_path / "other" / "library.sqlite") as other:
        other.propose(draft("lazy_lanes", content="Motivation: a\nKey Idea: {0}\nExample: b"), language="cpp")
        other.propose(draft("new_one"))
        other.commit(0)
    lines = [" ".join(line.split()) for line in call("diff", run_folder, tmp_path / "other").splitlines()]
    assert lines[1:] == [
        "added new_one candidate",
        *("gone fuse_rows was active", "gone tile_rows was active", "gone bad_idea was rejected", "gone bad_idea was rejected"),
        "status lazy_lanes active -> candidate",
        "text lazy_lanes content",
        "record lazy_lanes language",
    ]


def test_evidence_that_is_another_is_no_addition():
    one = dataclasses.replace(evidence(1), effect=1.1)
    old, new = (Skill.from_draft(draft("x"), evidence=(e,)) for e in (one, evidence(1)))
    assert differences({1: old}, {1: new}) == [("evidence", new, "differs")]


@pytest.mark.parametrize("form", ["jsonl", "markdown"])
def test_export_and_import_bring_a_library_over(call, run_folder, tmp_path, form):
    to, new = tmp_path / ("skills.jsonl" if form == "jsonl" else "skills"), tmp_path / "next"
    assert call("export", run_folder, to) == f"5 skills written to {to} ({form})\n"
    out = call("import", new, to, "--new", "--dry_run")
    assert out.endswith("5 skills would be imported at step 0\n") and not new.exists()
    assert call("import", new, to, "--new") == out.replace("would be imported", "imported")
    with SkillLibrary(new / "library.sqlite") as library:
        assert library.step == 0 and library.counts()["active"] == 3 and library.counts()["rejected"] == 2
        assert library.get("tile_rows").usage.selected == 2 and library.get("tile_rows").evidence[0].effect == 2.0
    gone = [line for line in call("diff", run_folder, new).splitlines()[1:] if not line.startswith("record")]
    assert gone == [], "only the code, which Markdown leaves out, may differ"


def test_export_of_some(call, run_folder, tmp_path):
    call("export", run_folder, tmp_path / "a", "--format=jsonl", "--status=rejected")
    assert len((tmp_path / "a").read_text().splitlines()) == 2


def test_import_continues_a_library_in_a_step_of_its_own(call, run_folder, tmp_path):
    source = tmp_path / "davinci.jsonl"
    source.write_text("".join(json.dumps(dataclasses.asdict(draft(name))) + "\n" for name in ("one", "two")))
    out = call("import", run_folder, source, "--status=active")
    assert f"s00006  one  active  from {source}:1\n" in out
    assert "2 skills imported at step 5\n" in out and "note: a run that goes on in this directory" in out
    assert "two" in call("list", run_folder, "--status=active") and "two" not in call("list", run_folder, "--step=4")


def test_import_takes_all_or_nothing_and_says_what_was_refused(call, run_folder, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(dataclasses.asdict(draft(name))) + "\n" for name in ("one", "fuse_rows", "tile_rows")))
    assert cli.main(["import", str(run_folder), str(source)]) == 2
    out, err = capsys.readouterr()
    assert [line.split("; ")[0] for line in out.splitlines()] == [
        f"refused  {source}:2: field 'name': the name 'fuse_rows' belongs to skill s00001",
        f"refused  {source}:3: field 'name': the name 'tile_rows' belongs to skill s00002",
    ]
    assert err.startswith(f"error: {source}: nothing was imported, 2 refused; the first is {source}:2: ")
    source.write_text("{}\n")
    assert call("import", run_folder, source, fails=True) == f"{source}:1: skill: field 'name' is missing; nothing was imported"
    source.write_text("\n")
    assert "there are no skills in it" in call("import", run_folder, source, fails=True)
    assert "step 4, 5 skills" in call("list", run_folder)


def test_prune_does_what_the_lifecycle_would_by_the_runs_rules_or_given_ones(call, run_folder):
    out = call("prune", run_folder, "--ignored_after=6", "--dry_run")
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "dormant fuse_rows it was shown 7 times and not selected",
        "1 change would be made at step 5, by the default rules; nothing is erased",
        "note: a run that goes on in this directory first undoes the library's steps after its checkpoint (a new run: after step 0)",
    ]
    assert "step 4," in call("list", run_folder)
    (run_folder / "config.json").write_text(json.dumps({"skills": {"lifecycle": {"on": False, "ignored_after": 6.0}}}))
    assert f"1 change made at step 5, by the rules of {run_folder}/config.json" in call("prune", run_folder)
    assert names(call("list", run_folder, "--status=dormant")) == ["fuse_rows"]
    assert call("prune", run_folder).startswith("0 changes made, by the rules of")
    with SkillLibrary(run_folder / "library.sqlite") as library:
        library.activate("s00001", "again")
        library.commit(20)
    assert call("prune", run_folder).startswith("0 changes"), "what was before a rest counts a quarter"
    assert call("prune", run_folder, "--dry_run", "--most_active=1").count("skills are active, and no more than") == 2


def test_rules_that_make_no_sense_are_refused(call, run_folder):
    assert "skills.lifecycle.dormant_below is a probability below 1, got 2.0" in call("prune", run_folder, "--dormant_below=2", fails=True)
    for text in ('{"skills": {"lifecycle": {"lost": 1}}}', "{", "[]"):
        (run_folder / "config.json").write_text(text)
        assert "no rules for what becomes of skills" in call("prune", run_folder, fails=True)


def test_show_tells_what_is_known_of_an_effect(call, run_folder):
    found = posterior_numbers(call("show", run_folder, "tile_rows"))
    assert 1.0 < found[1] < found[0] < found[2] and 0.9 < found[3] < 1 and "2.0 measured uses, aged" in call("show", run_folder, "tile_rows")
    assert "no measured use" in call("show", run_folder, "lazy_lanes")
    assert "Effect by all" not in call("show", run_folder, "bad_idea"), "it never entered the library"


def posterior_numbers(text):
    said = text.split("## Effect by all that is known\n\n")[1].splitlines()[0]
    return [float(x) for x in re.match(r"([\d.]+)x \(([\d.]+) to ([\d.]+)\); faster by 1.03x or more with probability ([\d.]+);", said).groups()]


def test_revive_brings_back_what_rests_or_was_retired_and_nothing_else(call, run_folder):
    call("prune", run_folder, "--ignored_after=6")
    out = call("revive", run_folder, "fuse_rows", "--reason=the policy has changed")
    assert out.startswith("fuse_rows was dormant and is active from step 6 on\n") and "note: a run that goes on" in out
    assert "the policy has changed" in call("show", run_folder, "fuse_rows")
    assert "is active; what is dormant or retired can be revived" in call("revive", run_folder, "fuse_rows", fails=True)


def test_errors_say_what_where_and_what_to_do(call, run_folder, tmp_path):
    path = run_folder / "library.sqlite"
    (tmp_path / "empty").mkdir()
    for argv, said in (
        (("list", tmp_path / "none"), f"{tmp_path}/none: no such library: there is no file {tmp_path}/none; name a library's file"),
        (("list", tmp_path / "empty"), f"there is no file {tmp_path}/empty/library.sqlite"),
        (("import", tmp_path / "none", path), "can't be read as UTF-8 text"),
        (("show", run_folder, "tile_row"), f"{path}: no skill named 'tile_row' at step 4; did you mean tile_rows"),
        (("show", run_folder, "x"), "no skill named 'x' at step 4; `list` shows all"),
        (("show", run_folder, "lazy_lanes", "--step=3"), "no skill named 'lazy_lanes' at step 3"),
        (("list", run_folder, "--step=5"), f"{path}: step 5 was rolled back; there are 1 to 4"),
        (("list", run_folder, "--step=6"), f"{path}: step 6 is not committed; there are 1 to 4"),
        (("diff", run_folder, 0, 2), "step 0 is not committed"),
        (("diff", run_folder, "x"), "x: no such library"),
        (("diff", run_folder, "x", 2), "diff: 'x' and 2 are not two steps of the library"),
        (("list", run_folder, "--step=-1"), "argument --step: '-1' is not a whole number of at least 0; see `skills.py list --help`"),
        (("list", run_folder, "--status=actve"), "'actve' is no status; there are candidate, active"),
        (("list",), "the following arguments are required: LIBRARY"),
        (("lost", run_folder), "invalid choice: 'lost'"),
        (("export", run_folder, tmp_path, "--format=jsonl"), "is a directory; name a file for JSONL, or use --format=markdown"),
        (("export", run_folder, path), f"{path}: is a file; name a directory for Markdown, or use --format=jsonl"),
        (("export", run_folder, path, "--format=jsonl"), f"{path}: is the library itself"),
        (("export", run_folder, path / "x.jsonl"), f"{path}: File exists"),
        (("import", run_folder, tmp_path / "nowhere.jsonl"), "nowhere.jsonl: can't be read"),
        (("import", run_folder, tmp_path / "empty"), "empty: the directory holds no .md files; nothing was imported"),
    ):
        assert said in call(*argv, fails=True)
    assert not (tmp_path / "none").exists() and not (tmp_path / "empty" / "library.sqlite").exists()


def test_no_step_is_committed_in_a_new_library(call, tmp_path):
    SkillLibrary(tmp_path / "library.sqlite").close()
    assert call("list", tmp_path) == f"{tmp_path}/library.sqlite: no step committed, 0 skills\nno skills\n"
    assert call("search", tmp_path, "x").endswith("no active skills\n")
    assert "step 1 is not committed; there is none" in call("list", tmp_path, "--step=1", fails=True)


def test_files_that_are_no_library_stay_as_they_are(call, tmp_path):
    for name, content, said in (
        ("text", b"not a database, but long enough to be looked at as one" * 50, "damaged, or no skill library: file is not a database"),
        ("nothing", b"", "not a skill library: it lacks the tables of one"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert said in call("list", path, fails=True) and path.read_bytes() == content
    with sqlite3.connect(tmp_path / "foreign") as db:
        db.execute("CREATE TABLE t (x)")
    (tmp_path / "in.jsonl").write_text(json.dumps(dataclasses.asdict(draft("one"))))
    for argv in (("list", tmp_path / "foreign"), ("import", tmp_path / "foreign", tmp_path / "in.jsonl", "--new")):
        assert "lacks the tables" in call(*argv, fails=True)
    with sqlite3.connect(tmp_path / "foreign") as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]


def test_a_library_cut_in_half_is_one_error_for_every_command(call, run_folder, tmp_path):
    path = run_folder / "library.sqlite"
    call("export", run_folder, tmp_path / "skills.jsonl")
    os.truncate(path, path.stat().st_size // 2)
    for argv in (("list",), ("show", "fuse_rows"), ("search", "x"), ("diff", 1, 2), ("export", tmp_path / "out"), ("prune",)):
        assert "malformed; put it back from a copy" in call(argv[0], run_folder, *argv[1:], fails=True)
    assert "malformed" in call("import", run_folder, tmp_path / "skills.jsonl", fails=True)


@pytest.mark.parametrize("column", ["data", "record"])
def test_a_record_that_is_not_ours_is_named_as_damage(call, run_folder, column):
    with sqlite3.connect(run_folder / "library.sqlite") as db:
        if column == "record":
            db.execute("UPDATE skills SET record = '{' WHERE id = 's00001'")
        else:
            db.execute("DROP TRIGGER events_are_final")
            db.execute("UPDATE events SET data = '{' WHERE seq = 1")
    assert "library.sqlite: damaged: what it holds does not fit together" in call("list", run_folder, fails=True)


def test_reading_goes_on_beside_a_run_and_writing_does_not(call, run_folder, tmp_path):
    call("export", run_folder, tmp_path / "md")
    with open(run_folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "5 skills" in call("list", run_folder)
        call("prune", run_folder, "--dry_run")
        for argv in (("prune", run_folder), ("import", run_folder, tmp_path / "md")):
            assert "library.sqlite: a run is using it at the moment; wait for its end" in call(*argv, fails=True)
    call("prune", run_folder)


def test_a_library_that_another_process_has_locked_is_said_to_be_in_use(call, run_folder, monkeypatch):
    monkeypatch.setattr(cli, "TIMEOUT_S", 0.02)
    path = run_folder / "library.sqlite"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert "5 skills" in call("list", run_folder), "who writes does not keep others from reading"
    said = call("prune", run_folder, "--ignored_after=6", fails=True)
    assert "could not commit step 5: database is locked. Nothing was changed" in said and "no other run uses it" in said
    other.execute("ROLLBACK")
    other.execute("PRAGMA journal_mode = DELETE")
    other.execute("BEGIN EXCLUSIVE")
    assert "database is locked; if another process is using it at the moment, try again" in call("list", run_folder, fails=True)
    other.close()


def test_the_script_says_what_it_can_and_minds_a_closed_pipe(run_folder):
    command = [sys.executable, str(ROOT / "scripts" / "skills.py")]
    done = subprocess.run([*command, "list", "/nowhere"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: /nowhere: no such library") and done.stderr.count("\n") == 1
    quiet = f"{sys.executable} {command[1]} list {run_folder} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", quiet], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
