"""Cases of test_allocator_sharing.py, a process each: the allocator of a fake driver, whose memory is shared for real.

Descriptors, and what becomes of them in other processes, are the kernel's; addresses are numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import child_script
import native_alone  # noqa: F401
import pytest
from allocator_cases import read_text, write_text

from pyactcomp import _core
from pyactcomp.errors import PyactcompError

MIB = 1 << 20


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def fake(count: str) -> int:
    function = getattr(ctypes.CDLL("libcuda.so.1"), f"fake_{count}")
    function.restype = ctypes.c_ulonglong
    return int(function())


def opened_by_another(text: bytes, case: str = "receiver") -> str:
    """What a process that opens the text says: the number of handles, or its error."""
    done = subprocess.run([sys.executable, __file__, case], input=text, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def receiver() -> None:
    try:
        block = _core.runtime_open_shared(sys.stdin.buffer.read(), 0)
    except (PyactcompError, ValueError) as error:
        sys.stdout.write(str(error))
        return
    assert block is not None
    sys.stdout.write(str(fake("imported")))
    block.close()
    assert fake("left") == 0


def across_processes() -> None:
    allocator = _core.runtime_device(0)
    first = allocator.allocate(4 * MIB)
    assert allocator.share(first)
    allocator.free(first)
    before = descriptors()  # one is the socket, from the first share on
    addresses = [allocator.allocate(size * MIB) for size in (4, 90)]
    shared = [allocator.share(address) for address in addresses]
    assert all(shared)
    assert [opened_by_another(each[0]) for each in shared if each] == ["1", "3"]
    assert opened_by_another(b"any prefix" + shared[0][0]) == "1"  # type: ignore[index]
    # Both blocks lie in the first handle.
    assert descriptors() - before == 3
    for address in addresses:
        allocator.free(address)
    assert descriptors() == before
    assert "its descriptor is closed" in opened_by_another(shared[1][0])  # type: ignore[index]


def ended_sender() -> None:
    script = "from pyactcomp import _core; import sys; a = _core.runtime_device(0)"
    script += "; sys.stdout.buffer.write(a.share(a.allocate(1 << 22))[0])"
    text = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60).stdout
    assert _core.runtime_open_shared(text[:-1], 0) is None
    with pytest.raises(PyactcompError, match=r"no such process answers; the sender has to live"):
        _core.runtime_open_shared(text, 0)


def another_process() -> None:
    """The number of the sender is another process's by now."""
    allocator = _core.runtime_device(0)
    shared = allocator.share(allocator.allocate(4 * MIB))
    assert shared
    header, pieces, magic = read_text(shared[0])
    assert header["pid"] == os.getpid()
    text = write_text({**header, "nonce": header["nonce"] ^ 1}, pieces, magic)
    assert "no such process answers" in opened_by_another(text)


def another_user() -> None:
    if os.getuid() != 0:
        return  # only root can become another user
    allocator = _core.runtime_device(0)
    shared = allocator.share(allocator.allocate(4 * MIB))
    assert shared
    said = opened_by_another(shared[0], "receiver_of_another_user")
    assert "it serves processes of its own user; run both processes as one user" in said
    assert 'growth="malloc"' in said


def receiver_of_another_user() -> None:
    _core.runtime_device(0)
    os.setuid(65534)
    receiver()


def idle_clients() -> None:
    """Processes that connect and ask for nothing delay no receiver, and a refused user holds no descriptor here."""
    allocator = _core.runtime_device(0)
    shared = allocator.share(allocator.allocate(4 * MIB))
    assert shared
    before = descriptors()
    header, _, _ = read_text(shared[0])
    name = f"\0pyactcomp-{header['pid']}-{header['nonce']:x}"
    clients = []
    with contextlib.ExitStack() as stack:
        for sent in (b"", b"", b"", b"ab", b"ab"):  # the last are no requests
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.connect(name)
            if sent:
                client.send(sent)
            else:
                clients.append(client)
        assert opened_by_another(shared[0]) == "1"
        # A fetch that waits for other clients takes the patience after which the connection to them ends.
        for client in clients:
            client.setblocking(False)
            try:
                ended = client.recv(1) == b""
            except BlockingIOError:
                ended = False
            assert not ended
        if os.getuid() == 0:
            subprocess.run([sys.executable, __file__, "idle_client_of_another_user"], input=name.encode(), check=True)
    # One request after another ends the clients that hung up.
    assert opened_by_another(shared[0]) == "1"
    assert descriptors() == before


def idle_client_of_another_user() -> None:
    """The refusal comes at once, and the connection ends."""
    name = sys.stdin.buffer.read()
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(2)
        client.connect(name)
        assert client.recv(16) == b"\2"
        assert client.recv(16) == b""


def receiver_without_room() -> None:
    """A process that can open a socket, and nothing beside it."""
    _core.runtime_device(0)
    first = os.open("/", os.O_PATH)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + 1, first + 1))
    os.close(first)
    receiver()


def exports_alone_are_handed_over() -> None:
    allocator = _core.runtime_device(0)
    address = allocator.allocate(4 * MIB)
    shared = allocator.share(address)
    assert shared
    threads = len(list(Path("/proc/self/task").iterdir()))
    header, pieces, magic = read_text(shared[0])
    for descriptor in (0, 2, 12345):
        text = write_text(header, [{**pieces[0], "descriptor": descriptor}], magic)
        assert "its descriptor is closed" in opened_by_another(text)
    assert "raise the limit of open files" in opened_by_another(shared[0], "receiver_without_room")
    assert opened_by_another(shared[0]) == "1"
    allocator.free(address)
    assert "its descriptor is closed" in opened_by_another(shared[0])
    assert len(list(Path("/proc/self/task").iterdir())) == threads


def more_than_the_limit_of_files() -> None:
    allocator = _core.runtime_device(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    # One after another: each closes its descriptors when it is freed.
    for _ in range(100):
        address = allocator.allocate(30 * MIB)
        assert allocator.share(address)
        assert allocator.share(address)
        allocator.free(address)
    # Many at once in few handles.
    small = [allocator.allocate(64 << 10) for _ in range(1000)]
    assert all(allocator.share(address) for address in small)
    before = descriptors()
    # As many handles at once as the limit has no room for.
    held = [allocator.allocate(2 * MIB + (1 << 20)) for _ in range(300)]
    with pytest.raises(PyactcompError, match=r"too many open files.*ulimit -n"):
        all(allocator.share(address) for address in held)
    allocator.check_invariants()
    for address in held:
        allocator.free(address)
    assert descriptors() == before
    allocator.check_invariants()


def memory_that_cannot_be_shared() -> None:
    allocator = _core.runtime_device(0)
    address = allocator.allocate(4 * MIB)
    with pytest.raises(PyactcompError, match=r"no memory that other processes can open.*growth:malloc"):
        allocator.share(address)
    allocator.check_invariants()
    allocator.free(address)
    allocator.empty_cache()
    assert fake("left") == 0


def descriptors_are_closed_in_programs() -> None:
    """A program that this process starts does not keep the memory."""
    allocator = _core.runtime_device(0)
    shared = allocator.share(allocator.allocate(4 * MIB))
    assert shared
    assert not os.get_inheritable(shared[3][0])


if __name__ == "__main__":
    child_script.main(globals())
