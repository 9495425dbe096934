"""Records, units, errors, safe reading of users' files, statistics and facts about the host.

Import its modules by name: `from trainpace.core.records import Record`. The package itself holds
`exports`, by which the other packages import their modules when a name is first used.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r"^    from (trainpace\.\S+) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def exports(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return (`__getattr__`, `__all__`) of a package, from its imports under TYPE_CHECKING.

    The imports are read as text, which takes a tenth of a millisecond per package. Parsing them
    with `ast` would take longer than the rest of `trainpace --help`.
    """
    homes = {
        name.split()[-1]: module
        for module, several, one in _IMPORT.findall(Path(file).read_text(encoding="utf-8"))
        for name in (several or one).split(",")
        if module.startswith(f"{package}.") and name.strip()
    }

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return __getattr__, sorted(homes)
