"""Packed rows and padded batches are compared per document token."""

import pytest
from msgspec.structs import replace

from nouns import stacked
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import Forecaster, Target
from trainpace.verbs.traced import compared, padded_batch
from trainpace.workload import Documents


def test_packing_saves_time_per_document_token():
    """A row of 4096 tokens holds 2.5 documents of 1800 tokens; a padded batch holds three."""
    documents = Documents.with_mean(1800)
    forecast = Forecaster(stacked(), Target(Cluster(device=find_device("H100")))).forecast
    n, length = padded_batch(documents, 4096, 1)
    packed = replace(forecast(Execution(precision="bf16")), sequence_length=4096)
    padded = replace(forecast(Execution(precision="bf16", micro_batch=n)), sequence_length=length)
    one = compared(documents, packed, padded)
    assert one.documents == 3
    assert one.packed_tokens == pytest.approx(4096 * documents.packed(4096).fill)
    assert one.packed_tokens <= 4096
    assert one.padded_tokens == pytest.approx(3 * documents.mean_up_to(4096))
    rates = one.packed_tokens / packed.step.total_ms, one.padded_tokens / padded.step.total_ms
    assert one.saved == pytest.approx(1 - rates[1] / rates[0])
