// Several threads that allocate, hand blocks to each other and free them. Each notes what it did under tickets of a
// relaxed counter, and the notes are compared afterwards: a shared model under a lock would order the threads' calls,
// and hide races in the allocator from the thread sanitizer.
#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "allocator/caching_allocator.hpp"
#include "allocator/sharing.hpp"
#include "device/simulated_device.hpp"
#include "stress.hpp"

namespace stress {
namespace {

constexpr std::size_t kTarget = 40;

/// A block's life: after `begin` it was handed out, before `end` it was given to free.
struct Note {
  Address address;
  Bytes size;
  std::uint64_t begin;
  std::uint64_t end;
};

struct Mailbox {
  std::mutex mutex;
  std::vector<Note> notes;
};

class Threads {
 public:
  explicit Threads(const Options& options)
      : options_(options),
        setup_(setup_of(options.seed)),
        device_(std::make_shared<SimulatedDevice>(setup_.capacity, setup_.virtual_memory, setup_.asynchronous)),
        core_(std::make_shared<CachingAllocator>(device_, setup_.config)),
        receiver_(std::make_shared<SimulatedDevice>(setup_.capacity)),
        importer_(std::make_shared<Importer>(receiver_)),
        mailboxes_(options.threads),
        notes_(options.threads),
        allocations_(options.threads),
        errors_(options.threads) {}

  void run();

 private:
  void work(std::size_t self);
  void finish();
  void check_notes();

