// What the parts of the simulated device share: see device.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <mutex>

#include "order.h"

namespace simulated {

inline const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);
inline const c10::Device kHost(c10::DeviceType::CPU);

// Return a device tensor as a CPU tensor that shares its memory, after pending copies into it.
at::Tensor cpu_view(const at::Tensor& tensor);

// Note that work on a stream reads or writes a device tensor; raises where that is a race.
void access(const at::Tensor& tensor, StreamId stream, bool is_write, const char* name);

// Collectives that have been started and have not ended. A host that synchronizes the device waits for them, as for
// all that was started on any stream.
class Running {
 public:
  void begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++count_;
  }
  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    --count_;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};
inline Running& running() {
  static auto* const found = new Running();
  return *found;
}

}  // namespace simulated
