"""`python -m benchmarks NAME`: run a benchmark; results land in benchmarks/results."""

from tools.tasks import Task, main

ZOO = ("zoo",)
ENGINES = ("engines",)
TRACED = "-m fitting traces --data {data} --traces {traces}"
FOLDERS = "--data {data} --traces {traces}"
TASKS = {
    "startup": Task("commands as whole processes; tracing times", ("benchmarks/startup.py",)),
    "call-depth": Task("calls and functions of one forecast", ("benchmarks/call_depth.py",)),
    "accuracy": Task(
        "refit without each card and family, then forecast what was left out (30 minutes)",
        (TRACED, f"benchmarks/accuracy.py {FOLDERS} --again --write-intervals"),
        ZOO,
    ),
    "gpu-accuracy": Task(
        "forecasts beside steps measured on an H100 and an H200 (needs no GPU)",
        ("benchmarks/gpu_accuracy.py",),
        ZOO,
    ),
    "cluster": Task(
        "many GPUs: held-out runs, search, links, steps between shaped hosts (as root)",
        (
            TRACED,
            f"benchmarks/cluster_accuracy.py {FOLDERS} --again",
            "benchmarks/cluster_search.py",
            "benchmarks/cluster_links.py",
            "benchmarks/cluster_steps.py",
        ),
        ZOO,
    ),
    "memory": Task("forecast and measured peaks", ("-m benchmarks.memory {data}",), (*ZOO, "fms")),
    "adapters": Task("LoRA and QLoRA steps", ("benchmarks/adapters.py",), (*ZOO, "fms")),
    "experts": Task("steps with expert parallelism", ("-m benchmarks.experts --data {data}",)),
    "architectures": Task(
        "today's architectures in full size on the meta device",
        ("benchmarks/architectures.py",),
        ZOO,
    ),
    "measure": Task(
        "intervals, jumps and calibration on an idle machine (an hour)",
        (
            "benchmarks/measure.py",
            "benchmarks/jumps.py --data {data}",
            "benchmarks/journal_repeats.py",
        ),
        ZOO,
    ),
    "journal": Task("the journal under load, SQLite and PostgreSQL", ("benchmarks/journal.py",)),
    "match": Task(
        "time of match; cost of failures against a simulation",
        ("benchmarks/goodput.py", "benchmarks/match_speed.py"),
    ),
    "practitioners": Task(
        "what plan and match recommend beside what practitioners do",
        ("benchmarks/practitioners.py",),
    ),
    "diagnose": Task(
        "verdicts on scripts with planted causes; cost of watching (30 minutes)",
        ("benchmarks/diagnose.py",),
        (*ENGINES, "peers"),
    ),
    "diagnose-gpu": Task(
        "the same on a machine with a GPU: add measure FOLDER, then table FOLDER",
        ("benchmarks/diagnose_gpu.py",),
    ),
    "accelerator": Task(
        "faults planted in the code for GPUs, caught on a simulated device",
        ("benchmarks/accelerator_faults.py",),
    ),
    "nodes": Task(
        "faults planted on four nodes of a real Slurm (as root)", ("benchmarks/run_nodes.py",)
    ),
    "scripts": Task(
        "three unchanged scripts from their defaults to the best setup (30 minutes)",
        ("benchmarks/script_ladders.py",),
    ),
    "run": Task(
        "the ladder, Slurm, config writers, verify and the noise scale (an hour, as root)",
        (
            "benchmarks/run_ladder.py",
            "benchmarks/run_slurm.py",
            "benchmarks/config_writers.py",
            "benchmarks/equivalence.py",
            "benchmarks/noise_scale.py",
        ),
        (*ZOO, *ENGINES),
    ),
    "thesis": Task(
        "the thesis replayed on four nodes (as root)", ("benchmarks/thesis_replay.py",), ENGINES
    ),
    "datapath": Task(
        "precompute against litdata, webdataset and Hugging Face datasets",
        ("benchmarks/datapath.py", "benchmarks/thesis_case.py"),
        ("peers",),
    ),
    "callbacks": Task(
        "time left against what trainings took", ("benchmarks/time_left.py",), ENGINES
    ),
    "serve": Task("the dashboard over a million runs, 50 clients", ("benchmarks/dashboard.py",)),
    "soak": Task("the dashboard beside idle crowds: --minutes 30", ("benchmarks/soak.py",)),
    "kills": Task("every verb ended at random moments: --kills 100", ("benchmarks/kills.py",)),
    "pictures": Task(
        "screenshots and charts of docs/pictures (15 minutes)",
        ("benchmarks/pictures.py", "benchmarks/chart_gallery.py"),
    ),
}

if __name__ == "__main__":
    main("benchmarks", TASKS)
