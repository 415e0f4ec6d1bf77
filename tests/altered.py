"""scaling.train in a process that is altered: `python -m altered ...`, or as the module of a forked process.

Packages named in HIDE (with commas between) are not installed there. A run that completes leaves the names of the
packages that it imported in the file `imported-<rank>`, in the folder that it was started in.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, MetadataPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HIDDEN = frozenset(filter(None, os.environ.get("HIDE", "").split(",")))


class Hiding:
    """A finder that does not see some packages, in the place of another."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found: ModuleSpec | None = (
            None if name.partition(".")[0] in HIDDEN else self._finder.find_spec(name, path, target)
        )
        return found

    def find_distributions(self, context: Any = None) -> list[Distribution]:
        found = getattr(self._finder, "find_distributions", MetadataPathFinder.find_distributions)(context)
        return [each for each in found if each.name not in HIDDEN]


if __name__ == "__main__":
    assert not HIDDEN & set(sys.modules), "they are here already"
    sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
    noted = Path(f"imported-{os.environ.get('RANK', '0')}").resolve()
    try:
        runpy.run_module("scaling.train", run_name="__main__", alter_sys=True)
    finally:
        noted.write_text("\n".join(sorted({name.partition(".")[0] for name in sys.modules})))
