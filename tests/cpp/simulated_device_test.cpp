// Contract under test: the simulated device refuses what a driver would, and a refused call changes nothing.
#include "device/simulated_device.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "common/check.hpp"

namespace {

using namespace pac::alloc;

int failures = 0;

void expect(bool holds, const char* text, int line) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "line %d: %s\n", line, text);
}
#define EXPECT(condition) expect((condition), #condition, __LINE__)

auto state(SimulatedDevice& device, const std::vector<Address>& mapped) {
  const SimulatedDevice::Calls c = device.calls();
  std::vector<Handle> handles;
  for (const Address address : mapped) handles.push_back(device.physical(address).handle);
  return std::make_tuple(std::vector{c.acquire, c.release, c.reserve, c.unreserve, c.create, c.destroy, c.map, c.unmap,
                                     c.exports, c.imports, c.record, c.query, c.wait, c.synchronize, c.synchronising},
                         device.reserved(), device.memory().free, device.live_events(), device.now(),
                         device.driver_seconds(), handles);
}

/// The call throws std::logic_error that names it, and leaves the device as it was.
void refused(SimulatedDevice& device, const std::string& name, const std::vector<Address>& mapped,
             const std::function<void()>& call, int line) {
  const auto before = state(device, mapped);
  bool named = false;
  try {
    call();
  } catch (const std::logic_error& error) {
    named = std::string(error.what()).find("simulated device: " + name + ": ") == 0;
  }
  expect(named, ("a wrong " + name + " was not refused by name").c_str(), line);
  expect(state(device, mapped) == before, ("a refused " + name + " changed the device").c_str(), line);
}
#define REFUSED_BY(device, name, mapped, ...) \
  refused(device, name, mapped, [&] { static_cast<void>(__VA_ARGS__); }, __LINE__)
#define REFUSED(name, mapped, ...) REFUSED_BY(device, name, mapped, __VA_ARGS__)

