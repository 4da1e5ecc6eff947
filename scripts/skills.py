"""Looks into skill libraries, and moves skills between them and files.

    python scripts/skills.py list runs/demo --status=active,dormant --sort=effect
    python scripts/skills.py show runs/demo tile_rows --step=12
    python scripts/skills.py search runs/demo softmax over long rows
    python scripts/skills.py diff runs/demo 10 20            # or: diff runs/one runs/two
    python scripts/skills.py export runs/demo skills/        # a Markdown file a skill; skills.jsonl: all in one file
    python scripts/skills.py import runs/next skills/ --new --dry_run
    python scripts/skills.py prune runs/demo --dry_run

A library is named by its file or by its run's directory. Errors are one line, with exit status 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dk_jax.skills.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))
