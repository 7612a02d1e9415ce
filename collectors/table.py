"""Everything gpuidle can read, as literal tables. A newcomer is one file and one row."""

from __future__ import annotations

from gpuidle.collectors.engines import vllm
from gpuidle.collectors.engines.rule import EngineKind

ENGINES: tuple[EngineKind, ...] = (vllm.KIND,)
