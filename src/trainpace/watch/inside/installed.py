"""Whose code a file is: an installed package's, or the script's own."""

import functools
import os
import sys
import sysconfig

_INSTALLED = (*{sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")
_FOLDERS = ("site-packages", "dist-packages")


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether a file is of the standard library or of an installed package, wherever that was installed to: pip leaves a folder
    of its own beside each, also with `--target`."""
    if file.startswith(_INSTALLED) or any(name in file for name in _FOLDERS):
        return True
    folder = os.path.dirname(file)
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    script = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    return folder != os.path.dirname(os.path.abspath(script)) and _was_installed_to(folder)


@functools.lru_cache(maxsize=1024)
def _was_installed_to(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False
