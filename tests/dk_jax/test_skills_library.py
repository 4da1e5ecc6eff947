"""The library keeps every committed step, shows no open one, and forgets nothing that it undoes."""

import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dk_jax.skills.exchange import BadSkillFile
from dk_jax.skills.library import LibraryError, SkillLibrary
from dk_jax.skills.record import Evidence, Provenance, SkillDraft
from dk_jax.skills.view import NameTaken

ROOT = Path(__file__).parents[2]


def draft(name="tile_rows", idea="work on tiles that fit the cache", **fields):
    return SkillDraft(
        **{
            "name": name,
            "description": f"About {name}",
            "scope": "general",
            "tags": ("tiles", "cache", "cpu"),
            "content": f"Motivation: memory is slow\nKey Idea: {idea}\nExample: for (;;) tile();",
            **fields,
        }
    )


def evidence(decision="accept", step=1, effect=1.5):
    return Evidence(
        step=step,
        tasks=("a", "b"),
        device="cpu",
        rule="sequential",
        decision=decision,
        effect=effect,
        p=0.01,
        n=8,
    )


@pytest.fixture
def library(tmp_path):
    with SkillLibrary(tmp_path / "deep" / "library.sqlite") as library:
        yield library


def reopened(library):
    return SkillLibrary(library.path)


def add_active(library, name):
    skill_id = library.propose(draft(name, idea=f"the idea of {name}"))
    library.record_evidence(skill_id, evidence())
    library.activate(skill_id)
    return skill_id


def table(library):
    """The current-view table as another program sees it."""
    with sqlite3.connect(library.path) as db:
        return {row[0]: json.loads(row[1]) for row in db.execute("SELECT id, record FROM skills")}


def test_staged_work_is_invisible_until_its_step_is_committed(library):
    add_active(library, "tile_rows")
    assert library.active() == [] and library.step == -1
    assert [skill.name for skill in library.staged.active()] == ["tile_rows"]
    with reopened(library) as other:
        assert other.skills() == []
    library.commit(3)
    assert [skill.name for skill in library.active()] == ["tile_rows"] and library.step == 3
    with reopened(library) as other:
        assert other.skills() == library.skills() and other.version == library.version


def test_discarded_work_never_happened(library):
    library.commit(0)
    version = library.version
    add_active(library, "tile_rows")
    library.discard()
    assert len(library.staged) == 0
    library.commit(1)
    with reopened(library) as other:
        assert other.skills() == []
    assert library.version != version, "an empty step is a step"


def test_a_record_keeps_all_that_was_said_of_a_skill(library):
    origin = Provenance(task="t", step=2, rollouts=("r1",), code_before="slow", code_after="fast")
    skill_id = library.propose(draft(), provenance=origin, language="cpp", parents=("s1",))
    library.record_evidence(skill_id, evidence())
    library.activate(skill_id)
    library.use(skill_id, shown=3, selected=1, log_effects=[0.5])
    library.commit(1)
    library.use(skill_id, shown=1, selected=1, log_effects=[-0.25, 0.25])
    library.record_evidence(skill_id, evidence("reject"))
    library.commit(2)
    with reopened(library) as other:
        skill = other.get("tile_rows")
    assert skill.provenance == origin and skill.language == "cpp" and skill.parents == ("s1",)
    assert [e.decision for e in skill.evidence] == ["accept", "reject"]
    assert (skill.usage.shown, skill.usage.selected, skill.usage.effects) == (4, 2, 3)
    assert skill.usage.log_effect_sum == 0.5 and skill.usage.log_effect_square_sum == 0.375


def test_counts_tell_proposed_verified_and_active(library):
    add_active(library, "one")
    dormant = add_active(library, "two")
    library.set_status(dormant, "dormant")
    refused = library.propose(draft("three"))
    library.record_evidence(refused, evidence("reject"))
    library.reject(refused, "no gain")
    library.propose(draft("four"))
    library.commit(1)
    counts = library.counts()
    assert counts == {
        "proposed": 4, "verified": 2, "candidate": 1, "active": 1, "dormant": 1, "retired": 0, "rejected": 1,
    }  # fmt: skip
    assert len(library.skills("rejected")[0].evidence) == 1, "a rejection keeps its evidence"


def test_names_are_unique_and_those_of_rejected_skills_are_free(library):
    first = library.propose(draft())
    with pytest.raises(NameTaken, match="'tile_rows_2' is free"):
        library.propose(draft())
    assert library.staged.free_name("tile_rows") == "tile_rows_2"
    library.reject(first)
    second = library.propose(draft())
    library.commit(1)
    assert library.get("tile_rows").id == second != first
    assert library.current.free_name("a" * 64) == "a" * 64


def test_the_same_words_under_another_name_are_found(library):
    add_active(library, "tile_rows")
    again = draft("other", idea="The  idea of\ttile_rows")
    assert library.staged.duplicate_of(again).name == "tile_rows"
    assert library.staged.duplicate_of(draft("other")) is None


