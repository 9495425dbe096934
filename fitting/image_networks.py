"""NVIDIA's image networks (DeepLearningExamples, PyTorch/Classification/ConvNets) by the names that
its tables give them.
"""

from __future__ import annotations

from trainpace.forecast import MeasuredRun

IMAGE_NETWORKS = {
    "efficientnet-b0": "timm:efficientnet_b0",
    "efficientnet-b4": "timm:efficientnet_b4",
    "resnext101-32x4d": "timm:resnext101_32x4d",
    "se-resnext101-32x4d": "timm:seresnext101_32x4d",
}
"""The same networks in timm. Left out: efficientnet-widese-*, whose squeezes are wider than timm
builds them, and efficientnet-quant-*, trained through fake quantisation.
"""


def image_network(run: MeasuredRun) -> str:
    """The spec of a run of these tables; empty for another run, another network, and for rows that cannot be right."""
    if run.file != "nvidia_deeplearningexamples" or _is_impossible(run):
        return ""
    return IMAGE_NETWORKS.get(run.model_variant_or_config.removeprefix("Model=") or run.model, "")


def _is_impossible(run: MeasuredRun) -> bool:
    """On one V100 of 32 GB EfficientNet-B4 has 36 and 89 images a second, on eight 641 and 1565:

    18 times as many.
    """
    b4 = run.model_variant_or_config == "Model=efficientnet-b4"
    return b4 and run.gpu == "V100 32GB" and run.num_gpus == 1
