"""The cards of kernels16.parquet and of the lent machines, as the catalogue names them."""

NAMES = {
    "A100-SXM-80GB": "A100 SXM 80GB", "H100-SXM-80GB": "H100 SXM", "H200-SXM": "H200 SXM", "H200-NVL": "H200 NVL",
    "B200": "B200", "B300": "B300", "GB200": "GB200", "L40S": "L40S",
    "A40": "A40", "RTX-A6000": "RTX A6000", "RTX-4090": "RTX 4090", "V100-SXM-16GB": "V100 SXM2 16GB",
    "T4": "T4", "H100-PCIe-80GB": "H100 PCIe", "GB300": "GB300", "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H200": "H200 SXM", "A100-SXM-40GB": "A100 SXM 40GB", "GH200-96GB": "GH200 96GB", "RTX-2080Ti": "RTX 2080 Ti",
    "TITAN-RTX": "Titan RTX", "P100": "P100 PCIe 16GB", "GTX-1080Ti": "GTX 1080 Ti", "TITAN-X-Pascal": "Titan X Pascal",
    "TITAN-Xp": "Titan Xp", "MI100": "MI100", "MI210": "MI210", "MI300X": "MI300X",
}  # fmt: skip
