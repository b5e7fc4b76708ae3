// Virtual time: when each stream would be done with what it has been given.
//
//     host thread    ─ launch ─ launch ─ launch ──────────────────  runs ahead of the streams
//     stream 0            [ matmul ][ record e ]
//     stream 1                      `── wait e ──[ add ]            starts when e has come
//     link 0 -> 1                                      [ copy ]     one copy at a time
//
// All is computed at once; the clocks say how long it would have taken. An operator begins when its
// stream is free and the host has launched it. An event takes the time of its stream along, and who
// waits for it goes on no earlier. A copy between devices takes its link for as long as its bytes
// need. Every host thread has a clock of its own, and threads that hand work to each other hand
// the time over too (``Clocks::host_joins``), so that the makespan does not depend on which of them
// happened to run first. What threads do at the same time is told apart by steps, which each thread
// counts, and which are handed over with the time (Lamport, "Time, clocks, and the ordering of events
// in a distributed system", 1978): so all that allocates has an order that is the same in every run.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <compare>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sim {

// When a thread of the host is: the earlier time comes first, and then the smaller step.
struct Moment {
  double time = 0;
  int64_t step = 0;
  auto operator<=>(const Moment&) const = default;
};

// One thing that a stream did, and when.
struct Span {
  c10::Stream stream;
  std::string what;
  double start;
  double end;
};

// How fast devices and links are. An operator takes the longer of its FLOPs over the rate and its
// bytes over the bandwidth (the roofline), and the launch at the least.
struct Speed {
  double flops_per_s = 0; // 0: it takes no time
  double bytes_per_s = 0;
  double kernel_s = 0; // what every operator takes at least
  double launch_s = 0; // what every operator costs the host thread
  double link_bytes_per_s = 0; // between devices, and to and from the host, each way
  double link_latency_s = 0;
};

class Clocks {
 public:
  // From now on time is counted, from zero.
  void start(const Speed& speed);
  void stop();
  bool are_on() const { return on_; }
  int run() const { return run_; }
  const Speed& speed() const { return speed_; }

  // An operator of this thread on a stream.
  void operates(c10::Stream stream, const std::string& what, double seconds);
  // A copy on a stream, by way of a link between two devices; -1 is the host.
  void copies(c10::Stream stream, int source, int target, const std::string& what, double bytes);

  double recorded(c10::Stream stream);
  void waits(c10::Stream stream, double event);
  // This thread waits for what a stream has been given, or for an event.
  void host_waits(c10::Stream stream);
  void host_waits(c10::DeviceIndex device);
  void host_waits(double event);

  // When this thread is, and the moment that another one has handed over to it.
  Moment host();
  void host_joins(Moment other);
  // This thread does something whose order counts.
  Moment step();
  // A backward that is called for now begins on a device: the engine's thread there takes over.
  void backward_begins(int device);
  // How far the engine's threads were in a backward, which has the number of its graph task.
  Moment backward_ended(int task);

  double makespan();
  std::vector<Span> spans();

  static Clocks& get();

 private:
  double& of(c10::Stream stream);
  Moment& host_now();
  void goes_on(Moment other);
  double launched(c10::Stream stream);

  std::mutex mutex_;
  std::atomic<bool> on_{false};
  std::atomic<int> run_{0}; // how often time has begun
  Speed speed_;
  std::unordered_map<c10::Stream, double> streams_;
  std::map<std::pair<int, int>, double> links_;
  std::unordered_map<int, Moment> begun_; // by device: when its last backward was called for
  std::unordered_map<int, Moment> tasks_; // by graph task: how far the engine's threads are with it
  std::vector<Span> spans_;
};

} // namespace sim
