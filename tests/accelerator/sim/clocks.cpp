#include "clocks.h"
#include "device.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace sim {
namespace {

// The clock of a thread, which is zero again where time has begun anew since.
struct Host {
  int run = 0;
  double now = 0;
};

thread_local Host host_here;

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

double& Clocks::host_now() {
  if (host_here.run != run_) host_here = {run_, 0};
  return host_here.now;
}

double& Clocks::of(c10::Stream stream) {
  return streams_.try_emplace(stream, 0).first->second;
}

// When the host has launched what it now gives to a stream.
double Clocks::launched(c10::Stream stream) {
  double& now = host_now();
  if (graph_task() != -1) now = std::max(now, begun_[stream.device_index()]);
  goes_on(now + speed_.launch_s);
  return now;
}

// This thread is at least so far, and so is the backward that it works at.
void Clocks::goes_on(double time) {
  double& now = host_now();
  now = std::max(now, time);
  const int task = graph_task();
  if (task != -1) tasks_[task] = std::max(tasks_[task], now);
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
  return std::max(of(stream), host_now());
}

void Clocks::waits(c10::Stream stream, double event) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  of(stream) = std::max(of(stream), event);
}

void Clocks::host_waits(c10::Stream stream) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  goes_on(of(stream));
}

void Clocks::host_waits(c10::DeviceIndex device) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  for (const auto& [stream, time] : streams_) {
    if (stream.device_index() == device) goes_on(time);
  }
}

void Clocks::host_waits(double event) {
  host_joins(event);
}

double Clocks::host() {
  std::lock_guard lock(mutex_);
  double& now = host_now();
  if (graph_task() != -1) now = std::max(now, begun_[current_device().index()]);
  return now;
}

void Clocks::host_joins(double time) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  goes_on(time);
}

void Clocks::backward_begins(int device) {
  std::lock_guard lock(mutex_);
  begun_[device] = host_now();
}

double Clocks::backward_ended(int task) {
  std::lock_guard lock(mutex_);
  return tasks_[task];
}

double Clocks::makespan() {
  std::lock_guard lock(mutex_);
  double last = host_now();
  for (const auto& [stream, time] : streams_) last = std::max(last, time);
  return last;
}

std::vector<Span> Clocks::spans() {
  std::lock_guard lock(mutex_);
  return spans_;
}

} // namespace sim
