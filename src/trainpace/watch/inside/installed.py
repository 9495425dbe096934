"""Whose code a file is: an installed package's, or the script's own."""

import functools
import os
import sys
import sysconfig

from trainpace.core.host import holds_packages, top_of

_INSTALLED = (*{sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether a file is of the standard library or of an installed package; the script's own folder holds none."""
    if file.startswith(_INSTALLED):
        return True
    folder = top_of(
        os.path.dirname(os.path.abspath(file))
    )  # cProfile and the like compile a script by its name alone
    script = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    return folder != os.path.dirname(os.path.abspath(script)) and holds_packages(folder)
