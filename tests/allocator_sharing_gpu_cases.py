"""Cases of test_allocator_sharing_gpu.py, a process each, which starts others: CUDA tensors between processes.

A receiver attaches its allocator before the first tensor arrives: a tensor among the arguments of a process arrives
earlier.
"""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import child_script
import torch
import torch.distributed as dist
import torch.multiprocessing as mp  # queues of multiprocessing then take tensors
from allocator_torch_cases import MIB, enable, filled
from torch import nn
from torch.utils.data import DataLoader, Dataset

LONGEST_S = 60
NATIVE_REFUSES_NEWER = "from a future version of torch"

Queue = Any


def attach(kind: str) -> None:
    if kind != "native":
        enable(kind)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _serve(kind: str, work: Callable[[Queue, Queue], object], inbox: Queue, outbox: Queue) -> None:
    attach(kind)
    try:
        outbox.put(("returned", work(inbox, outbox)))
    except RuntimeError as error:
        outbox.put(("raised", str(error)))


class Receiver:
    """A process that does some work under one of the allocators, with a queue each way."""

    def __init__(self, kind: str, work: Callable[[Queue, Queue], object]) -> None:
        context = mp.get_context("spawn")
        self.inbox, self.outbox = context.Queue(), context.Queue()
        self.process = context.Process(target=_serve, args=(kind, work, self.inbox, self.outbox))
        self.process.start()

    def put(self, value: object) -> None:
        self.inbox.put(value)

    def get(self) -> Any:
        return self.outbox.get(timeout=LONGEST_S)

    def end(self) -> Any:
        """Return the work's result, as a pair with "returned" or "raised"."""
        result = self.get()
        self.process.join(LONGEST_S)
        assert self.process.exitcode == 0, self.process.exitcode
        return result


def _write(inbox: Queue, _: Queue) -> object:
    tensor, view, value = inbox.get(timeout=LONGEST_S)
    seen = view.unique().tolist()
    view.add_(value)
    shares = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    torch.cuda.synchronize()
    return seen, shares, torch.cuda.memory_allocated()


def written_by_receivers(growth: str, kinds: str) -> None:
    """A tensor and a view with an offset; each receiver writes a part, and the sender sees what they wrote."""
    enable(growth)
    before = filled(3 * MIB, 9) if "native" not in kinds else None  # the tensor then begins inside a handle
    tensor = filled(64 * MIB, 1)
    torch.cuda.synchronize()
    receivers = [Receiver(kind, _write) for kind in kinds.split(",")]
    rows = tensor.view(len(receivers), -1)
    for value, receiver in enumerate(receivers, start=1):
        receiver.put((tensor, rows[value - 1, 1000:-1000], value))
    for value, receiver in enumerate(receivers, start=1):
        # Memory of another process is in no statistics.
        assert receiver.end() == ("returned", ([1.0], True, 0))
        assert rows[value - 1, 1000:-1000].unique().tolist() == [1 + value]
        assert rows[value - 1, :1000].unique().tolist() == rows[value - 1, -1000:].unique().tolist() == [1]
    assert before is None or before.unique().tolist() == [9]


def _unwritten(inbox: Queue, _: Queue) -> object:
    return inbox.get(timeout=LONGEST_S).sum().item()


def native_receiver_of_mixed_handles() -> None:
    """A tensor over handles of different sizes: torch's own reader knows one size only, and says so."""
    enable()
    filler = filled(30 * MIB)
    tensor = filled(100 * MIB, 1)
    receiver = Receiver("native", _unwritten)
    receiver.put(tensor)
    how, text = receiver.end()
    assert how == "raised"
    assert NATIVE_REFUSES_NEWER in text, text
    del filler


def _hold(inbox: Queue, outbox: Queue) -> object:
    tensor = inbox.get(timeout=LONGEST_S)
    outbox.put("opened")
    inbox.get(timeout=LONGEST_S)
    total = tensor.double().sum().item()
    del tensor
    outbox.put(total)
    return inbox.get(timeout=LONGEST_S)


def freed_and_refilled(growth: str) -> None:
    """A receiver keeps what the sender dropped; the memory is free again after the receiver."""
    enable(growth)
    receiver = Receiver(growth, _hold)
    tensor = filled(64 * MIB, 3)
    receiver.put(tensor)
    assert receiver.get() == "opened"
    del tensor
    refilled = [filled(64 * MIB, 9) for _ in range(4)]
    torch.cuda.empty_cache()
    receiver.put("check")
    assert receiver.get() == 3 * 16 * MIB
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == 4 * 64 * MIB
    refilled.append(filled(64 * MIB, 9))
    assert all(bool((each == 9).all()) for each in refilled)
    receiver.put("end")
    receiver.end()


def _sum_each(inbox: Queue, outbox: Queue) -> None:
    while (tensor := inbox.get(timeout=LONGEST_S)) is not None:
        outbox.put(tensor[:256].sum().item())
        del tensor


def more_than_the_limit_of_files(growth: str) -> None:
    """Tensors one after another, then many at once in few handles: descriptors close with their blocks."""
    enable(growth)
    receiver = Receiver(growth, _sum_each)
    receiver.put(filled(MIB, 1))
    assert receiver.get() == 256
    before = descriptors()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    for value in range(400):
        tensor = filled(30 * MIB, value)
        receiver.put(tensor)
        assert receiver.get() == 256 * value
        del tensor
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    small = [filled(64 << 10, value) for value in range(1000)]
    for each in small:
        receiver.put(each)
    assert [receiver.get() for _ in small] == [256 * value for value in range(1000)]
    small.clear()
    torch.cuda.ipc_collect()
    # torch's own reference counters may keep a file.
    assert descriptors() <= before + 4
    receiver.put(None)
    receiver.end()