  Options options_;
  Setup setup_;
  std::shared_ptr<SimulatedDevice> device_;
  std::shared_ptr<CachingAllocator> core_;
  std::shared_ptr<SimulatedDevice> receiver_;  ///< another process's
  std::shared_ptr<Importer> importer_;
  std::atomic<std::uint64_t> ticket_{0};
  std::vector<Mailbox> mailboxes_;
  std::vector<std::vector<Note>> notes_;
  std::vector<std::int64_t> allocations_;
  std::vector<std::exception_ptr> errors_;
};

void Threads::work(std::size_t self) {
  Random random(options_.seed * 1000 + self);
  const std::array<Stream, 2> streams{2 * self, 2 * self + 1};
  const Stream most_stream = 2 * options_.threads;
  std::vector<Note> live;
  const auto next_ticket = [&] { return ticket_.fetch_add(1, std::memory_order_relaxed); };
  std::map<Address, std::shared_ptr<const Address>> opened;
  const auto free = [&](Note note) {
    opened.erase(note.address);
    note.end = next_ticket();
    core_->free(note.address);
    notes_[self].push_back(note);
  };
  const auto share = [&](Address address) {
    if (opened.erase(address) == 1) return;
    try {
      if (const auto memory = core_->share(address)) opened[address] = importer_->open(from_text(memory->text).value());
    } catch (const PauseError&) {
      std::this_thread::yield();  // between another thread's pause and resume
    }
  };
  const auto take_one = [&] {
    const std::size_t index = random.below(live.size());
    const Note note = live[index];
    live[index] = live.back();
    live.pop_back();
    opened.erase(note.address);  // another thread may free the block
    return note;
  };

  for (std::uint64_t done = 0; done < options_.operations; ++done) {
    const std::uint64_t kind = random.below(1000);
    if (kind < 480 && live.size() < 2 * kTarget) {
      const Bytes size = random.below(2) == 0 ? 512 + 1024 * random.below(16) : any_size(random, 256_MiB);
      try {
        const Address address = core_->allocate(size, streams[random.below(2)]);
        live.push_back({address, size, next_ticket(), 0});
        ++allocations_[self];
      } catch (const OutOfMemory&) {
        while (!live.empty()) free(take_one());
      } catch (const PauseError&) {
        std::this_thread::yield();
      }
    } else if (kind < 880) {
      if (!live.empty()) free(take_one());
    } else if (kind < 905) {
      if (!live.empty()) share(live[random.below(live.size())].address);
    } else if (kind < 930) {
      if (!live.empty()) core_->record_stream(live[random.below(live.size())].address, random.below(most_stream));
    } else if (kind < 960) {
      device_->complete(random.below(most_stream), 1 + random.below(8));
    } else if (kind < 975) {
      if (live.empty()) continue;
      Mailbox& other = mailboxes_[random.below(options_.threads)];
      const std::lock_guard lock(other.mutex);
      other.notes.push_back(take_one());
    } else if (kind < 990) {
      std::vector<Note> received;
      {
        const std::lock_guard lock(mailboxes_[self].mutex);
        received.swap(mailboxes_[self].notes);
      }
      for (const Note& note : received) free(note);
    } else if (kind < 994) {
      if (live.empty() || live.front().size <= 512) continue;
      require(!core_->try_free(live.front().address + 512), "an address inside a block was freed");
    } else if (kind < 995) {
      core_->empty_cache();
    } else if (kind < 996) {
      try {
        PauseOptions options;
        options.keep[0] = random.below(2) == 0;
        core_->pause(options);
        core_->resume({0});
      } catch (const PauseError&) {
        // Another thread pauses, or nothing can be paused under malloc growth.
      }
    } else if (kind < 998) {
      static_cast<void>(core_->stats());
      static_cast<void>(core_->fragmentation());
    } else if (done % options_.every == 0) {
      core_->check_invariants();
    }
  }
  while (!live.empty()) free(take_one());
}

/// No two blocks had a byte in common at the same time.
void Threads::check_notes() {
  struct Edge {
    std::uint64_t ticket;
    const Note* note;
  };
  std::vector<Edge> edges;
  for (const auto& notes : notes_) {
    for (const Note& note : notes) {
      edges.push_back({note.begin, &note});
      edges.push_back({note.end, &note});
    }
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.ticket < b.ticket; });
  std::map<Address, Bytes> live;
  for (const Edge& edge : edges) {
    const Note& note = *edge.note;
    if (edge.ticket == note.end) {
      live.erase(note.address);
      continue;
    }
    const auto after = live.lower_bound(note.address);
    require((after == live.end() || after->first - note.address >= note.size) &&
                (after == live.begin() || note.address - std::prev(after)->first >= std::prev(after)->second),
            "the block at ", note.address, " overlaps a live one, ticket ", edge.ticket);
    live.emplace(note.address, note.size);
  }
}

void Threads::finish() {
  for (std::size_t self = 0; self < options_.threads; ++self) {
    if (errors_[self]) std::rethrow_exception(errors_[self]);
    for (Note note : mailboxes_[self].notes) {
      note.end = ticket_++;
      core_->free(note.address);
      notes_[self].push_back(note);
    }
  }
  check_notes();
  core_->check_invariants();
  device_->complete_all();
  core_->empty_cache();
  core_->check_invariants();
  std::int64_t allocations = 0;
  for (const std::int64_t each : allocations_) allocations += each;
  const Stat allocation = core_->stats().allocation.all();
  require(allocation.current == 0 && allocation.allocated == allocations && allocation.freed == allocations, "of ",
          allocations, " allocations ", allocation.allocated, " were counted, ", allocation.freed, " as freed");
  require(importer_->mapped() == 0 && device_->open_exports() == 0, importer_->mapped(), " bytes are still open");
  require(device_->reserved() == 0 && device_->live_events() == 0, device_->reserved(), " bytes and ",
          device_->live_events(), " events are left");
}

void Threads::run() {
  std::vector<std::thread> threads;
  for (std::size_t self = 0; self < options_.threads; ++self) {
    threads.emplace_back([this, self] {
      try {
        work(self);
      } catch (...) {
        errors_[self] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  finish();
}

}  // namespace

void run_threads(const Options& options) {
  try {
    Threads(options).run();
  } catch (const std::exception& error) {
    throw Violation("--seed " + std::to_string(options.seed) + " --threads " + std::to_string(options.threads) + ": " +
                    error.what());
  }
}

}  // namespace stress
