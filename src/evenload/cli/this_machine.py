"""`this_machine`: what `evenload plan config.toml` plans for where no cluster is named: the machine that it runs on.

GPUs are asked for by what NVIDIA's driver says of them in /proc, without torch, and must be of a built-in kind.
Processes on the CPU have no data sheet: their seconds and links are those of a cost file, which `evenload profile` or a
run leaves, their memory is each one's share of the machine's, as in `evenload train`.
"""

import re
from pathlib import Path

from evenload.config.planner import machine_memory_bytes, process_memory_bytes
from evenload.config.train_config import TrainConfig
from evenload.cost.coefficients import CostCoefficients, read_coefficients
from evenload.errors import ConfigError
from evenload.types.cluster import ClusterSpec, DeviceSpec, LinkSpec
from evenload.types.cluster_catalog import BUILT_IN, cluster_from

NAME = "this machine"
_DRIVER = Path("/proc/driver/nvidia/gpus")
# By all that the driver calls a GPU. The built-in ones are SXM cards; PCIe and NVL cards of the same name compute more
# slowly and have other links, so no pattern may be met by a part of a name.
_BUILT_IN_GPUS = (
    (r"(NVIDIA )?H100 (80GB HBM3|SXM5?( 80GB)?)", "h100"),
    (r"(NVIDIA )?H200( SXM5?)?", "h200"),
    (r"(NVIDIA )?B200( SXM6?)?", "b200"),
    (r"(NVIDIA )?A100-SXM4?-80GB", "a100"),
    (r"(NVIDIA )?A100-SXM4?-40GB", "a100-40"),
)


def cost_file_of(run: TrainConfig | None, asked: Path | None, *, is_here: bool) -> Path | None:
    """The cost file that was asked for, else the run's; on this machine also what the run left in its folder."""
    if asked is not None:
        return asked
    if run is None:
        return None
    if run.train.cost_file:
        return Path(run.train.cost_file)
    left = Path(run.train.output_dir) / "cost.json"
    return left if is_here and left.is_file() else None


def this_machine(run: TrainConfig | None, cost_file: Path | None, processes: int) -> ClusterSpec:
    """The machine as a cluster of one node.

    Args:
        cost_file: of seconds measured here; `processes`: of the layout.

    Raises:
        ConfigError: no run's configuration says on which devices, its GPUs are not built in, or nothing measured says
            how fast its CPU is.
    """
    if run is None:
        raise ConfigError(
            "--cluster is missing; name one such as h100x8, or give the config.toml of a run on this machine"
        )
    if run.train.device == "cuda":
        return _gpus()
    if cost_file is None:
        raise ConfigError(
            "--cluster is missing, the run computes on the CPU, and how fast this one is was not measured; run "
            "evenload profile or the run itself, which leaves cost.json in its output_dir, and give --cost, or name a "
            "--cluster"
        )
    costs = read_coefficients(cost_file)
    device = DeviceSpec(
        name=costs.device,
        peak_flops_per_s=costs.peak_flops_per_s,
        memory_bytes=process_memory_bytes(processes),
        fragmentation_share=0.0,
        host_link=costs.host_link,
    )
    link = _link(costs, cost_file, processes)
    return ClusterSpec(
        name=NAME,
        num_nodes=1,
        devices_per_node=processes,
        device=device,
        intra_node=link,
        inter_node=link,
        host_memory_bytes=machine_memory_bytes(),
    )


def _gpus() -> ClusterSpec:
    names = [_model_name(file) for file in sorted(_DRIVER.glob("*/information"))]
    if not names:
        raise ConfigError(
            f"--cluster is missing, the run computes on GPUs, and NVIDIA's driver tells of none here ({_DRIVER}); name "
            "the cluster that it will run on"
        )
    kinds = {next((kind for pattern, kind in _BUILT_IN_GPUS if re.fullmatch(pattern, name)), None) for name in names}
    if len(kinds) > 1 or None in kinds:
        raise ConfigError(
            f"--cluster is missing, and this machine has {', '.join(sorted(set(names)))}, of which not all are one of "
            f"the built-in {', '.join(BUILT_IN)}, all SXM (PCIe and NVL cards have other speeds and links); describe "
            "the machine in a TOML file (docs/guide.md) and give it as --cluster"
        )
    (kind,) = kinds
    return cluster_from(f"{kind}x{len(names)}")


def _model_name(file: Path) -> str:
    found = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return found[1] if found else "a GPU without a name"


def _link(costs: CostCoefficients, cost_file: Path, processes: int) -> LinkSpec:
    """Between processes, as far as it was measured; one process alone uses none."""
    if costs.intra_node is not None:
        return costs.intra_node
    for kind in ("p2p", "reduce"):
        if (bandwidth := getattr(costs, f"{kind}_bandwidth_bytes_per_s")) is not None:
            return LinkSpec(bandwidth_bytes_per_s=bandwidth, latency_s=getattr(costs, f"{kind}_latency_s"))
    if processes > 1:
        raise ConfigError(
            f"cost file {cost_file} knows no link, and the layout has {processes} processes; measure it with evenload "
            "profile --layout and that layout, or name a --cluster"
        )
    return LinkSpec(bandwidth_bytes_per_s=float("inf"), latency_s=0.0)
