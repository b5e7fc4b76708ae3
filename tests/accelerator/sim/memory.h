// Which memory a device would have given to whom, as CUDA's caching allocator does it.
//
//     segment of stream 0   [ piece ][ piece: free ][ piece ]      asked of the device once, kept
//     segment of stream 1   [ piece: freed, but stream 0 may still read it ][ free ]
//
// A segment belongs to the stream that was current when it was needed. A request takes the smallest
// free piece of its stream that is large enough, and splits it; a piece that is freed joins its free
// neighbours, and what its stream is given next may have it at once. But a piece that another stream
// uses (record_stream) is free again only when an event that was recorded there, when the piece was
// freed, has come: a request looks for such events first, and what it finds depends on how far the
// host thread has run ahead of the stream. Sizes and rules are those of
// c10/cuda/CUDACachingAllocator.cpp. The data itself is in the host's memory, elsewhere.
//
// While time is counted, the most that was allocated is that of virtual time: all requests and
// releases are put in the order of their moments (clocks.h) before they are summed. So it does not
// depend on which thread of the host happened to run first, and is the same in every run.
#pragma once

#include "clocks.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <compare>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace sim {

using Statistics = c10::CachingDeviceAllocator::DeviceStats;

struct Piece {
  c10::Stream stream;
  size_t address; // within all segments of all devices
  size_t size;
  size_t requested = 0;
  Moment taken{};
  bool is_small = false; // of a segment for small ones
  bool is_free = true;
  Piece* before = nullptr; // neighbours in the segment
  Piece* after = nullptr;
};

class Memory {
 public:
  // A piece for a stream. Its device is asked for a segment if no free piece is large enough.
  Piece* take(c10::Stream stream, size_t bytes);
  // It is free when all these streams have done what they have been given so far.
  void give_back(Piece* piece, const std::vector<c10::Stream>& users);
  // All that has been freed is free: the clocks begin anew, or end.
  void settle();
  // Segments that are free as a whole go back to their device.
  void empty_cache();

  Statistics statistics(c10::DeviceIndex device);
  void reset_peak(c10::DeviceIndex device);
  void reset_accumulated(c10::DeviceIndex device);

  static Memory& get();

 private:
  struct SmallestFirst {
    bool operator()(const Piece* one, const Piece* other) const;
  };
  struct Waiting {
    Piece* piece;
    std::vector<double> events; // when they come, in virtual time
  };
  struct Change { // of what is allocated
    Moment moment;
    int64_t bytes;
    auto operator<=>(const Change&) const = default; // at the same moment releases come first
  };
  using Pool = std::set<Piece*, SmallestFirst>; // of free pieces

  Statistics& of(c10::DeviceIndex device);
  void changes(c10::DeviceIndex device, int64_t bytes, Moment moment);
  int64_t most_allocated(c10::DeviceIndex device);
  void conclude(c10::DeviceIndex device);
  Pool& pool(const Piece& piece);
  Piece* segment(c10::Stream stream, size_t rounded);
  void split(Piece& piece, size_t rounded);
  void look_for_events(bool all_have_come = false);
  void free(Piece* piece);
  void join(Piece& piece, Piece* neighbour);

  std::mutex mutex_;
  std::map<c10::DeviceIndex, Statistics> statistics_;
  std::map<c10::DeviceIndex, std::vector<Change>> changes_; // since time began, or the last peak
  std::map<std::pair<c10::DeviceIndex, bool>, Pool> pools_;
  std::vector<Waiting> waiting_;
  size_t end_ = 0; // of all addresses
};

} // namespace sim
