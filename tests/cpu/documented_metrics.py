"""The metrics that ``docs/reference/metrics.md`` explains."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"
DOCUMENTED_METRICS = frozenset(re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE))