def test_a_draft_with_problems_does_not_enter(library):
    with pytest.raises(ValueError, match="may not enter the library: .*three to six"):
        library.propose(draft(tags=("one",)))
    with pytest.raises(ValueError, match="600 tokens"):
        library.propose(draft(), count_tokens=lambda text: 600)
    assert len(library.staged) == 0


def test_statuses_follow_only_where_they_may(library):
    skill_id = add_active(library, "tile_rows")
    with pytest.raises(ValueError, match="is active and can't become 'candidate'"):
        library.set_status(skill_id, "candidate")
    library.set_status(skill_id, "retired")
    with pytest.raises(ValueError, match="can't become 'dormant'; allowed: active"):
        library.set_status(skill_id, "dormant")
    library.activate(skill_id, "revived")
    refused = library.propose(draft("unroll"))
    library.reject(refused)
    with pytest.raises(ValueError, match="allowed: nothing"):
        library.activate(refused)
    with pytest.raises(KeyError, match="s99999"):
        library.activate("s99999")


def test_a_number_that_json_does_not_know_is_refused_before_it_counts(library):
    skill_id = add_active(library, "tile_rows")
    with pytest.raises(ValueError, match="JSON"):
        library.use(skill_id, log_effects=[float("nan")])
    assert library.staged.get("tile_rows").usage.effects == 0


def test_any_past_step_is_rebuilt_from_the_log(library):
    seen = {}
    for step in range(1, 6):
        skill_id = add_active(library, f"skill_{step}")
        if step % 2:
            library.set_status(skill_id, "dormant")
        library.commit(step * 10)
        seen[step * 10] = (library.skills(), library.version)
    with reopened(library) as other:
        for step, (skills, version) in seen.items():
            view = other.at_step(step)
            assert (view.skills(), view.version, view.step) == (skills, version, step)
        assert other.at_step(25).step == 20 and len(other.at_step(9)) == 0
        with pytest.raises(ValueError, match="step 51 is not committed; the last one is 50"):
            other.at_step(51)


def test_steps_only_go_forward(library):
    library.commit(4)
    with pytest.raises(ValueError, match=r"step 4 can't follow step 4.*rollback_to\(3\)"):
        library.commit(4)


def test_rollback_undoes_later_steps_and_keeps_their_history(library):
    for step in (1, 2, 3):
        add_active(library, f"skill_{step}")
        library.commit(step)
    kept = library.at_step(1)
    add_active(library, "never_committed")
    assert library.rollback_to(1) == 2
    assert (library.skills(), library.version, library.step) == (kept.skills(), kept.version, 1)
    assert table(library).keys() == {"s00001"}
    assert len(library.staged) == 1, "what was staged is gone too"
    undone = [logged for logged in library.history() if logged.undone and logged.event.kind == "proposed"]
    assert [logged.event.data["name"] for logged in undone] == ["skill_2", "skill_3"]
    assert [logged.undone for logged in library.history("s00001")] == [False] * 3
    with reopened(library) as other:
        assert other.skills() == library.skills()


def test_a_step_done_again_after_a_rollback_gives_equal_ids_and_version(library):
    def do(step):
        add_active(library, f"skill_{step}")
        library.commit(step)

    for step in (1, 2, 3):
        do(step)
    before = (library.skills(), library.version)
    library.rollback_to(1)
    do(2)
    do(3)
    assert (library.skills(), library.version) == before
    assert library.at_step(2).skills() == before[0][:2]


def test_rollback_without_later_steps_writes_nothing_and_drops_what_is_staged(library):
    library.commit(1)
    events = len(library.history())
    add_active(library, "tile_rows")
    assert library.rollback_to(1) == 0 and library.rollback_to(7) == 0
    assert len(library.history()) == events and len(library.staged) == 0


