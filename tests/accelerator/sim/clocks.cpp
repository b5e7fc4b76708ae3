#include "clocks.h"
#include "device.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace sim {
namespace {

// The clock of a thread, which is zero again where time has begun anew since.
struct Host {
  int run = 0;
  Moment now;
};

thread_local Host host_here;

// The first moment that comes after both.
void join(Moment& one, const Moment& other) {
  one = {std::max(one.time, other.time), std::max(one.step, other.step)};
}

int graph_task() {
  return torch::autograd::get_current_graph_task_id(); // -1 outside of a backward
}

} // namespace

Clocks& Clocks::get() {
  static auto* clocks = new Clocks();
  return *clocks;
}

void Clocks::start(const Speed& speed) {
  std::lock_guard lock(mutex_);
  speed_ = speed;
  streams_.clear();
  links_.clear();
  begun_.clear();
  spans_.clear();
  tasks_.clear();
  ++run_;
  on_ = true;
}

void Clocks::stop() {
  std::lock_guard lock(mutex_);
  on_ = false;
}

Moment& Clocks::host_now() {
  if (host_here.run != run_) host_here = {run_, {}};
  return host_here.now;
}

double& Clocks::of(c10::Stream stream) {
  return streams_.try_emplace(stream, 0).first->second;
}

// When the host has launched what it now gives to a stream.
double Clocks::launched(c10::Stream stream) {
  Moment& now = host_now();
  if (graph_task() != -1) join(now, begun_[stream.device_index()]);
  goes_on({now.time + speed_.launch_s, now.step});
  return now.time;
}

// This thread is at least so far, and so is the backward that it works at.
void Clocks::goes_on(Moment other) {
  Moment& now = host_now();
  join(now, other);
  const int task = graph_task();
  if (task != -1) join(tasks_[task], now);
}

void Clocks::operates(c10::Stream stream, const std::string& what, double seconds) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  const double start = std::max(of(stream), launched(stream));
  of(stream) = start + std::max(seconds, speed_.kernel_s);
  if (of(stream) > start) spans_.push_back({stream, what, start, of(stream)});
}

void Clocks::copies(
    c10::Stream stream, int source, int target, const std::string& what, double bytes) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  double seconds = speed_.link_latency_s;
  if (speed_.link_bytes_per_s > 0) seconds += bytes / speed_.link_bytes_per_s;
  double& link = links_[{source, target}];
  const double start = std::max({of(stream), link, launched(stream)});
  of(stream) = link = start + seconds;
  if (seconds > 0) spans_.push_back({stream, what, start, of(stream)});
}

double Clocks::recorded(c10::Stream stream) {
  if (!on_) return 0;
  std::lock_guard lock(mutex_);
  return std::max(of(stream), host_now().time);
}

void Clocks::waits(c10::Stream stream, double event) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  of(stream) = std::max(of(stream), event);
}

void Clocks::host_waits(c10::Stream stream) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  goes_on({of(stream)});
}

void Clocks::host_waits(c10::DeviceIndex device) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  for (const auto& [stream, time] : streams_) {
    if (stream.device_index() == device) goes_on({time});
  }
}

void Clocks::host_waits(double event) {
  host_joins({event});
}

Moment Clocks::host() {
  std::lock_guard lock(mutex_);
  Moment& now = host_now();
  if (graph_task() != -1) join(now, begun_[current_device().index()]);
  return now;
}

Moment Clocks::step() {
  const Moment before = host();
  const Moment now{before.time, before.step + 1};
  std::lock_guard lock(mutex_);
  goes_on(now);
  return now;
}

void Clocks::host_joins(Moment other) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  goes_on(other);
}

void Clocks::backward_begins(int device) {
  std::lock_guard lock(mutex_);
  begun_[device] = host_now();
}

Moment Clocks::backward_ended(int task) {
  std::lock_guard lock(mutex_);
  return tasks_[task];
}

double Clocks::makespan() {
  std::lock_guard lock(mutex_);
  double last = host_now().time;
  for (const auto& [stream, time] : streams_) last = std::max(last, time);
  return last;
}

std::vector<Span> Clocks::spans() {
  std::lock_guard lock(mutex_);
  return spans_;
}

} // namespace sim
