"""`python -m fitting NAME`: fit the constants of the kernel models on measured figures."""

from tools.tasks import Task, main

ZOO = ("zoo",)
VALIDATE = "-m trainpace validate out/prepared/{}.parquet --models {{data}} --traces {{traces}}"
TABLES = ("measured_runs", "timm_inference", "runs2")
TASKS = {
    "traces": Task(
        "trace the measured runs once (six minutes)",
        (
            "-m fitting.prepare --data {data} --output out/prepared",
            *(VALIDATE.format(table) for table in TABLES),
        ),
        ZOO,
    ),
    "fit": Task(
        "kernel constants and residuals from measured runs",
        ("-m fitting.fit --data {data} --traces {traces}",),
        ZOO,
        after=("traces",),
    ),
    "cards": Task(
        "convolutions, norms and memory-bound kernels by generation and card",
        ("-m fitting.cards --data {data}",),
        ZOO,
    ),
    "matmuls": Task(
        "16- and 8-bit matmuls of single cards", ("-m fitting.products --data {data}",)
    ),
    "attention": Task("fused attention", ("-m fitting.attention --data {data} --folds",)),
    "links": Task("links, from measured collectives", ("-m fitting.links --data {data}",)),
    "public-journal": Task(
        "package the measurements that may be shared, with this version's forecasts",
        ("-m fitting.public_journal --data {data} --traces {traces}",),
        ZOO,
    ),
}

if __name__ == "__main__":
    main("fitting", TASKS)