def test_the_log_can_not_be_rewritten(library):
    add_active(library, "tile_rows")
    library.commit(1)
    with sqlite3.connect(library.path) as db:
        for statement in ("DELETE FROM events", "UPDATE events SET data = ''"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(statement)


def test_a_second_writer_is_told_so_and_loses_nothing(library):
    with reopened(library) as other:
        add_active(other, "theirs")
        add_active(library, "ours")
        other.commit(1)
        with pytest.raises(LibraryError, match="another process has written"):
            library.commit(1)
        assert library.staged.get("ours")


def test_a_failed_commit_changes_nothing_and_can_be_repeated(library):
    add_active(library, "tile_rows")
    library._db.execute("PRAGMA query_only = ON")
    with pytest.raises(LibraryError, match="could not commit step 1.*then try again"):
        library.commit(1)
    assert library.step == -1 and library.skills() == []
    library._db.execute("PRAGMA query_only = OFF")
    library.commit(1)
    assert len(library.active()) == 1


def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to be looked at as one" * 50)
    with pytest.raises(LibraryError, match="notes.txt: could not open it"):
        SkillLibrary(path)
    assert path.read_text().startswith("not a database")
    with sqlite3.connect(tmp_path / "newer.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(LibraryError, match="newer version"):
        SkillLibrary(tmp_path / "newer.sqlite")


WRITER = """
import sys
sys.path.insert(0, {root!r})
from tests.dk_jax.test_skills_library import SkillLibrary, draft, evidence
library = SkillLibrary({path!r})
library.rollback_to(library.step)
while True:
    step = library.step + 1
    for i in range(4):
        skill_id = library.propose(draft(f"skill_{{step}}_{{i}}"))
        library.record_evidence(skill_id, evidence(step=step))
        library.activate(skill_id)
    library.commit(step)
    print(step, flush=True)
"""


def test_a_writer_killed_at_any_instant_leaves_whole_steps(tmp_path):
    path = tmp_path / "library.sqlite"
    code = WRITER.format(root=str(ROOT), path=str(path))
    reached = -1
    for pause_s in (0.0, 0.001, 0.003, 0.007, 0.02):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3):
            assert writer.stdout.readline().strip().isdigit(), "the writer died by itself"
        time.sleep(pause_s)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        with sqlite3.connect(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        with SkillLibrary(path) as library:
            assert library.step >= reached, "a committed step was lost"
            reached = library.step
            rebuilt = library.at_step(reached)
            assert rebuilt.skills() == library.skills() and rebuilt.version == library.version
            assert len(library.active()) == 4 * (reached + 1), "a step is there in part"
    assert reached >= 3 * 5 - 1


def test_jsonl_goes_out_and_comes_back_with_everything(library, tmp_path):
    used = add_active(library, "tile_rows")
    library.use(used, shown=2, selected=1, log_effects=[0.25])
    library.reject(library.propose(draft("no_good", description='"quotes", commas,\u00a0and ünïcode')))
    library.commit(1)
    assert library.export_jsonl(tmp_path / "out.jsonl") == 2
    first = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert list(first)[:5] == ["name", "description", "scope", "tags", "content"]
    with SkillLibrary(tmp_path / "other.sqlite") as other:
        assert other.import_jsonl(tmp_path / "out.jsonl") == ["s00001", "s00002"]
        other.commit(0)
        assert other.skills() == library.skills()


def test_a_file_with_davincis_fields_alone_is_read(library, tmp_path):
    lines = [json.dumps(dataclasses.asdict(draft(name))) for name in ("one", "two")]
    (tmp_path / "davinci.jsonl").write_text("\n\n".join(lines) + "\n")
    library.import_jsonl(tmp_path / "davinci.jsonl", status="active")
    library.commit(0)
    assert [skill.name for skill in library.active()] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{oops", "not JSON"),
        ("[1]", "not a JSON object"),
        (json.dumps({**dataclasses.asdict(draft("x")), "tags": "a"}), "field 'tags'"),
        (json.dumps({"name": "x"}), "field 'description' is missing"),
        (json.dumps(dataclasses.asdict(draft("x", scope="all"))), "scope 'all'"),
        (json.dumps(dataclasses.asdict(draft("fine"))), "field 'name': 'fine' is already on line 1"),
        (json.dumps(dataclasses.asdict(draft("taken"))), "field 'name'.*'taken' belongs to"),
    ],
)
def test_a_bad_line_names_file_line_and_field_and_nothing_is_imported(library, tmp_path, line, said):
    library.propose(draft("taken"))
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(dataclasses.asdict(draft("fine"))) + "\n\n" + line + "\n")
    with pytest.raises(BadSkillFile, match=rf"in\.jsonl:3: .*{said}"):
        library.import_jsonl(path)
    assert [skill.name for skill in library.staged.skills()] == ["taken"]


def test_a_missing_or_binary_file_is_one_clear_error(library, tmp_path):
    with pytest.raises(BadSkillFile, match="nowhere.jsonl: can't be read"):
        library.import_jsonl(tmp_path / "nowhere.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadSkillFile, match="binary.jsonl: can't be read as UTF-8"):
        library.import_jsonl(tmp_path / "binary.jsonl")


def test_markdown_has_one_readable_file_a_skill(library, tmp_path):
    add_active(library, "tile_rows")
    for _ in range(2):
        library.reject(library.propose(draft("no_good")))
    library.commit(1)
    assert library.export_markdown(tmp_path / "md") == 3
    assert sorted(p.name for p in (tmp_path / "md").iterdir()) == [
        "no_good-s00002.md", "no_good-s00003.md", "tile_rows.md",
    ]  # fmt: skip
    text = (tmp_path / "md" / "tile_rows.md").read_text()
    for part in ("# tile_rows", "- status: active", "Key Idea: the idea of tile_rows", "| accept | 1.50x |"):
        assert part in text


def test_a_rollback_is_no_step_and_rolling_back_further_again_changes_nothing(library):
    for step in (1, 2, 3):
        add_active(library, f"skill_{step}")
        library.commit(step)
    assert [library.rollback_to(step) for step in (2, 1, 0, 0)] == [1, 1, 1, 0]
    assert (library.step, library.skills()) == (-1, [])
    events = len(library.history())
    assert library.rollback_to(0) == 0 and len(library.history()) == events
    with reopened(library) as other:  # as a run that is killed before it commits anything
        assert other.rollback_to(0) == 0