template <class Error, class Call>
bool throws(const Call& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void test_acquire() {
  SimulatedDevice device(64_MiB);
  const Address a = *device.acquire(20_MiB);
  const Address b = *device.acquire(1000);
  const Address c = *device.acquire(2_MiB);
  EXPECT(a % 2_MiB == 0 && b == a + 20_MiB && c == b + 2_MiB);
  EXPECT(device.reserved() == 22_MiB + 1000 && device.memory().free == device.memory().total - device.reserved());
  EXPECT(device.physical(a).handle != device.physical(b).handle);
  EXPECT(device.physical(a + 12_MiB).offset == 12_MiB && device.physical(a + 12_MiB).size == 8_MiB);

  REFUSED("acquire", {a}, device.acquire(0));
  REFUSED("release", {a}, device.release(a, 18_MiB));
  REFUSED("release", {a}, device.release(a + 2_MiB, 18_MiB));
  REFUSED("release", {a}, device.release(c + 2_MiB, 2_MiB));
  REFUSED("unmap", {a}, device.unmap(a, 20_MiB));
  REFUSED("physical", {a}, device.physical(b + 1000));

  EXPECT(!device.acquire(64_MiB));
  EXPECT(!device.acquire(UINT64_MAX));
  const Handle first = device.physical(a).handle;
  device.release(a, 20_MiB);
  REFUSED("release", {b}, device.release(a, 20_MiB));
  const Address small = *device.acquire(4_MiB);
  EXPECT(small == a && device.physical(small).handle != first);  // the lowest hole, and other physical memory
  EXPECT(*device.acquire(18_MiB) == c + 2_MiB);
  EXPECT(*device.acquire(16_MiB) == a + 4_MiB);
  EXPECT(device.calls().acquire == 8 && device.calls().release == 1 && device.calls().synchronising == 1);
}

/// A segment lies at the lowest hole that holds it, or where it was suggested if nothing is there.
void test_places() {
  SimulatedDevice device(1024_MiB * 64);
  const Address begin = *device.acquire(2_MiB);
  device.release(begin, 2_MiB);
  std::mt19937 random(0);
  std::map<Address, Bytes> held;
  const auto overlaps = [&](Address at, Bytes size) {
    return std::any_of(held.begin(), held.end(),
                       [&](const auto& other) { return at < other.first + other.second && other.first < at + size; });
  };
  for (int step = 0; step < 3000; ++step) {
    if (held.size() > 40 || (!held.empty() && random() % 3 == 0)) {
      const auto victim = std::next(held.begin(), static_cast<std::ptrdiff_t>(random() % held.size()));
      device.release(victim->first, victim->second);
      held.erase(victim);
      continue;
    }
    const Bytes size = 2_MiB * (1 + random() % 12);
    Address expected = begin;
    while (overlaps(expected, size)) expected += 2_MiB;
    const Address suggested = random() % 4 == 0 ? begin + 512 * (random() % 500000) : 0;
    if (suggested != 0 && !overlaps(suggested, size)) expected = suggested;
    device.suggest(suggested);
    const Address at = *device.acquire(size);
    EXPECT(at == expected);
    held[at] = size;
  }
}

void test_reserve() {
  SimulatedDevice device(64_MiB);
  const Address a = device.reserve(128_MiB);
  const Address b = device.reserve(2_MiB);
  EXPECT(a % 2_MiB == 0 && b == a + 128_MiB && device.reserved() == 0);
  EXPECT(*device.acquire(2_MiB) < a - (Bytes{1} << 44));  // far from what was reserved
  REFUSED("reserve", {}, device.reserve(0));
  REFUSED("reserve", {}, device.reserve(3_MiB));
  REFUSED("unreserve", {}, device.unreserve(a, 64_MiB));
  REFUSED("unreserve", {}, device.unreserve(a + 2_MiB, 126_MiB));
  REFUSED("unreserve", {}, device.unreserve(b + 2_MiB, 2_MiB));
  device.unreserve(a, 128_MiB);
  REFUSED("unreserve", {}, device.unreserve(a, 128_MiB));
  EXPECT(device.reserve(4_MiB) == a);

  const Bytes all = (Bytes{1} << 53) - (Bytes{1} << 50);
  EXPECT(throws<pac::DeviceError>([&] { device.reserve(all); }));
  EXPECT(throws<pac::DeviceError>([&] { device.reserve(round_down(UINT64_MAX, 2_MiB)); }));
  const Address most = device.reserve(all - 256_MiB);
  EXPECT(throws<pac::DeviceError>([&] { device.reserve(256_MiB); }));
  device.unreserve(most, all - 256_MiB);
  EXPECT(device.reserve(256_MiB) == most);
}

void test_mapping() {
  SimulatedDevice device(64_MiB);
  const Address base = device.reserve(64_MiB);
  const Handle big = *device.create(20_MiB);
  const Handle small = *device.create(2_MiB);
  EXPECT(device.reserved() == 22_MiB);
  const Address at = base + 10_MiB;
  device.map(at, 20_MiB, big);

  REFUSED("create", {at}, device.create(0));
  REFUSED("create", {at}, device.create(2_MiB + 512));
  REFUSED("map", {at}, device.map(base, 1_MiB, small));
  REFUSED("map", {at}, device.map(base + 512, 2_MiB, small));
  REFUSED("map", {at}, device.map(base, 2_MiB, big));            // part of a handle
  REFUSED("map", {at}, device.map(base, 4_MiB, small));          // more than a handle
  REFUSED("map", {at}, device.map(base, 2_MiB, small + 1));      // no handle
  REFUSED("map", {at}, device.map(base - 2_MiB, 2_MiB, small));  // not reserved
  REFUSED("map", {at}, device.map(base + 46_MiB, 20_MiB, big));  // beyond the reserved range
  REFUSED("map", {at}, device.map(at, 2_MiB, small));            // over the beginning of a mapping
  REFUSED("map", {at}, device.map(at + 10_MiB, 2_MiB, small));   // over its middle
  REFUSED("map", {at}, device.map(base, 20_MiB, big));           // reaching into it
  REFUSED("unmap", {at}, device.unmap(at, 10_MiB));
  REFUSED("unmap", {at}, device.unmap(at + 2_MiB, 18_MiB));
  REFUSED("unmap", {at}, device.unmap(base, 2_MiB));
  REFUSED("destroy", {at}, device.destroy(big, 20_MiB));  // mapped
  REFUSED("destroy", {at}, device.destroy(small, 4_MiB));
  REFUSED("destroy", {at}, device.destroy(small + 1, 2_MiB));
  REFUSED("unreserve", {at}, device.unreserve(base, 64_MiB));  // something is mapped in it
  REFUSED("release", {at}, device.release(at, 20_MiB));
  REFUSED("physical", {at}, device.physical(base));

  const Address second = base + 40_MiB;
  device.map(second, 20_MiB, big);  // the same memory at another address
  device.map(at - 2_MiB, 2_MiB, small);
  EXPECT(device.physical(at + 3_MiB).handle == big && device.physical(second + 3_MiB).handle == big);
  EXPECT(device.physical(second + 3_MiB).offset == 3_MiB && device.physical(second + 3_MiB).size == 17_MiB);
  EXPECT(device.reserved() == 22_MiB);
  device.unmap(at, 20_MiB);
  REFUSED("destroy", {second}, device.destroy(big, 20_MiB));
  device.unmap(second, 20_MiB);
  device.destroy(big, 20_MiB);
  REFUSED("destroy", {}, device.destroy(big, 20_MiB));
  REFUSED("map", {}, device.map(at, 20_MiB, big));
  REFUSED("unmap", {}, device.unmap(second, 20_MiB));
  EXPECT(device.reserved() == 2_MiB && !device.create(64_MiB));
  EXPECT(*device.create(62_MiB) > small);  // numbers are not used twice
  device.unmap(at - 2_MiB, 2_MiB);
  device.unreserve(base, 64_MiB);
  EXPECT(device.calls().synchronising == 0);
}

void test_sharing() {
  SimulatedDevice owner(64_MiB);
  SimulatedDevice importer(64_MiB);
  const Process here = this_process();
  const Handle handle = *owner.create(20_MiB);
  REFUSED_BY(owner, "export", {}, owner.export_handle(handle + 1));
  REFUSED_BY(owner, "close_export", {}, owner.close_export(-1));
  const int descriptor = owner.export_handle(handle);
  REFUSED_BY(owner, "export", {}, owner.export_handle(handle));
  REFUSED_BY(owner, "close_export", {}, owner.close_export(descriptor + 1));
  REFUSED_BY(importer, "close_export", {}, importer.close_export(descriptor));
  REFUSED_BY(owner, "destroy", {}, owner.destroy(handle, 20_MiB));  // the export is open
  REFUSED_BY(importer, "import", {}, importer.import_handle({here.pid, here.nonce + 1}, descriptor, 20_MiB));
  REFUSED_BY(importer, "import", {}, importer.import_handle(here, descriptor + 1, 20_MiB));
  REFUSED_BY(importer, "import", {}, importer.import_handle(here, descriptor, 18_MiB));
  const Handle imported = importer.import_handle(here, descriptor, 20_MiB);
  REFUSED_BY(importer, "import", {}, importer.import_handle(here, descriptor, 20_MiB));  // twice
  REFUSED_BY(importer, "export", {}, importer.export_handle(imported));
  EXPECT(importer.reserved() == 0 && owner.reserved() == 20_MiB && owner.open_exports() == 1);

  const Address mine = owner.reserve(20_MiB);
  const Address theirs = importer.reserve(22_MiB) + 2_MiB;
  owner.map(mine, 20_MiB, handle);
  REFUSED_BY(importer, "map", {}, importer.map(theirs, 2_MiB, imported));
  importer.map(theirs, 20_MiB, imported);
  EXPECT(owner.shared_memory(mine) != 0 && owner.shared_memory(mine) == importer.shared_memory(theirs));
  REFUSED_BY(importer, "destroy", {theirs}, importer.destroy(imported, 20_MiB));

  // The memory lives on in the importer.
  owner.unmap(mine, 20_MiB);
  owner.close_export(descriptor);
  REFUSED_BY(owner, "import", {}, owner.import_handle(here, descriptor, 20_MiB));  // closed
  owner.destroy(handle, 20_MiB);
  EXPECT(owner.reserved() == 0 && owner.kept_by_importers() == 20_MiB && owner.memory().free == 44_MiB);
  EXPECT(!owner.create(46_MiB));
  importer.unmap(theirs, 20_MiB);
  importer.destroy(imported, 20_MiB);
  EXPECT(owner.kept_by_importers() == 0 && owner.create(64_MiB).has_value());

  // Memory that was exported once and has no importer goes at once.
  const Handle again = *importer.create(2_MiB);
  importer.close_export(importer.export_handle(again));
  importer.destroy(again, 2_MiB);
  EXPECT(importer.memory().free == 64_MiB);
}

void test_no_virtual_memory() {
  SimulatedDevice device(64_MiB, /*virtual_memory=*/false);
  EXPECT(!device.has_virtual_memory());
  REFUSED("reserve", {}, device.reserve(2_MiB));
  REFUSED("create", {}, device.create(2_MiB));
  REFUSED("map", {}, device.map(2_MiB, 2_MiB, 1));
  REFUSED("unmap", {}, device.unmap(2_MiB, 2_MiB));
  REFUSED("destroy", {}, device.destroy(1, 2_MiB));
  REFUSED("unreserve", {}, device.unreserve(2_MiB, 2_MiB));
  EXPECT(device.acquire(2_MiB).has_value());
}

void test_events() {
  SimulatedDevice device(64_MiB);
  const Event point = device.now();
  const Event a = device.record(7);
  const Event b = device.record(7);
  const Event c = device.record(7);
  const Event other = device.record(8);
  EXPECT(device.live_events() == 4 && !device.completed(a) && !device.finished(7, point));
  device.complete(7, 0);
  EXPECT(!device.completed(a));
  device.complete(7, 1);
  EXPECT(device.completed(a) && !device.completed(b) && device.finished(7, point) && !device.finished(7, b));
  EXPECT(device.calls().synchronising == 0);
  device.wait(c);
  EXPECT(device.completed(b) && device.completed(c) && !device.completed(other) && !device.finished(8, point));
  EXPECT(device.calls().wait == 1 && device.calls().synchronising == 1);
  device.recycle(b);
  EXPECT(device.live_events() == 3);
  REFUSED("completed", {}, device.completed(b));
  REFUSED("wait", {}, device.wait(b));
  REFUSED("recycle", {}, device.recycle(b));
  REFUSED("completed", {}, device.completed(other + 1));
  REFUSED("recycle", {}, device.recycle(0));

  // The oldest that is still known completes, after one that was recycled before it did.
  const Event forgotten = device.record(8);
  const Event last = device.record(8);
  EXPECT(last > forgotten && forgotten > other);
  device.recycle(forgotten);
  device.complete(8, 2);
  EXPECT(device.completed(other) && device.completed(last));
  device.complete(8);
  device.complete(99);

  // cudaFree waits for everything, what no event marks included.
  const Event pending = device.record(8);
  const Event unmarked = device.now();
  device.release(*device.acquire(2_MiB), 2_MiB);
  EXPECT(device.completed(pending) && device.finished(8, unmarked) && device.finished(12345, unmarked));
  EXPECT(!device.finished(8, device.now()));

  const Event late = device.record(8);
  const Event later = device.now();
  device.synchronize();
  EXPECT(device.completed(late) && device.finished(8, later) && !device.finished(8, device.now()));
  EXPECT(device.calls().synchronize == 1 && device.calls().synchronising == 3);

  const Event x = device.record(1);
  const Event y = device.record(2);
  device.complete_all();
  EXPECT(device.completed(x) && device.completed(y));
  for (const Event event : {a, c, other, last, pending, late, x, y}) device.recycle(event);
  EXPECT(device.live_events() == 0 && device.record(1) > y);

  SimulatedDevice prompt(64_MiB, true, /*asynchronous=*/false);
  const Event before = prompt.now();
  EXPECT(prompt.completed(prompt.record(3)) && prompt.finished(3, before));
}

void test_failures() {
  SimulatedDevice device(64_MiB);
  EXPECT(throws<std::invalid_argument>([&] { device.fail("unmap", 1); }));
  EXPECT(throws<std::invalid_argument>([&] { SimulatedDevice(0); }));
  device.fail("acquire", 2, 1);
  EXPECT(!device.acquire(128_MiB));  // it did not succeed, so it is not the one that is skipped
  const Address a = *device.acquire(2_MiB);
  EXPECT(!device.acquire(2_MiB) && !device.acquire(2_MiB) && device.reserved() == 2_MiB);
  EXPECT(device.acquire(2_MiB) == a + 2_MiB);

  device.fail("create", 1);
  EXPECT(!device.create(2_MiB) && device.reserved() == 4_MiB);
  const Handle handle = *device.create(2_MiB);
  device.fail("reserve", 1);
  EXPECT(throws<pac::DeviceError>([&] { device.reserve(2_MiB); }));
  const Address base = device.reserve(2_MiB);
  device.fail("map", 1);
  EXPECT(throws<pac::DeviceError>([&] { device.map(base, 2_MiB, handle); }));
  REFUSED("physical", {}, device.physical(base));
  device.fail("map", 5);
  device.fail("map", 0);
  device.map(base, 2_MiB, handle);
}

void test_costs() {
  const auto us = [](SimulatedDevice& device, const auto& call) {
    const double before = device.driver_seconds();
    call();
    return (device.driver_seconds() - before) * 1e6;
  };
  const auto near = [](double a, double b) { return std::abs(a - b) < 1e-6; };  // sums of a few hundred microseconds
  SimulatedDevice device(Bytes{1} << 40);
  for (const auto& [size, expected] : {std::pair{2_MiB, 54.0}, {1024_MiB, 62.0}, {512_MiB, 54.0 + 8.0 * 8 / 9}}) {
    EXPECT(near(us(device, [&, bytes = size] { device.acquire(bytes); }), expected));
  }
  const Address base = device.reserve(4096_MiB);
  // A handle of 64 MiB costs the mean of one of 32 MiB and one of 128 MiB, and two of 512 MiB as much as one of 1 GiB.
  std::vector<double> create, map, unmap, destroy;
  for (const Bytes size : {32_MiB, 64_MiB, 128_MiB, 512_MiB, 1024_MiB}) {
    Handle handle = 0;
    create.push_back(us(device, [&] { handle = *device.create(size); }));
    map.push_back(us(device, [&] { device.map(base, size, handle); }));
    unmap.push_back(us(device, [&] { device.unmap(base, size); }));
    destroy.push_back(us(device, [&] { device.destroy(handle, size); }));
  }
  for (const auto& of : {create, map, unmap, destroy}) {
    EXPECT(near(of[1], (of[0] + of[2]) / 2) && near(of[4], 2 * of[3]));
  }
  EXPECT(near(map[0], (13.0 + 591.0) / 32) && near(destroy[2], 303.0 / 8));
  Event event = 0;
  EXPECT(near(us(device, [&] { event = device.record(0); }), 0.19));
  EXPECT(near(us(device, [&] { device.completed(event); }), 0.11));
}

}  // namespace

int main() {
  test_acquire();
  test_places();
  test_reserve();
  test_mapping();
  test_sharing();
  test_no_virtual_memory();
  test_events();
  test_failures();
  test_costs();
  return failures == 0 ? 0 : 1;
}
