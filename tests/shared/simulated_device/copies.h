// Copies between the device and pinned memory that have been started, and are made as late as their order allows.
// Included by device.cpp.
#pragma once

#include <ATen/Functions.h>

#include <atomic>
#include <list>

#include "memory.h"

namespace simulated {
namespace {

struct PendingCopy {
  Block* block;   // of the device tensor that is written; null for a copy to the host
  Tensor host;    // the pinned tensor
  Tensor device;  // a view that does not own its memory, or the values when the copy to the host was started
  StreamId stream;
  int64_t time;
};

class PendingCopies {
 public:
  void add(PendingCopy copy) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    copies_.push_back(std::move(copy));
    count_ = copies_.size();
  }
  // Make the copies into a block, before other work uses it.
  void settle(const Block* block) {
    settle_if([block](const PendingCopy& copy) { return copy.block != nullptr && copy.block == block; });
  }
  // Make the copies that use a range of pinned memory, before a copy that comes after them uses it.
  void settle_host(const Tensor& host) {
    settle_if([this, &host](const PendingCopy& copy) { return overlap(copy.host, host); });
  }
  // Make the copies that the host has waited for.
  void settle_known() {
    settle_if([](const PendingCopy& copy) { return order().host_knows(copy.stream, copy.time); });
  }
  void forget(const Block* block) {
    if (count_ == 0) return;
    std::list<PendingCopy> done;
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (auto each = copies_.begin(); each != copies_.end();) {
      const auto next = std::next(each);
      if (each->block == block && block != nullptr) done.splice(done.end(), copies_, each);
      each = next;
    }
    count_ = copies_.size();
  }

 private:
  using Place = std::list<PendingCopy>::iterator;
  // What is done is freed when the lock is not held any more: Python's tensors need the interpreter's lock for that,
  // which another thread may have that waits for this one.
  template <typename Condition>
  void settle_if(Condition&& condition) {
    if (count_ == 0) return;
    std::list<PendingCopy> done;
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (auto each = copies_.begin(); each != copies_.end();) {
      const auto next = std::next(each);
      if (condition(*each)) make(each, done);
      each = next;
    }
    count_ = copies_.size();
  }
  void make(Place place, std::list<PendingCopy>& done) {
    for (auto each = copies_.begin(); each != place;) {
      const auto next = std::next(each);
      if (overlap(each->host, place->host)) make(each, done);
      each = next;
    }
    at::NoGradGuard no_grad;
    if (place->block != nullptr) place->device.copy_(place->host.detach());
    else place->host.detach().copy_(place->device);
    done.splice(done.end(), copies_, place);
  }
  static bool overlap(const Tensor& one, const Tensor& other) {
    const auto* first = static_cast<const char*>(one.const_data_ptr());
    const auto* second = static_cast<const char*>(other.const_data_ptr());
    return first < second + span(other) && second < first + span(one);
  }
  static int64_t span(const Tensor& tensor) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    return (last + 1) * static_cast<int64_t>(tensor.element_size());
  }
  std::recursive_mutex mutex_;
  std::list<PendingCopy> copies_;
  std::atomic<size_t> count_{0};
};

PendingCopies& pending_copies() {
  static auto* one = new PendingCopies;
  return *one;
}

void forget_pending(const Block* block) { pending_copies().forget(block); }

}  // namespace
}  // namespace simulated
