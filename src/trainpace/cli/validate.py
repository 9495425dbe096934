"""`trainpace validate`."""

from trainpace.cli.command import View, command, echo_json
from trainpace.verbs.validate import ValidateRequest, run


@command(ValidateRequest, View)
def validate(request: ValidateRequest, view: View) -> int:
    """Forecast measured runs under their own conditions, and compare.

    RUNS is CSV or Parquet. Columns: model_spec (or model), gpu_canonical (or gpu), precision, batch_per_gpu,
    step_time_ms (or samples_per_sec), and where they apply num_gpus, num_nodes, interconnect, global_batch, grad_accum,
    seq_len, img_size, optimizer, parallelism, mode (train, forward_backward, inference), memory_format (nchw, nhwc),
    compile (eager, compile), framework, framework_version, peak_mem_gib, notes, file; and engine, attention,
    peak_memory_kind, host_copy, cudnn_benchmark, assumed (docs/verbs/validate.md). An empty field was not stated.

    \b
    trainpace validate runs.csv
    trainpace validate measured_runs.parquet --file timm_train_rtx3090 --json
    """
    from trainpace.records import to_jsonable
    from trainpace.report import TerminalProgress, print_validation

    validated = run(request, TerminalProgress())
    if view.json:
        sums = {f"by_{name}": [to_jsonable(s) for s in group] for name, group in validated.groups.items()}
        summary = {"overall": to_jsonable(validated.overall), **sums}
        rows = [to_jsonable(row) for row in validated.rows]
        echo_json({"record": "Validation", "schema_version": 1, "rows": rows, "summary": summary})
    else:
        print_validation(list(validated.rows), validated.overall, {k: list(v) for k, v in validated.groups.items()})
    return 0 if validated.overall.n else 1
