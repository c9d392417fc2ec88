// File descriptors handed to other processes over a socket. The kernel's own way, pidfd_getfd, needs the right to trace
// the owner: a child lacks it under Yama's default, and every process in Docker's. The socket and its thread begin
// with the first offer.
#pragma once

#include "device/process.hpp"

namespace pac::alloc {

/// Lets processes of the same user fetch a descriptor of this process, until withdraw() or the end of the process.
/// Throws DeviceError where the system gives no socket or thread.
void offer(int descriptor);
void withdraw(int descriptor);

/// A copy of a descriptor that its owner offers. Throws DeviceError, naming cause and remedy.
Descriptor fetch_descriptor(const Process& owner, int number);

}  // namespace pac::alloc
