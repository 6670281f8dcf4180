"""Collectives beside compute: behind what was computed before, one after the other, before what waits for them."""

import threading

import pytest
import torch

from evenload.runtime.comm import collectives as module
from evenload.runtime.comm.collectives import StreamQueue, ThreadQueue, collective_queue
from evenload.runtime.device import HostClock
from fake_streams import Device

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["sums at once", "sums late"])
def device(request, monkeypatch):
    monkeypatch.setattr(module, "step_clock", lambda device: HostClock())
    monkeypatch.setattr(module, "_streams", {})
    return Device(copies_at_once=request.param).replace(monkeypatch)


def test_a_gpus_sums_read_what_was_computed_before_and_are_there_for_what_comes_after(device):
    queue = collective_queue(torch.device("cuda"), is_overlapped=True)
    assert isinstance(queue, StreamQueue)
    grads, shards, seen = [torch.zeros(2) for _ in range(2)], [torch.zeros(2) for _ in range(2)], []
    for grad, shard in zip(grads, shards, strict=True):
        device.compute.queue(lambda grad=grad: grad.fill_(1))
        queue.put(lambda grad=grad, shard=shard: device.current_stream(None).queue(lambda: shard.copy_(2 * grad)))
    device.compute.queue(lambda: seen.append([shard.tolist() for shard in shards]))
    assert len(queue.wait()) == 2
    device.compute.queue(lambda: seen.append([shard.tolist() for shard in shards]))
    device.end()
    assert seen[1] == [[2, 2], [2, 2]]


def test_a_thread_runs_calls_in_order_while_the_caller_goes_on():
    queue, may_run, done = collective_queue(CPU, is_overlapped=True), threading.Event(), []
    assert isinstance(queue, ThreadQueue)
    queue.put(may_run.wait)
    for number in range(3):
        queue.put(lambda number=number: done.append((number, threading.current_thread().name)))
    assert not done
    may_run.set()
    spans = queue.wait()
    assert done == [(number, "evenload-collectives") for number in range(3)]
    times = [mark for span in spans for mark in span]
    assert len(times) == 8
    assert times == sorted(times)


@pytest.mark.parametrize("waits_for_all", [True, False])
def test_the_error_of_a_call_is_raised_where_somebody_waits_and_nothing_runs_after_it(waits_for_all):
    queue, done = ThreadQueue(CPU), []

    def fail() -> None:
        raise RuntimeError("gloo: the connection broke")

    before, behind = queue.put(lambda: done.append(1)), (queue.put(fail), queue.put(lambda: done.append(2)))[1]
    queue.await_call(before)
    with pytest.raises(RuntimeError, match="the connection broke"):
        queue.wait() if waits_for_all else queue.await_call(behind)
    assert queue.has_failed
    assert done == [1]


def test_on_a_gpu_what_waits_for_a_call_is_computed_after_it(device):
    """Its stream waits for that call's end, and for no later call."""
    queue, waited = StreamQueue(torch.device("cuda")), []
    numbers = [queue.put(lambda: None) for _ in range(3)]
    for number, span in enumerate(queue._spans):
        queue._spans[number] = span._replace(end=f"end of {number}")
    device.current_stream(None).wait_event = waited.append
    queue.await_call(numbers[1])
    assert waited == ["end of 1"]


def test_a_closed_queue_ends_its_thread_without_what_has_not_begun():
    queue, may_run, begun, done = ThreadQueue(CPU), threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        may_run.wait()

    queue.put(first)
    queue.put(lambda: done.append(1))
    begun.wait()
    queue.close()
    may_run.set()
    queue._thread.join()
    assert not done
