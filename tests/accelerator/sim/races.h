// What happens before what, by vector clocks.
//
//     stream 0   write x (0:1) ── record e ─────────────────────── write x (0:2)   a race: nobody
//     stream 1                        `── wait e ── read x (1:1)                   waits for 1:1
//
// Every stream counts what it is given to do, and keeps a clock: how far each stream was in what
// it has waited for, directly or not. (s:n) happens before what stream t does next if t's clock has
// at least n for s. An event takes the clock of its stream along; whoever waits for it joins that to
// its own. Each thread of the host has a clock too, of what it has waited for: what the thread gives
// to any stream from then on comes after that. A thread learns what another one has waited for only
// from what that one hands to it (``threads.py``). The threads of the autograd engine that work at
// one backward share what they learn there.
//
// The idea is that of vector clocks (Mattern, "Virtual time and global states of distributed
// systems", 1989), as in torch.cuda._sanitizer.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>; // by the number of a stream; what is beyond its end is 0

struct Access {
  int stream;
  uint64_t time;
  std::string what; // the operator, and where it was called
  bool is_write;
  bool of_freed; // of a block whose memory another one may have been given
};

struct Piece;

// Memory that a tensor has, as the caching allocator hands it out: it belongs to the stream that was
// current when it was allocated. Freed, it is given out again at once to what is done there next.
struct Block {
  c10::Device device;
  int stream;
  size_t bytes;
  std::shared_ptr<void> memory;
  Piece* piece; // of the device's memory (memory.h)
  std::vector<Access> accesses{}; // the last write, and all reads since, one a stream
  std::vector<int> recorded{}; // streams that the allocator waits for when it is freed
};

struct Use {
  Block* block;
  bool is_write;
};

class Detector {
 public:
  int number(c10::Stream stream);

  // A stream does something with these blocks.
  void act(c10::Stream stream, const std::string& what, const std::vector<Use>& uses);
  // It writes to blocks that nobody else has yet.
  void made(c10::Stream stream, const std::string& what, const std::vector<Block*>& blocks);

  void allocated(Block& block);
  // Returns the streams that the allocator has to wait for.
  std::vector<c10::Stream> freed(Block& block);
  void record_stream(Block& block, c10::Stream stream);

  Clock record(c10::Stream stream);
  void wait(c10::Stream stream, const Clock& event);
  void host_waits(const Clock& event);
  void host_waits(c10::Stream stream);
  void host_waits(c10::DeviceIndex device);
  // Whether the host has waited for all that a clock says.
  bool host_knows(const Clock& event);
  // Whether what the stream is given next comes after all that a clock says.
  bool stream_knows(c10::Stream stream, const Clock& event);

  // What this thread has waited for. It is handed to other threads, who learn it (host_waits).
  Clock host();
  // What the engine's threads knew at the end of a backward, which has the number of its graph task.
  Clock backward_ended(int task);

  void report(std::string text);
  std::vector<std::string> reports();
  void clear();
  void keep_stacks(bool whether);

  static Detector& get();

 private:
  Clock& of(int stream);
  Clock& host_locked();
  void host_learns(const Clock& event);
  std::string described(const std::string& what);
  int number_locked(c10::Stream stream);
  void check(const Block& block, int stream, const std::string& what, bool is_write);
  void forget(int owner, const Access& told);
  static void remember(Block& block, Access access);

  std::mutex mutex_;
  std::unordered_map<c10::Stream, int> numbers_;
  std::vector<c10::Stream> streams_;
  std::vector<Clock> clocks_; // of the streams
  std::unordered_map<int, Clock> tasks_; // by graph task: what its threads have learnt
  // By the stream that they belong to: what is still done with memory that is free again.
  std::unordered_map<int, std::vector<Access>> freed_;
  std::vector<std::string> reports_;
  std::atomic<bool> keeps_stacks_{false};
};

} // namespace sim