def what_receivers_return_is_used_again(growth: str) -> None:
    """Sending does not reserve more with every tensor."""
    enable(growth)
    receiver = Receiver(growth, _sum_each)
    for _ in range(50):
        receiver.put(filled(64 * MIB, 1))
        receiver.get()
    # One in the sender's hand and one on its way back, with room for the last that was not collected yet.
    assert torch.cuda.max_memory_reserved() <= 3 * 64 * MIB
    receiver.put(None)
    receiver.end()


def _produce(inbox: Queue, outbox: Queue) -> None:
    for value in range(8):
        outbox.put(filled(40 * MIB, value))
    inbox.get(timeout=LONGEST_S)


def sent_back(growth: str) -> None:
    """Tensors of another process, several open at once, opened and closed in any order."""
    enable(growth)
    producer = Receiver(growth, _produce)
    tensors = [producer.get() for _ in range(8)]
    for value in (3, 0, 7, 1):
        assert tensors[value].unique().tolist() == [value]
        tensors[value] = None
    kept = [each for each in tensors if each is not None]
    assert [each.unique().tolist() for each in kept] == [[2], [4], [5], [6]]
    total = sum(each.double().sum() for each in kept).item()  # type: ignore[union-attr]
    assert total == (2 + 4 + 5 + 6) * 10 * MIB
    tensors.clear()
    kept.clear()
    torch.cuda.ipc_collect()
    producer.put("end")
    producer.end()


class OnTheGpu(Dataset[torch.Tensor]):
    """Items that a worker makes on the GPU, under the allocator."""

    def __init__(self, growth: str) -> None:
        self.growth = growth

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.cuda.get_allocator_backend() != "pyactcomp":
            enable(self.growth)
        return filled(MIB, index)


def loader(growth: str) -> None:
    enable(growth)
    batches = DataLoader(OnTheGpu(growth), batch_size=4, num_workers=2, multiprocessing_context="spawn")
    for count, batch in enumerate(batches):
        assert batch.is_cuda
        assert batch[:, 0].tolist() == [4 * count + item for item in range(4)]
    assert count == 5


def _learn(kind: str, queue: Queue, iterations: int, acted: Event) -> None:
    attach(kind)
    net = nn.LSTM(1, 1).cuda()
    for _ in range(iterations):
        if not queue.full():
            queue.put({name: value.clone() for name, value in net.state_dict().items()})
        time.sleep(0.01)
    # Memory that was sent lives as long as its process, and the actor may have started later.
    acted.wait(LONGEST_S)


def _act(kind: str, queue: Queue, iterations: int, acted: Event) -> None:
    try:
        attach(kind)
        torch.cuda.init()
        for _ in range(iterations):
            if not queue.empty():
                state = queue.get(timeout=LONGEST_S)
                assert all(value.isfinite().all() for value in state.values())
            time.sleep(0.01)
    finally:
        acted.set()


def learner_and_actor(kind: str) -> None:
    """The program of PyTorch's test_cuda_ipc_deadlock: both end, however their sends and frees fall together."""
    context = mp.get_context("spawn")
    queue = context.Queue(1)
    acted = context.Event()
    processes = [context.Process(target=work, args=(kind, queue, 100, acted)) for work in (_act, _learn)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LONGEST_S)
    assert [process.exitcode for process in processes] == [0, 0]


def _add_on_the_peer(inbox: Queue, _: Queue) -> object:
    tensor = inbox.get(timeout=LONGEST_S)
    late = torch.ones(1, device="cuda:1")  # the second device is first used after the tensor was opened
    return (tensor.to("cuda:1") + late).double().sum().item()


def peers(growth: str) -> None:
    """Copies and kernels reach memory of the other device, allocated before and after it was first used."""
    enable(growth)
    early = torch.arange(MIB, device="cuda:0")
    far = early.to("cuda:1")
    late = torch.arange(64 * MIB, device="cuda:0")
    for source, target in itertools.permutations((0, 1)):
        for tensor in (early, far, late):
            here = tensor.to(f"cuda:{source}")
            assert torch.equal(here.to(f"cuda:{target}").cpu(), tensor.cpu())
    receiver = Receiver(growth, _add_on_the_peer)
    shared = filled(40 * MIB, 2)
    receiver.put(shared)
    assert receiver.end() == ("returned", 3 * 10 * MIB)


def _register(rank: int, kind: str, folder: str) -> None:
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,REG,ALLOC", "NCCL_NVLS_ENABLE": "0"}
    os.environ["NCCL_DEBUG_FILE"] = f"{folder}/{kind}-{rank}.log"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    attach(kind)
    rendezvous = f"file://{folder}/{kind}-rendezvous"
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=2, device_id=device)
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.full((MIB * size,), float(rank + 1), device=device) for size in (2, 30)]
    outcome = "registered"
    try:
        backend.register_mem_pool(pool)
    except RuntimeError as error:
        outcome = str(error).splitlines()[0]
    for tensor in tensors:
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [3.0]
    if outcome == "registered":
        backend.deregister_mem_pool(pool)
    Path(folder, f"{kind}-{rank}.txt").write_text(outcome)
    dist.destroy_process_group()


def nccl_user_buffers(kind: str, folder: str) -> None:
    mp.spawn(_register, (kind, folder), nprocs=2)


if __name__ == "__main__":
    child_script.main(globals())
