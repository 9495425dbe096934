"""Packaged rows: selection, license, and links to their sources."""

import re

import pytest
from fitting.public_journal import (
    LONGEST_NOTE,
    Chosen,
    Source,
    _date,
    _is_packaged_pass,
    _kind_by_name,
    _short,
    _url,
    read_sources,
)

from trainpace.forecast import MeasuredRun


def entry_of(file, source="", place=""):
    return next((s for s in read_sources() if s.holds(file, source, place)), None)


def test_every_packaged_source_is_complete():
    for source in read_sources():
        if source.packaged:
            assert all((source.name, source.url, source.licence, source.copyright, source.why)), (
                source
            )
            assert source.trust in "ABC"
            assert source.date is None or re.fullmatch(r"20\d\d(-\d\d){0,2}", source.date)
        else:
            assert source.why
            assert not source.licence


@pytest.mark.parametrize(
    ("file", "source", "packaged"),
    [
        ("lambda_aggregated", "lambdal/deeplearning-benchmark (median of repeats)", False),
        ("ryujaehun_pytorch_gpu_benchmark", "ryujaehun/pytorch-gpu-benchmark", False),
        ("simpletuner_diffusion", "SimpleTuner Ideogram 4 guide", False),
        ("qwen_readme_profiles", "QwenLM/Qwen-VL README profiling table", False),
        ("qwen_readme_profiles", "QwenLM/Qwen README profiling table", True),
        ("github_threads", "GitHub threads", False),
        ("github_threads", "OpenTau benchmarking guide", True),
        ("timm_train_rtx3090", "huggingface/pytorch-image-models (timm) results", True),
        ("litgpt_flashattn_misc", "karpathy/nanoGPT", True),
        ("litgpt_flashattn_misc", "karpathy/nanoGPT issue 110", False),
    ],
)
def test_license_decides_packaging(file, source, packaged):
    assert entry_of(file, source).packaged is packaged


def test_license_is_decided_by_folder():
    place = "github:NVIDIA/DeepLearningExamples@729963d PyTorch/{}/README.md"
    assert (
        entry_of("nvidia_deeplearningexamples", place=place.format("Translation/GNMT")).licence
        == "MIT"
    )
    assert entry_of(
        "nvidia_deeplearningexamples", place=place.format("Classification/ConvNets/resnext")
    ).packaged
    assert not entry_of(
        "nvidia_deeplearningexamples", place=place.format("Segmentation/MaskRCNN")
    ).packaged


def test_unknown_collection_has_no_entry():
    assert entry_of("a_new_collection") is None


@pytest.mark.parametrize(
    ("place", "link"),
    [
        ("github:a/b@0123abc folder/file.md", "https://github.com/a/b/blob/0123abc/folder/file.md"),
        (
            "github:a/b-c@0123abc results*, see x.csv",
            "https://github.com/a/b-c/blob/0123abc/results*",
        ),
        ("github.com/a/b README.md@0123abcdef", "https://github.com/a/b/blob/0123abcdef/README.md"),
        ("github:a/b d31653f792^ docs/x.md", "https://github.com/a/b/blob/d31653f792/docs/x.md"),
        ("https://github.com/a/b/pull/1", "https://github.com/a/b/pull/1"),
        ("said on a conference", "https://home"),
    ],
)
def test_source_location_becomes_link(place, link):
    assert _url(place, "https://home") == link


def test_date_of_row_overrides_date_of_source():
    source = Source(file="bigscience_bloom", date="2022-02")
    read = Chosen(
        {"notes": "section 'x'; row date 02-17; one iteration"},
        MeasuredRun(index=0, file="bigscience_bloom"),
        source,
    )
    assert _date(read, source) == "2022-02-17"
    assert _date(read._replace(raw={"notes": None}), source) == "2022-02"


def test_long_note_is_cut_between_clauses():
    note = "; ".join(["a clause of thirty characters.."] * 20)
    assert len(_short(note)) <= LONGEST_NOTE
    assert _short(note).endswith("..")
    assert _short("short") == "short"
    assert len(_short("x" * 500)) == LONGEST_NOTE


def test_common_models_and_a_tenth_of_others_are_packaged():
    assert _is_packaged_pass("timm:resnet50")
    assert _is_packaged_pass("timm:vit_base_patch16_224")
    share = sum(_is_packaged_pass(f"timm:network_{i}") for i in range(2000)) / 2000
    assert 0.05 < share < 0.15


def test_kind_of_untraced_model_follows_name():
    assert _kind_by_name("mistralai/Mixtral-8x7B-Instruct-v0.1") == "experts"
    assert _kind_by_name("Qwen-14B") == "transformers"
    assert _kind_by_name("InceptionV3") == "convolutions"
    assert _kind_by_name("GNMT") == "other"
