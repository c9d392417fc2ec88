#include "device/descriptor_socket.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "common/check.hpp"

namespace pac::alloc {

namespace {

using Clock = std::chrono::steady_clock;

/// How long a receiver waits for the sender's process.
constexpr time_t kPatienceSeconds = 10;

/// How long the sender waits for a client that asks for nothing: a receiver asks right after it has connected, and a
/// receiver that waits because the places are taken still gets its turn in time.
constexpr std::chrono::milliseconds kClientPatience{4000};
constexpr std::size_t kMostClients = 64;

/// An abstract address: no file, and gone with its last socket.
socklen_t address_of(const Process& owner, sockaddr_un& address) {
  std::ostringstream name;
  name << "pyactcomp-" << owner.pid << '-' << std::hex << owner.nonce;
  const std::string text = name.str();
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, text.data(), text.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
}

std::string message(int error) { return std::generic_category().message(error); }

[[noreturn]] void refuse_to_share(const char* missing, int error) {
  throw DeviceError(std::string("a CUDA tensor cannot be shared: this process gets no ") + missing + ": " +
                    message(error));
}

Descriptor open_socket(int options = 0) {
  return Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | options, 0));
}

void be_patient(int socket) {
  const timeval patience{kPatienceSeconds, 0};
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

/// Whether the process at the other end is of this user, or of root.
bool is_trusted(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && (peer.uid == ::geteuid() || peer.uid == 0);
}

enum class Answer : char { kDescriptor, kClosed, kOtherUser };

/// An answer, and beside it the descriptor.
struct Envelope {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  Answer answer = Answer::kClosed;
  iovec data{&answer, sizeof answer};
  msghdr message{};

  Envelope() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
  Envelope(const Envelope&) = delete;
  Envelope& operator=(const Envelope&) = delete;
};

/// Serves all clients at once, so that a client that asks for nothing delays no other.
class Server {
 public:
  explicit Server(const Process& process) : process_(process), listener_(open_socket(SOCK_NONBLOCK)) {
    clients_.reserve(kMostClients);  // the thread allocates nothing, so nothing there can fail
    polled_.reserve(kMostClients + 1);
    sockaddr_un address;
    const socklen_t size = address_of(process, address);
    if (listener_.number() < 0 || ::bind(listener_.number(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
        ::listen(listener_.number(), SOMAXCONN) != 0) {
      refuse_to_share("socket", errno);
    }
  }

  const Process& process() const { return process_; }

  /// The program's signals go to its own threads.
  void start() {
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    try {
      std::thread([this] { serve(); }).detach();
    } catch (const std::system_error& refused) {
      error = refused.code().value();
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error != 0) refuse_to_share("thread", error);
  }

  void offer(int descriptor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    offered_.insert(descriptor);
  }

  void withdraw(int descriptor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    offered_.erase(descriptor);
  }

 private:
  struct Client {
    Descriptor socket;
    Clock::time_point until;
  };

  void serve() {
    while (true) {
      wait();
      const auto now = Clock::now();
      const bool asked = polled_.front().revents != 0;
      // From the last: a client that is removed gives its place to one that was seen already.
      for (std::size_t i = clients_.size(); i-- > 0;) {
        if (polled_[i + 1].revents != 0 ? serve(clients_[i].socket.number()) : clients_[i].until <= now) {
          std::swap(clients_[i], clients_.back());
          clients_.pop_back();
        }
      }
      if (asked) accept(now);
    }
  }

  /// Until a client connects, asks or has had its time.
  void wait() {
    const auto now = Clock::now();
    const bool accepts = clients_.size() < kMostClients && now >= accepts_from_;
    auto until = clients_.size() < kMostClients && !accepts ? accepts_from_ : Clock::time_point::max();
    polled_.assign(1, {accepts ? listener_.number() : -1, POLLIN, 0});
    for (const Client& client : clients_) {
      polled_.push_back({client.socket.number(), POLLIN, 0});
      until = std::min(until, client.until);
    }
    int timeout = -1;
    if (until != Clock::time_point::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - now).count();
      timeout = static_cast<int>(std::max<std::chrono::milliseconds::rep>(left, 0));
    }
    if (::poll(polled_.data(), polled_.size(), timeout) < 0) {
      for (pollfd& each : polled_) each.revents = 0;  // out of memory, or a debugger's signal: look again
    }
  }

  void accept(Clock::time_point now) {
    Descriptor socket(::accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.number() < 0) {
      // No descriptor may be left for the client; others give theirs back meanwhile.
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
        accepts_from_ = now + std::chrono::seconds(1);
      return;
    }
    if (is_trusted(socket.number())) {
      clients_.push_back({std::move(socket), now + kClientPatience});
    } else {
      Envelope envelope;
      envelope.answer = Answer::kOtherUser;
      send(socket.number(), envelope);
    }
  }

  /// Whether the client is done with: it has its answer, or ended, or sent no request.
  bool serve(int client) {
    std::int32_t wanted = -1;
    const auto received = ::recv(client, &wanted, sizeof wanted, 0);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (received == sizeof wanted) answer(client, wanted);
    return true;
  }

  static void send(int client, Envelope& envelope) {
    if (envelope.answer != Answer::kDescriptor) envelope.message.msg_controllen = 0;
    ::sendmsg(client, &envelope.message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  void answer(int client, int wanted) {
    Envelope envelope;
    // Under the lock, so that the descriptor is not closed, and another opened with its number, before it is sent.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (offered_.count(wanted) > 0) {
      envelope.answer = Answer::kDescriptor;
      cmsghdr* const header = CMSG_FIRSTHDR(&envelope.message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &wanted, sizeof wanted);
    }
    send(client, envelope);
  }

  const Process process_;
  const Descriptor listener_;
  std::vector<Client> clients_;       ///< of the thread alone, as the next two
  std::vector<pollfd> polled_;        ///< the listener, then the clients
  Clock::time_point accepts_from_{};  ///< no client is accepted before
  std::mutex mutex_;
  std::set<int> offered_;
};

/// The server of this process, not of the one it was forked from. Never destroyed: the thread runs until the end.
Server& server() {
  static std::mutex mutex;
  static Server* current = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  const Process process = this_process();
  if (current == nullptr || current->process().pid != process.pid) {
    auto server = std::make_unique<Server>(process);
    server->start();
    current = server.release();
  }
  return *current;
}

[[noreturn]] void refuse(const Process& owner, const std::string& reason, const std::string& remedy) {
  throw DeviceError("a CUDA tensor of process " + std::to_string(owner.pid) + " cannot be opened here: " + reason +
                    "; " + remedy);
}

/// After a call that failed or was not answered.
[[noreturn]] void refuse(const Process& owner, int error) {
  if (error == EMFILE || error == ENFILE) refuse(owner, message(error), "raise the limit of open files (ulimit -n)");
  if (error == ECONNREFUSED) {
    refuse(owner, "no such process answers",
           "the sender has to live until the tensor is opened, and containers have to share their network namespace "
           "(--network)");
  }
  refuse(owner, message(error), "the sender's process hangs, or the kernel forbids sockets between the two");
}

}  // namespace

void offer(int descriptor) { server().offer(descriptor); }

void withdraw(int descriptor) { server().withdraw(descriptor); }

Descriptor fetch_descriptor(const Process& owner, int number) {
  const Descriptor socket = open_socket();
  if (socket.number() < 0) refuse(owner, errno);
  be_patient(socket.number());
  sockaddr_un address;
  const socklen_t size = address_of(owner, address);
  if (::connect(socket.number(), reinterpret_cast<const sockaddr*>(&address), size) != 0) refuse(owner, errno);
  const std::string user =
      "run both processes as one user; or enable the allocator with growth=\"malloc\" in the "
      "process that sends";
  if (!is_trusted(socket.number())) refuse(owner, "it belongs to another user", user);
  const std::int32_t wanted = number;
  // The owner answers another user at once and closes: the request may find no reader, and the answer is there.
  if (::send(socket.number(), &wanted, sizeof wanted, MSG_NOSIGNAL) != sizeof wanted && errno != EPIPE &&
      errno != ECONNRESET) {
    refuse(owner, errno);
  }
  Envelope envelope;
  auto received = ::recvmsg(socket.number(), &envelope.message, MSG_CMSG_CLOEXEC);
  if (received < 0 && errno == ECONNRESET) {  // reported once, before the answer
    received = ::recvmsg(socket.number(), &envelope.message, MSG_CMSG_CLOEXEC);
  }
  if (received <= 0) refuse(owner, received < 0 ? errno : ECONNREFUSED);  // 0: its owner has ended
  if (envelope.answer == Answer::kOtherUser) refuse(owner, "it serves processes of its own user", user);
  if (envelope.answer == Answer::kClosed) {
    refuse(owner, "its descriptor is closed", "the sender has to keep the tensor until the receiver has opened it");
  }
  const cmsghdr* const header = CMSG_FIRSTHDR(&envelope.message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(int))) {
    refuse(owner, EMFILE);  // the kernel drops a descriptor that this process has no room for
  }
  int copy = -1;
  std::memcpy(&copy, CMSG_DATA(header), sizeof copy);
  return Descriptor(copy);
}

}  // namespace pac::alloc
