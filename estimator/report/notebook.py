"""Show an estimate in a notebook: its facts, its parts and its assumptions."""

from __future__ import annotations

from estimator.estimates import Estimate
from estimator.report.facts import heading
from estimator.report.page import template
from estimator.report.sections import answer_section, breakdown_section


def estimate_html(answer: Estimate) -> str:
    """An HTML element with its own style, every name escaped."""
    return str(
        template("notebook.html").render(
            heading=heading(answer),
            facts=answer_section(answer).facts,
            parts=breakdown_section(answer).shares,
            assumptions=answer.assumptions,
        )
    )
