"""Find the source that a published row belongs to."""

from __future__ import annotations

import re

from estimator.calibrate.observation_files import Row
from published import benchmark_sources, language_sources, layout_sources, scheduler_sources
from published.rows import NotMapped
from published.sources import Source

# In the order in which a row's source is looked for.
SOURCES = (
    *language_sources.SOURCES,
    *layout_sources.SOURCES,
    *benchmark_sources.SOURCES,
    *scheduler_sources.SOURCES,
)


def source_of(cells: Row) -> Source:
    """The source that a row belongs to; raises NotMapped for one that nobody has described."""
    name = cells.get("source", "")
    for source in SOURCES:
        if re.search(source.pattern, name, re.IGNORECASE):
            return source
    raise NotMapped(f"its source '{name}' is not described")
