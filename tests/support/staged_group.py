"""A transport for several ranks on one device: what they send goes through host memory and gloo.

NCCL refuses two ranks on a GPU, so on a machine with one GPU nothing that ranks do together could be run there. These
groups take the place of NCCL's (`create_meshes(..., backend="staged")`): a transfer copies to the host, and whoever
waits for it copies what came to the device. Both stop the host, so nothing overlaps; results are as of any other one.

A process group in Python has to answer what `torch.distributed`'s functions call, which torch 2.13 calls by other names
than 2.11 and 2.12.
"""

import torch
import torch.distributed as dist

NAME = "staged"


class _Work(dist.Work):
    """A transfer through the host; `arrivals` are (device tensor, host tensor) to copy when it is done."""

    def __init__(self, work, arrivals, kept=()) -> None:
        super().__init__()
        self._work, self._arrivals, self._kept = work, arrivals, kept

    def wait(self, timeout=None) -> bool:
        if self._work is not None:
            self._work.wait()
            for on_device, on_host in self._arrivals:
                on_device.copy_(on_host)
            self._work, self._arrivals, self._kept = None, (), ()
        return True


class StagedGroup(dist.ProcessGroup):
    """As many as the runtime's transfers need."""

    def __init__(self, store, rank, size, timeout) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    def _to_host(self, tensors):
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def _inner(self, *names):
        """gloo's method by the first of these names that torch has."""
        return next(getattr(self._gloo, name) for name in names if hasattr(self._gloo, name))

    def allreduce(self, tensors, opts):
        hosts = self._to_host(tensors)
        return _Work(self._gloo.allreduce(hosts, opts), list(zip(tensors, hosts, strict=True)))

    def broadcast(self, tensors, opts):
        hosts = self._to_host(tensors)
        return _Work(self._gloo.broadcast(hosts, opts), list(zip(tensors, hosts, strict=True)))

    def _allgather_base(self, output, given, opts):
        [host], received = self._to_host([given]), torch.empty(output.shape, dtype=output.dtype)
        work = self._inner("_allgather_base", "all_gather_single")(received, host, opts)
        return _Work(work, [(output, received)], (host,))

    def _reduce_scatter_base(self, output, given, opts):
        [host], received = self._to_host([given]), torch.empty(output.shape, dtype=output.dtype)
        work = self._inner("_reduce_scatter_base", "reduce_scatter_single")(received, host, opts)
        return _Work(work, [(output, received)], (host,))

    def alltoall_base(self, output, given, output_sizes, input_sizes, opts):
        [host], received = self._to_host([given]), torch.empty(output.shape, dtype=output.dtype)
        work = self._inner("alltoall_base", "all_to_all_single")(received, host, output_sizes, input_sizes, opts)
        return _Work(work, [(output, received)], (host,))

    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    def send(self, tensors, to, tag):
        hosts = self._to_host(tensors)
        return _Work(self._gloo.send(hosts, to, tag), (), hosts)

    def recv(self, tensors, source, tag):
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        return _Work(self._gloo.recv(hosts, source, tag), list(zip(tensors, hosts, strict=True)))

    def barrier(self, opts):
        return self._gloo.barrier(opts)


def register_staged() -> None:
    """Have `torch.distributed` know the backend in this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])
