"""Model sizes parsed from public tables match the parameter counts of these tables."""

import json

import pytest
from fitting.gpt_sizes import GptSize, gpt_size, named_model, write_configuration

from trainpace.core.errors import TrainpaceError

BIGSCIENCE = "NHIDDEN=14400, 20B: NLAYERS=8 NHEADS=32; 200B: NLAYERS=80 NHEADS=96 vocab=250k"


@pytest.mark.parametrize(
    ("model", "text", "pp", "expected"),
    [
        (
            "GPT 1.7B",
            "layers=24 hidden=2304 heads=24 vocab=51200 params_B=1.7",
            1,
            (24, 2304, 24, 51200, 9216),
        ),
        (
            "gpt3-175B",
            "hidden=12288 feedforward=49152 seq_size=2048 attn_heads=96 num_blocks=96",
            8,
            (96, 12288, 96, 51200, 49152),
        ),
        ("GPT 200B", BIGSCIENCE, 10, (80, 14400, 96, 250880, 57600)),
        ("GPT 20B", BIGSCIENCE, 1, (8, 14400, 32, 250880, 57600)),
        (
            "GPT 194B",
            "NHIDDEN=14400 (text: NHIDDEN was fixed; 200B = 80 layers) vocab=250k",
            6,
            (78, 14400, 96, 250880, 57600),
        ),
        (
            "GPT 18B",
            "NHIDDEN=14336 / NLAYERS=6 / GBS=512 Layers=10 vocab=250k",
            1,
            (10, 14336, 64, 250880, 57344),
        ),
        (
            "BLOOM 176B",
            "70 layers h=14336 heads=112 (public config)",
            12,
            (70, 14336, 112, 250880, 57344),
        ),
        (
            "GPT-2 124M",
            "n_layer=12 n_embd=768 n_head=12 vocab=50304",
            1,
            (12, 768, 12, 50304, 3072),
        ),
    ],
)
def test_gpt_size_is_read_from_table_text(model, text, pp, expected):
    found = gpt_size(model, text, pp)
    assert found is not None
    assert found[0] == GptSize(*expected)


def test_assumed_gpt_sizes_are_reported():
    _, assumed = gpt_size("GPT 181B", "NHIDDEN=14336 vocab=250k", 12)
    assert "72 layers" in assumed
    assert "64 heads" in assumed


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("GPT 7.5B", "see the section text of the file"),
        ("GPT", BIGSCIENCE),
        ("Llama 2 7 B", "LoRA, trainable=4,194,304"),
        ("LLAMA2-7B", "LoRA"),
        ("Nemotron-340B", "pretrain"),
        (
            "SwitchTransformer-XL (4 experts)",
            "layers=24 hidden=1024 heads=32 vocab=32128 experts=4",
        ),
    ],
)
def test_incomplete_model_description_gives_none(model, text):
    assert named_model(model, text, 2048) is None


def test_indivisible_heads_are_rejected():
    with pytest.raises(TrainpaceError, match="7 heads do not divide"):
        gpt_size("GPT 1B", "layers=2 hidden=64 heads=7")


@pytest.mark.parametrize(
    ("size", "batch", "tflops", "gpus", "length", "step_s"),
    [
        (
            GptSize(30, 2304, 18, 51200, 9216),
            16,
            136.8,
            2,
            1024,
            1.026,
        ),  # Megatron-LM's table of 2020
        (
            GptSize(72, 14336, 64, 250880, 57344),
            2048,
            141.27,
            384,
            2048,
            114.11,
        ),  # bigscience, 2022-02-25
        (
            GptSize(105, 20480, 128, 51200, 81920),
            1920,
            126,
            2240,
            2048,
            60.1,
        ),  # Smith et al. 2022, section 2.4
    ],
)
def test_step_flops_match_published_time_and_rate(size, batch, tflops, gpus, length, step_s):
    assert size.step_flops(batch, length) / (gpus * tflops * 1e12) == pytest.approx(
        step_s, rel=0.02
    )


def test_configuration_file_is_written_once(tmp_path):
    named = named_model("GPT 1.7B", "layers=24 hidden=2304 heads=24 vocab=51200", 2048)
    spec = write_configuration(named, tmp_path / "new")
    assert spec == write_configuration(named, tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()
    assert json.loads(file.read_text())["n_layer"] == 24
    assert spec == f"transformers:{file}"


@pytest.mark.parametrize(
    ("model", "text", "parameters"),
    [
        (
            "tiny",
            "L=4 h=768 mlp=3072 heads=12 head_dim=64 vocab=16384 params=53912064 use_flash=False",
            53912064,
        ),
        (
            "small",
            "L=12 h=768 mlp=3072 heads=12 head_dim=64 vocab=16384 params=110615040 use_flash=False",
            110615040,
        ),
        (
            "medium",
            "L=24 h=1024 mlp=4096 heads=16 head_dim=64 vocab=16384 params=336390144 use_flash=False",
            336390144,
        ),
        (
            "large",
            "L=24 h=1536 mlp=6144 heads=16 head_dim=96 vocab=16384 params=731077632 use_flash=False",
            731077632,
        ),
    ],
)
def test_languini_gpts_have_published_parameter_counts(model, text, parameters):
    c = named_model(f"languini-gpt-{model}", text, 512).configuration
    h, ends = c["n_embd"], 2 - c["tie_word_embeddings"]
    weights = (
        4 * h * h + 2 * h * c["n_inner"] + 4 * h + c["n_inner"] + h + 4 * h
    )  # matmuls, their biases, two norms
    assert (
        ends * c["vocab_size"] * h + c["n_positions"] * h + c["n_layer"] * weights + 2 * h
        == parameters
    )
    assert c["attn_pdrop"] == 0


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            "languini-gpt-mini",
            "L=4 h=512 mlp=2048 heads=8 head_dim=32 vocab=16384",
        ),  # attention narrower than hidden
        ("languini-gpt-XL", "L=24 h=2048 mlp=8192 heads=24 head_dim=128 vocab=16384"),
        (
            "languini-lstm-tiny",
            "L=4 h=768 mlp=3072 heads=12 head_dim=64 vocab=16384 use_flash= quasi block=8",
        ),
        ("ibm/PowerLM-3b", "framework=foak-fast-kernels; full fine-tuning"),  # uses custom kernels
        ("ibm/PowerLM-3b", "framework=none; lora r=16.0 targets=q_proj"),
    ],
)
def test_models_without_configuration_give_none(model, text):
    assert named_model(model, text, 512) is None


@pytest.mark.parametrize(
    ("model", "billions"), [("ibm/PowerLM-3b", 3.51), ("bigcode/gpt_bigcode-santacoder", 1.12)]
)
def test_published_models_have_published_sizes(model, billions, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    named = named_model(model, "framework=none; full fine-tuning", 2048)
    spec = write_configuration(named, tmp_path)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(spec.partition(":")[2])
        built = transformers.AutoModelForCausalLM.from_config(config)
    assert built.num_parameters() / 1e9 == pytest.approx(billions, rel=0.01)
