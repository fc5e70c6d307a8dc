// How long the simulated device would take: when each work begins and ends, if it runs as early as its order allows.
//
// Kernels run on the CPU, so their real times say nothing of a device. Here a kernel takes the time of its operations or
// of the bytes it touches, whichever is longer; a copy between host and device has the link of its direction for itself.
// The host starts work in no time, and is held up where it waits. Off until a test starts it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace simulated {

using StreamId = int64_t;
using Clock = std::map<StreamId, int64_t>;  // the last work of each stream that comes before

struct Rates {
  double flops, memory_bytes, link_bytes;  // per second
};

struct Work {
  double flops = 0, bytes = 0;
  enum Kind { kKernel, kUpward, kDownward } kind = kKernel;
};

class Timeline {
 public:
  Timeline() = default;
  Timeline(const Rates& rates, const std::map<StreamId, Clock>& clocks) : rates_(rates) {
    for (const auto& [stream, clock] : clocks) {
      const auto own = clock.find(stream);
      streams_[stream].first = own == clock.end() ? 0 : own->second;
    }
  }
  void run(StreamId stream, const Work& work) {
    if (!rates_) return;
    auto& own = streams_[stream];
    double begin = std::max(own.free_at, host_);
    double seconds = std::max(work.flops / rates_->flops, work.bytes / rates_->memory_bytes);
    if (work.kind != Work::kKernel) {
      seconds = work.bytes / rates_->link_bytes;
      auto& link = links_[work.kind];
      begin = std::max(begin, link);
      link = begin + seconds;
      copying_ += seconds;
    }
    own.free_at = begin + seconds;
    own.ends.push_back(own.free_at);
    end_ = std::max(end_, own.free_at);
  }
  void wait(StreamId stream, const Clock& clock) {
    if (rates_) streams_[stream].free_at = std::max(streams_[stream].free_at, end_of(clock));
  }
  void host_waits(const Clock& clock) {
    if (rates_) host_ = std::max(host_, end_of(clock));
  }
  void host_works(double seconds) {
    host_ += seconds;
    end_ = std::max(end_, host_);
  }
  double end() const { return end_; }
  double copying() const { return copying_; }

 private:
  struct Stream {
    int64_t first = 0;  // the number of works before the timeline was started
    double free_at = 0;
    std::vector<double> ends;  // of each work since
  };
  double end_of(const Clock& clock) {
    double end = 0;
    for (const auto& [stream, time] : clock) {
      const auto& other = streams_[stream];
      const auto index = time - other.first - 1;
      if (index >= 0 && index < static_cast<int64_t>(other.ends.size())) end = std::max(end, other.ends[index]);
    }
    return end;
  }
  std::optional<Rates> rates_;
  std::map<StreamId, Stream> streams_;
  double links_[3] = {}, host_ = 0, end_ = 0, copying_ = 0;
};

}  // namespace simulated
