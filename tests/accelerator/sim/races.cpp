#include "races.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <sstream>

namespace sim {
namespace {

thread_local Clock host_here; // what this thread has waited for

int graph_task() {
  return torch::autograd::get_current_graph_task_id(); // -1 outside of a backward
}

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

bool knows(const Clock& clock, int stream, uint64_t time) {
  return static_cast<size_t>(stream) < clock.size() && clock[stream] >= time;
}

std::string name(c10::Stream stream) {
  std::ostringstream out;
  out << "sim:" << static_cast<int>(stream.device_index()) << " stream " << stream.id();
  return out.str();
}

// The Python frames of this thread, innermost first. None where that is no thread of Python's.
std::string stack() {
  auto trace = torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
  auto symbols = torch::symbolize({trace.get()});
  std::ostringstream out;
  for (auto index : symbols.tracebacks.at(0)) {
    const auto& frame = symbols.all_frames[index];
    out << "\n    " << frame.filename << ":" << frame.lineno << " in " << frame.funcname;
  }
  return out.str();
}

} // namespace

Detector& Detector::get() {
  static auto* detector = new Detector(); // never destroyed: blocks are freed to the very end
  return *detector;
}

int Detector::number(c10::Stream stream) {
  std::lock_guard lock(mutex_);
  return number_locked(stream);
}

int Detector::number_locked(c10::Stream stream) {
  auto [found, is_new] = numbers_.try_emplace(stream, static_cast<int>(streams_.size()));
  if (is_new) {
    streams_.push_back(stream);
    clocks_.emplace_back();
  }
  return found->second;
}

// What this thread knows; in a backward also what the engine's other threads there have learnt.
Clock& Detector::host_locked() {
  if (const int task = graph_task(); task != -1) join(host_here, tasks_[task]);
  return host_here;
}

void Detector::host_learns(const Clock& event) {
  join(host_locked(), event);
  if (const int task = graph_task(); task != -1) join(tasks_[task], event);
}

// What a stream is given now comes after what this thread of the host has waited for.
Clock& Detector::of(int stream) {
  Clock& clock = clocks_[stream];
  join(clock, host_locked());
  if (clock.size() <= static_cast<size_t>(stream)) clock.resize(stream + 1);
  return clock;
}

std::string Detector::described(const std::string& what) {
  return keeps_stacks_ ? what + stack() : what;
}

void Detector::act(c10::Stream on, const std::string& what, const std::vector<Use>& uses) {
  const auto text = described(what); // it takes Python's lock, which others may wait for us with
  size_t before;
  {
    std::lock_guard lock(mutex_);
    before = reports_.size();
    const int stream = number_locked(on);
    Clock& clock = of(stream);
    for (const auto& use : uses) check(*use.block, stream, text, use.is_write);
    const uint64_t time = ++clock[stream];
    for (const auto& use : uses) {
      remember(*use.block, {stream, time, text, use.is_write, false});
    }
    if (reports_.size() == before) return;
  }
  if (keeps_stacks_) return;
  const auto where = stack();
  std::lock_guard lock(mutex_);
  for (size_t i = before; i < reports_.size(); ++i) reports_[i] += where;
}

void Detector::made(
    c10::Stream on, const std::string& what, const std::vector<Block*>& blocks) {
  std::vector<Use> uses;
  for (auto* block : blocks) uses.push_back({block, true});
  if (!uses.empty()) act(on, what, uses);
}

void Detector::check(const Block& block, int stream, const std::string& what, bool is_write) {
  const Clock& clock = clocks_[stream];
  for (const auto& access : block.accesses) {
    if (access.stream == stream || knows(clock, access.stream, access.time)) continue;
    if (!is_write && !access.is_write) continue;
    std::ostringstream out;
    out << what << "\n  on " << name(streams_[stream]) << (is_write ? " writes" : " reads") << " "
        << block.bytes << " bytes that " << name(streams_[access.stream]) << " may still "
        << (access.is_write ? "write" : "read")
        << (access.of_freed ? ", by way of a tensor that has been freed without record_stream:"
                            : ", for which it has not waited:")
        << "\n  " << access.what << "\n";
    reports_.push_back(out.str());
    if (access.of_freed) forget(block.stream, access); // told once is enough
  }
}

void Detector::forget(int owner, const Access& told) {
  auto& freed = freed_[owner];
  freed.erase(
      std::remove_if(
          freed.begin(),
          freed.end(),
          [&](const Access& each) {
            return each.stream == told.stream && each.time == told.time;
          }),
      freed.end());
}

void Detector::remember(Block& block, Access access) {
  auto& all = block.accesses;
  if (access.is_write) {
    all.clear(); // what comes after this comes after all that it came after
  } else {
    all.erase(
        std::remove_if(
            all.begin(),
            all.end(),
            [&](const Access& old) { return !old.is_write && old.stream == access.stream; }),
        all.end());
  }
  all.push_back(std::move(access));
}

void Detector::allocated(Block& block) {
  std::lock_guard lock(mutex_);
  auto& freed = freed_[block.stream];
  Clock clock = host_locked(); // nothing is given to the stream yet
  join(clock, clocks_[block.stream]);
  freed.erase(
      std::remove_if(
          freed.begin(),
          freed.end(),
          [&](const Access& access) { return knows(clock, access.stream, access.time); }),
      freed.end());
  // It may have got the memory of any of these.
  block.accesses = freed;
}

std::vector<c10::Stream> Detector::freed(Block& block) {
  std::lock_guard lock(mutex_);
  // What this thread has waited for is done, whichever thread is given the memory next: the
  // allocator's lock puts that after this.
  Clock waited = host_locked();
  join(waited, clocks_[block.stream]);
  // The allocator waits for all that these streams have been given so far.
  std::vector<c10::Stream> users;
  for (int stream : block.recorded) {
    join(waited, clocks_[stream]);
    users.push_back(streams_[stream]);
  }
  for (auto& access : block.accesses) {
    const bool is_safe = access.stream == block.stream || access.of_freed ||
        knows(waited, access.stream, access.time);
    if (is_safe) continue;
    access.of_freed = true;
    freed_[block.stream].push_back(std::move(access));
  }
  return users;
}

void Detector::record_stream(Block& block, c10::Stream stream) {
  std::lock_guard lock(mutex_);
  const int user = number_locked(stream);
  auto& users = block.recorded;
  if (std::find(users.begin(), users.end(), user) == users.end()) users.push_back(user);
}

Clock Detector::record(c10::Stream stream) {
  std::lock_guard lock(mutex_);
  return of(number_locked(stream));
}

void Detector::wait(c10::Stream stream, const Clock& event) {
  std::lock_guard lock(mutex_);
  join(of(number_locked(stream)), event);
}

void Detector::host_waits(const Clock& event) {
  std::lock_guard lock(mutex_);
  host_learns(event);
}

void Detector::host_waits(c10::Stream stream) {
  std::lock_guard lock(mutex_);
  host_learns(of(number_locked(stream)));
}

void Detector::host_waits(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (streams_[i].device_index() == device) host_learns(clocks_[i]);
  }
}

