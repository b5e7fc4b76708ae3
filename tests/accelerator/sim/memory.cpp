#include "memory.h"
#include "clocks.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <tuple>

namespace sim {
namespace {

constexpr size_t MIB = 1024 * 1024;
constexpr size_t SMALLEST = 512; // all sizes are multiples of it
constexpr size_t SMALL = MIB; // up to it, a request is small
constexpr size_t SMALL_SEGMENT = 2 * MIB;
constexpr size_t LARGE_SEGMENT = 20 * MIB; // for requests below LARGE
constexpr size_t LARGE = 10 * MIB; // from it on, a request gets a segment of its own size
constexpr size_t ROUND_LARGE = 2 * MIB;

size_t up(size_t size, size_t to) {
  return (size + to - 1) / to * to;
}

} // namespace

Memory& Memory::get() {
  static auto* memory = new Memory(); // until the process has ended
  return *memory;
}

bool Memory::SmallestFirst::operator()(const Piece* one, const Piece* other) const {
  const auto key = [](const Piece* of) {
    return std::make_tuple(of->stream.id(), of->size, of->address);
  };
  return key(one) < key(other);
}

Statistics& Memory::of(c10::DeviceIndex device) {
  return statistics_[device];
}

void Memory::changes(c10::DeviceIndex device, int64_t bytes, Moment moment) {
  auto& counted = of(device).allocated_bytes[0];
  if (!Clocks::get().are_on()) {
    if (bytes > 0) {
      counted.increase(bytes);
    } else {
      counted.decrease(-bytes);
    }
    return;
  }
  counted.current += bytes;
  (bytes > 0 ? counted.allocated : counted.freed) += std::abs(bytes);
  changes_[device].push_back({moment, bytes});
}

int64_t Memory::most_allocated(c10::DeviceIndex device) {
  const auto& counted = of(device).allocated_bytes[0];
  auto& changes = changes_[device];
  std::sort(changes.begin(), changes.end());
  int64_t now = counted.current;
  for (const auto& each : changes) now -= each.bytes;
  int64_t most = std::max(counted.peak, now);
  for (const auto& each : changes) most = std::max(most, now += each.bytes);
  return most;
}

// What is known of the peak so far is kept, and what comes next is counted from there.
void Memory::conclude(c10::DeviceIndex device) {
  of(device).allocated_bytes[0].peak = most_allocated(device);
  changes_[device].clear();
}

Memory::Pool& Memory::pool(const Piece& piece) {
  return pools_[{piece.stream.device_index(), piece.is_small}];
}

Piece* Memory::take(c10::Stream stream, size_t bytes) {
  std::lock_guard lock(mutex_);
  look_for_events();
  const size_t rounded = up(std::max(bytes, SMALLEST), SMALLEST);
  Piece wanted{stream, 0, rounded};
  wanted.is_small = rounded <= SMALL;
  auto& free_ones = pool(wanted);
  const auto found = free_ones.lower_bound(&wanted);
  Piece* piece = nullptr;
  if (found != free_ones.end() && (*found)->stream == stream) {
    piece = *found;
    free_ones.erase(found);
  } else {
    piece = segment(stream, rounded);
  }
  split(*piece, rounded);
  piece->is_free = false;
  piece->requested = bytes;
  piece->taken = Clocks::get().step();
  changes(stream.device_index(), piece->size, piece->taken);
  auto& counts = of(stream.device_index());
  counts.allocation[0].increase(1);
  counts.active_bytes[0].increase(piece->size);
  counts.requested_bytes[0].increase(bytes);
  return piece;
}

Piece* Memory::segment(c10::Stream stream, size_t rounded) {
  const size_t size = rounded <= SMALL ? SMALL_SEGMENT
      : rounded < LARGE               ? LARGE_SEGMENT
                                      : up(rounded, ROUND_LARGE);
  auto* piece = new Piece{stream, end_, size};
  piece->is_small = rounded <= SMALL;
  end_ += size;
  of(stream.device_index()).segment[0].increase(1);
  of(stream.device_index()).reserved_bytes[0].increase(size);
  return piece;
}

void Memory::split(Piece& piece, size_t rounded) {
  const size_t rest = piece.size - rounded;
  if (piece.is_small ? rest < SMALLEST : rest <= SMALL) return;
  auto* other = new Piece{piece.stream, piece.address + rounded, rest};
  other->is_small = piece.is_small;
  other->before = &piece;
  other->after = piece.after;
  if (piece.after) piece.after->before = other;
  piece.after = other;
  piece.size = rounded;
  pool(*other).insert(other);
}

void Memory::give_back(Piece* piece, const std::vector<c10::Stream>& users) {
  std::lock_guard lock(mutex_);
  // A thread that has it from another one by way of nothing that hands time over comes later, too.
  const auto moment = std::max(Clocks::get().step(), piece->taken);
  changes(piece->stream.device_index(), -static_cast<int64_t>(piece->size), moment);
  auto& counts = of(piece->stream.device_index());
  counts.allocation[0].decrease(1);
  counts.requested_bytes[0].decrease(piece->requested);
  auto& clocks = Clocks::get();
  std::vector<double> events;
  for (const auto& user : users) {
    if (clocks.are_on() && user != piece->stream) events.push_back(clocks.recorded(user));
  }
  if (events.empty()) {
    free(piece);
  } else {
    waiting_.push_back({piece, std::move(events)});
  }
}

// Without clocks all is done at once.
void Memory::look_for_events(bool all_have_come) {
  auto& clocks = Clocks::get();
  const bool is_timed = clocks.are_on() && !all_have_come;
  const double now = is_timed ? clocks.host().time : 0;
  const auto has_come = [&](const Waiting& each) {
    return !is_timed || std::all_of(each.events.begin(), each.events.end(), [&](double event) {
      return event <= now;
    });
  };
  const auto still = std::stable_partition(
      waiting_.begin(), waiting_.end(), [&](const Waiting& each) { return !has_come(each); });
  for (auto each = still; each != waiting_.end(); ++each) free(each->piece);
  waiting_.erase(still, waiting_.end());
}

void Memory::free(Piece* piece) {
  of(piece->stream.device_index()).active_bytes[0].decrease(piece->size);
  piece->is_free = true;
  join(*piece, piece->before);
  join(*piece, piece->after);
  pool(*piece).insert(piece);
}

// The piece takes a free neighbour in.
void Memory::join(Piece& piece, Piece* neighbour) {
  if (neighbour == nullptr || !neighbour->is_free) return;
  pool(*neighbour).erase(neighbour);
  if (neighbour == piece.before) {
    piece.address = neighbour->address;
    piece.before = neighbour->before;
    if (piece.before) piece.before->after = &piece;
  } else {
    piece.after = neighbour->after;
    if (piece.after) piece.after->before = &piece;
  }
  piece.size += neighbour->size;
  delete neighbour;
}

void Memory::settle() {
  std::lock_guard lock(mutex_);
  look_for_events(true);
  for (const auto& [device, _] : statistics_) conclude(device);
}

void Memory::empty_cache() {
  std::lock_guard lock(mutex_);
  look_for_events();
  for (auto& [_, free_ones] : pools_) {
    for (auto each = free_ones.begin(); each != free_ones.end();) {
      auto* piece = *each;
      if (piece->before || piece->after) {
        ++each;
        continue;
      }
      auto& counts = of(piece->stream.device_index());
      counts.segment[0].decrease(1);
      counts.reserved_bytes[0].decrease(piece->size);
      each = free_ones.erase(each);
      delete piece;
    }
  }
}

Statistics Memory::statistics(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  look_for_events();
  auto counts = of(device);
  counts.allocated_bytes[0].peak = most_allocated(device);
  return counts;
}

void Memory::reset_peak(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  look_for_events();
  conclude(device);
  auto& counts = of(device);
  for (auto* each : {&counts.allocated_bytes, &counts.active_bytes, &counts.reserved_bytes,
                     &counts.requested_bytes, &counts.allocation, &counts.segment}) {
    (*each)[0].reset_peak();
  }
}

void Memory::reset_accumulated(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  auto& counts = of(device);
  for (auto* each : {&counts.allocated_bytes, &counts.active_bytes, &counts.reserved_bytes,
                     &counts.requested_bytes, &counts.allocation, &counts.segment}) {
    (*each)[0].reset_accumulated();
  }
}

} // namespace sim
