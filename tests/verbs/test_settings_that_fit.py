"""Settings that a forecast suggests after a misfit."""

import json

import pytest

import trainpace

pytest.importorskip("transformers")


@pytest.mark.slow
def test_settings_suggested_after_a_misfit_fit(tmp_path):
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    asked = {"no_journal": True, "evidence": "none", "sequence_length": (512,)}
    misfit = trainpace.forecast(f"transformers:{path}", gpu=("RTX 3060",), **asked)
    assert not any(row.can_run for row in misfit)
    assert misfit.fits_with["adapter"] == "lora"
    more = {name: value for name, value in misfit.fits_with.items() if name != "gpu"}
    again = trainpace.forecast(f"transformers:{path}", gpu=("RTX 3060",), **asked, **more)
    assert all(row.can_run for row in again)
    assert again.fits_with == {}
