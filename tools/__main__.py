"""`python -m tools NAME`: locks, generated pages and other rare tasks."""

from tools.tasks import Task, main

GENERATE = ("tools/generate.py", "tools/api_stub.py", "tools/man_page.py")
TASKS = {
    "generate": Task("options, constants and results in docs/; the man page", GENERATE),
    "refresh": Task(
        "run everything that docs/ show and put the real output there (15 minutes)",
        (*GENERATE, "tools/pages.py --write"),
        ("tools",),
    ),
    "session": Task(
        "the README's terminal picture, from real commands", ("tools/session.py --keep",)
    ),
    "zoo-workloads": Task("packaged traces of the built-in models", ("tools/zoo_workloads.py",)),
    "typical-hosts": Task("typical host CPUs beside each GPU", ("tools/typical_hosts.py",)),
    "lock": Task(
        "locks/ anew: versions from .venv, hashes from PyPI", ("tools/lock.py",), ("tools",)
    ),
    "audit": Task("pinned packages with known vulnerabilities", ("tools/audit.py",), ("tools",)),
    "fuzz": Task("hostile files of every type: --minutes 30", ("tools/fuzz.py",), ("fuzz",)),
    "mutants": Task(
        "faults planted in the arithmetic: --sample 150", ("tools/mutants.py",), ("tools",)
    ),
    "coverage": Task(
        "branches that the tests reach, child processes included",
        ("tools/coverage_of_tests.py",),
        ("zoo", "engines", "frameworks", "tools"),
    ),
    "test-lowest": Task(
        "fast tests on the oldest versions that pyproject.toml admits",
        ("tools/elsewhere.py lowest",),
    ),
    "test-pythons": Task(
        "tests that need no torch, on Python 3.12 and 3.13", ("tools/elsewhere.py pythons",)
    ),
}

if __name__ == "__main__":
    main("tools", TASKS)