bool Detector::host_knows(const Clock& event) {
  std::lock_guard lock(mutex_);
  const Clock& clock = host_locked();
  for (size_t i = 0; i < event.size(); ++i) {
    if (!knows(clock, static_cast<int>(i), event[i])) return false;
  }
  return true;
}

bool Detector::stream_knows(c10::Stream stream, const Clock& event) {
  std::lock_guard lock(mutex_);
  const int own = number_locked(stream);
  const Clock& clock = of(own);
  const Clock& host = host_locked();
  for (size_t i = 0; i < event.size(); ++i) {
    const int other = static_cast<int>(i);
    if (other != own && !knows(clock, other, event[i]) && !knows(host, other, event[i])) return false;
  }
  return true;
}

Clock Detector::host() {
  std::lock_guard lock(mutex_);
  return host_locked();
}

Clock Detector::backward_ended(int task) {
  std::lock_guard lock(mutex_);
  auto ended = tasks_.extract(task);
  return ended ? std::move(ended.mapped()) : Clock();
}

void Detector::report(std::string text) {
  text += stack();
  std::lock_guard lock(mutex_);
  reports_.push_back(std::move(text));
}

std::vector<std::string> Detector::reports() {
  std::lock_guard lock(mutex_);
  return reports_;
}

void Detector::clear() {
  std::lock_guard lock(mutex_);
  reports_.clear();
  freed_.clear();
}

void Detector::keep_stacks(bool whether) {
  keeps_stacks_ = whether;
}

} // namespace sim
