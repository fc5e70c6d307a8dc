// The order of work on the simulated device's streams: which work comes after which, by streams, events and the host.
//
// Kernels run at once, on the thread that starts them, so values don't depend on timing. What a real device would run
// concurrently is found by vector clocks instead: each access of memory is kept with its stream and its place in it, and
// an access that is not ordered after an earlier one that it conflicts with raises, in every run. This is the method of
// torch's CUDA sanitizer.
#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "timeline.h"

namespace simulated {

inline void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, time] : other) {
    auto& own = clock[stream];
    own = std::max(own, time);
  }
}

struct Access {
  int64_t begin, end;  // bytes of the memory
  StreamId stream;
  int64_t time;
  bool is_write;
  const char* name;
};

// The last work of each stream that uses memory which was freed meanwhile.
struct Ghost {
  int64_t time;
  const char* name;
};
using Ghosts = std::map<StreamId, Ghost>;

// What has been done to a block of device memory, or of pinned host memory.
struct History {
  StreamId home = 0;  // the stream for which the memory was allocated: freed memory is used again on it
  std::vector<Access> accesses;
  std::set<StreamId> recorded;  // streams that `record_stream` named
  Ghosts ghosts;                // what was done to memory that was freed before, which this may be
};

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point at;
};

class Order {
 public:
  static constexpr StreamId kFirstCommunicator = 1 << 20;  // streams of communicators have higher numbers

  StreamId new_stream() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return ++last_stream_;
  }
  int64_t streams_made() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return last_stream_;
  }
  StreamId new_communicator_stream() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return ++last_communicator_;
  }

  // Start work on a stream: it comes after all earlier work of the stream, and what the host has waited for.
  int64_t begin(StreamId stream, const Work& work = {}) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& clock = clocks_[stream];
    join(clock, host_);
    timeline_.run(stream, work);
    return ++clock[stream];
  }
  void access(History& history, int64_t first, int64_t last, StreamId stream, bool is_write, const char* name) {
    if (first >= last) return;
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& clock = clocks_[stream];
    for (const auto& [other, ghost] : history.ghosts)
      if (other != stream && time_of(clock, other) < ghost.time) raise_ghost(ghost, other, stream, name);
    if (stream == history.home) history.ghosts.clear();  // others come after this
    auto& accesses = history.accesses;
    for (const Access& other : accesses) {
      if (other.stream == stream || other.end <= first || last <= other.begin) continue;
      if ((is_write || other.is_write) && time_of(clock, other.stream) < other.time) raise_race(other, stream, is_write, name);
    }
    accesses.erase(
        std::remove_if(
            accesses.begin(), accesses.end(),
            [&](const Access& other) {
              if (other.begin < first || last < other.end) return false;
              return is_write || (!other.is_write && other.stream == stream);
            }),
        accesses.end());
    accesses.push_back({first, last, stream, clock[stream], is_write, name});
  }
  // Memory is allocated for the current stream, which may get what was freed there: see `release`.
  void allocate(History& history) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& ghosts = ghosts_[history.home];
    auto clock = clocks_[history.home];
    join(clock, host_);
    for (auto each = ghosts.begin(); each != ghosts.end();)
      each = time_of(clock, each->first) >= each->second.time ? ghosts.erase(each) : std::next(each);
    history.ghosts = ghosts;
  }
  // Memory is freed on the host. An allocator gives it to the next that its home stream allocates, whatever other
  // streams still do with it, but for those that `record_stream` named. Works of communicators keep their tensors.
  void release(const History& history) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& ghosts = ghosts_[history.home];
    for (const Access& access : history.accesses) {
      if (access.stream == history.home || access.stream >= kFirstCommunicator) continue;
      if (history.recorded.count(access.stream)) continue;
      auto& ghost = ghosts[access.stream];
      if (ghost.time < access.time) ghost = {access.time, access.name};
    }
  }
  Clock clock_of(StreamId stream) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return clocks_[stream];
  }
  void wait(StreamId stream, const Clock& clock) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    join(clocks_[stream], clock);
    timeline_.wait(stream, clock);
  }
  void host_waits(const Clock& clock) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    join(host_, clock);
    timeline_.host_waits(clock);
  }
  void host_waits_for_all() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (const auto& [stream, clock] : clocks_) {
      join(host_, clock);
      timeline_.host_waits(clock);
    }
  }
  void start_timeline(const Rates& rates) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    timeline_ = Timeline(rates, clocks_);
  }
  void host_works(double seconds) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    timeline_.host_works(seconds);
  }
  std::pair<double, double> times() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return {timeline_.end(), timeline_.copying()};
  }
  bool host_knows(StreamId stream, int64_t time) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return time_of(host_, stream) >= time;
  }
  bool host_knows(const Clock& clock) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return std::all_of(
        clock.begin(), clock.end(), [&](const auto& each) { return time_of(host_, each.first) >= each.second; });
  }

 private:
  static int64_t time_of(const Clock& clock, StreamId stream) {
    const auto found = clock.find(stream);
    return found == clock.end() ? 0 : found->second;
  }
  static std::string name_of(StreamId stream) {
    return stream > kFirstCommunicator ? "the stream of a communicator" : "stream " + std::to_string(stream);
  }
  void raise_race(const Access& other, StreamId stream, bool is_write, const char* name) {
    throw std::runtime_error(
        std::string("race on the simulated device: ") + name + " on " + name_of(stream) +
        (is_write ? " writes" : " reads") + " memory that " + other.name + " on " + name_of(other.stream) +
        (other.is_write ? " writes" : " reads") + ", and does not wait for it. Record an event after the one, and let "
        "the other's stream wait for it.");
  }
  void raise_ghost(const Ghost& ghost, StreamId other, StreamId stream, const char* name) {
    throw std::runtime_error(
        std::string("race on the simulated device: ") + name + " on " + name_of(stream) + " may get memory that " +
        ghost.name + " on " + name_of(other) + " used, which was freed before the one waits for the other. Let it wait, "
        "or call `record_stream`.");
  }
  std::recursive_mutex mutex_;
  std::map<StreamId, Clock> clocks_;
  Clock host_;
  StreamId last_stream_ = 0, last_communicator_ = kFirstCommunicator;
  std::map<StreamId, Ghosts> ghosts_;  // by the stream that may get the memory
  Timeline timeline_;
};

Order& order();             // never destroyed
StreamId& current_stream();  // of this thread
Clock*& recorded_clock();    // what events record in place of the current stream's clock, on threads of communicators

}  // namespace simulated
