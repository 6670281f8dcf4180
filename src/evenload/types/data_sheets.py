"""`data_sheet_flops_per_s`: the dense bf16 peak of a GPU, by the name that `torch.cuda.get_device_name` gives.

Names are compared whole. Cards of one chip have different peaks ("H200", "H200 NVL"), and a share of a card has its
name with more behind it ("A100-SXM4-40GB MIG 1g.5gb"), so part of a name says nothing; a name that is not here has no
peak here. Sums are in fp32, which is what training adds in; GeForce cards are twice as fast without.
"""

_TERA = 1e12
_PEAKS: dict[str, float] = {
    # NVIDIA A100 data sheet (2021): SXM and PCIe have the same peak, and differ in memory and power.
    "A100-SXM4-40GB": 312 * _TERA,
    "A100-SXM4-80GB": 312 * _TERA,
    "A100-SXM-80GB": 312 * _TERA,
    "A100-PCIE-40GB": 312 * _TERA,
    "A100 80GB PCIe": 312 * _TERA,
    # H100 data sheet (2023 and later), half of what it prints, "with sparsity": 1,979 (SXM), 1,513 (PCIe), 1,671 (NVL).
    "H100 80GB HBM3": 989 * _TERA,
    "H100 PCIe": 756 * _TERA,
    "H100 NVL": 835 * _TERA,
    # H200 data sheet (2024), half of 1,979 (SXM) and of 1,671 (NVL).
    "H200": 989 * _TERA,
    "H200 NVL": 835 * _TERA,
    # GH200 data sheet (2024), half of 1,979.
    "GH200 480GB": 989 * _TERA,
    # DGX B200 data sheet (2024): half of 36,000, over eight GPUs.
    "B200": 2250 * _TERA,
    # Data sheets of the A30 (2021), A40 (2021) and A10 (2021), without sparsity.
    "A30": 165 * _TERA,
    "A40": 149.7 * _TERA,
    "A10": 125 * _TERA,
    # L4 data sheet (2023), half of 242; L40 (2022) and L40S (2023), without sparsity.
    "L4": 121 * _TERA,
    "L40": 181.05 * _TERA,
    "L40S": 362.05 * _TERA,
    # NVIDIA Ada GPU Architecture V2, table of the RTX 4090 and 3090: bf16 with fp32 accumulate, without sparsity.
    "GeForce RTX 3090": 71 * _TERA,
    "GeForce RTX 4090": 165.2 * _TERA,
}

KNOWN_GPUS = tuple(_PEAKS)
"""Names without "NVIDIA "."""


def data_sheet_flops_per_s(device: str) -> float | None:
    """Of a GPU by torch's name of it, with or without "NVIDIA "; None where its data sheet is not known here."""
    return _PEAKS.get(device.removeprefix("NVIDIA "))
