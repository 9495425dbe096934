"""Run `trainpace` and log every file that Python opens, removes or renames and every process that it starts.

``python audited.py LOG ARGUMENTS...``. SQLite opens its file in C code, so sqlite3.connect reports it.
"""

import os
import sys

EVENTS = {
    "open",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.exec",
    "os.system",
    "os.posix_spawn",
    "subprocess.Popen",
    "shutil.rmtree",
    "sqlite3.connect",
    "socket.connect",
    "socket.getaddrinfo",
    "compile",
    "exec",
}
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def hook(event, arguments):
    if event in EVENTS:
        what = arguments[1] if event == "compile" else arguments[0] if arguments else ""
        mode = arguments[1] if event == "open" else ""
        os.write(
            log, f"{event}\t{what!s:.300}\t{mode}\n".encode("utf-8", "replace").replace(b"\r", b"")
        )


if __name__ == "__main__":
    from trainpace.cli import main

    sys.addaudithook(hook)
    main(sys.argv[2:])
