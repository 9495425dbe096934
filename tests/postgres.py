"""A private PostgreSQL server in a temporary folder, reachable only through a Unix socket."""

import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
"""For tests, whose data is gone a moment later; not for timings."""


def binary(name):
    """Return the program, or None if PostgreSQL is not installed."""
    found = sorted(
        Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda p: int(p.parts[-3])
    )
    return shutil.which(name) or (str(found[-1]) if found else None)


@contextmanager
def server(settings=FAST):
    """Start a server. Yield a function that returns the URL of a database by name."""
    owner = pwd.getpwnam("postgres") if os.getuid() == 0 else None  # PostgreSQL refuses root

    def run(*command):
        user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if owner else {}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd="/", stdin=subprocess.DEVNULL, **user
        )
        assert done.returncode == 0, done.stdout + done.stderr

    folder = Path(
        tempfile.mkdtemp(prefix="pg-")
    )  # a socket's path must be short, so not pytest's folder
    try:
        if owner:
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        data = str(folder / "data")
        run(
            binary("initdb"),
            "-D",
            data,
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-locale",
            "-N",
        )
        options = [*settings, "listen_addresses=", f"unix_socket_directories={folder}"]
        arguments = " ".join(f"-c '{option}'" for option in options)
        log = str(folder / "log")
        run(binary("pg_ctl"), "-D", data, "-w", "-t", "60", "-l", log, "-o", arguments, "start")
        try:
            yield lambda name: f"postgresql://postgres@/{name}?host={folder}"
        finally:
            run(binary("pg_ctl"), "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def create_database(url_of, name):
    import psycopg

    with psycopg.connect(url_of("postgres"), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return url_of(name)
