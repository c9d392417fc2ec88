"""The package's native module without the package, whose import of torch is most of the time of a short process.

Imported before anything of ``pyactcomp``, by files of cases whose subject is the native module.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

_spec = importlib.util.find_spec("pyactcomp")
assert _spec is not None
assert _spec.submodule_search_locations is not None
_package = ModuleType("pyactcomp")
_package.__path__ = list(_spec.submodule_search_locations)
assert "pyactcomp" not in sys.modules
sys.modules["pyactcomp"] = _package
