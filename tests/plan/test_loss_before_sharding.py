"""Plans for long sequences over a large vocabulary, whose logits are what does not fit."""

import json

from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import FittedKernels, Forecaster, Target
from trainpace.job import Schedule
from trainpace.plan import Problem, plan_changes
from trainpace.workload import Variant
from trainpace.workload.trace import trace

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def test_plan_changes_the_loss_before_it_shards(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODEL))
    workload = trace(f"transformers:{file}", ("half",), Variant("adamw", 24576))
    cluster = Cluster(device=find_device("A100"), devices_per_node=2)
    start = Execution(
        micro_batch=1, precision="bf16", nproc_per_node=2, activation_checkpointing="full"
    )
    forecast = Forecaster(workload, Target(cluster, FittedKernels())).forecast(start)
    assert not forecast.fits
    assert forecast.memory.logits_gib > 0.8 * forecast.memory.allocated_gib
    problem = Problem(workload, cluster, Schedule(samples=20000, epochs=3))
    plan = plan_changes(problem, start)
    assert plan.changes[0].settings == {"use_liger_kernel": True}
    assert plan.changes[0].makes_fit
    assert not plan.start_fits
    assert plan.changes[0].execution == start
