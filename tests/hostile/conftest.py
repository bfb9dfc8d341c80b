"""The runs that are attacked are those of the strategies' tests."""

from __future__ import annotations

import sys
from pathlib import Path

for part in ("strategies", "secure"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / part))
