"""The page around a report's sections: one self-contained HTML file that may fetch nothing and run nothing but its own small script."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dk_jax.evaluation.report_rollouts import SCRIPT, script_digest
from dk_jax.evaluation.report_style import STYLE


def page(title: str, subtitle: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """The page as text.

    Args:
        title, subtitle: plain text. lead: markup above the sections.
        sections: markup of heading and body of each; one without a body is left out.
    """
    shown = [(f"part-{i}", heading, body) for i, (heading, body) in enumerate(sections, 1) if body]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in shown)
    parts = "".join(f'<section id="{name}"><h2>{heading}</h2>{body}</section>' for name, heading, body in shown)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{script_digest()}'; base-uri 'none'; form-action 'none'"
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<a class="skip" href="#main">Skip to the report</a><main id="main">'
        f'<header><h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}, written {written}</p></header>'
        f'<nav aria-label="Sections">{links}</nav>{lead}{parts}</main><script>{SCRIPT}</script></body></html>\n'
    )


def save_page(path: Path, text: str) -> Path:
    """Writes a page, complete or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)
    return path
