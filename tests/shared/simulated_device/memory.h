// The simulated device's memory: allocated bytes, their peak, the limit, bytes copied between host and device, and
// pinned host memory. Included by device.cpp.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>

#include "device.h"

namespace simulated {
namespace {

using at::Tensor;

// Allocators keep what was freed for the stream for which it was allocated: a stream's pool is as large as the most that
// was allocated for it at a time. (A real pool may be larger: its blocks don't fit every size.) Streams come from a pool
// as well, so that two of many share a pool of memory.
struct Pool {
  int64_t allocated = 0, peak = 0;
};

class Accounts {
 public:
  static constexpr StreamId kStreams = 32;  // of a device, the default one aside

  void take(int64_t num_bytes, StreamId home) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(
        OutOfMemoryError, limit_ < 0 || allocated_ + num_bytes <= limit_,
        "the simulated device is out of memory: tried to allocate ", num_bytes, " bytes, ", allocated_,
        " bytes are in use, the limit is ", limit_, " bytes");
    allocated_ += num_bytes;
    peak_ = std::max(peak_, allocated_);
    peak_active_ = std::max(peak_active_, allocated_ + held());
    auto& pool = pools_[pool_of(home)];
    pool.allocated += num_bytes;
    pool.peak = std::max(pool.peak, pool.allocated);
    if (limit_ >= 0 && sum_of_pools() > limit_) {  // an allocator gives back what it keeps before it gives up
      empty_pools();
      ++retries_;
    }
    peak_reserved_ = std::max(peak_reserved_, sum_of_pools());
  }
  void give_back(int64_t num_bytes, StreamId home) {
    std::lock_guard<std::mutex> lock(mutex_);
    allocated_ -= num_bytes;
    pools_[pool_of(home)].allocated -= num_bytes;
  }
  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    empty_pools();
  }
  int64_t reserved() {
    std::lock_guard<std::mutex> lock(mutex_);
    return sum_of_pools();
  }
  // Memory that `record_stream` named is freed, but is not used again before the host has seen that those streams have
  // come as far as its free; a host that runs ahead sees it late.
  void hold(int64_t num_bytes, Clock until) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_.push_back({num_bytes, std::move(until)});
  }
  void count_copy(const Tensor& from, const Tensor& to) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (from.is_cpu()) to_device_ += from.nbytes();
    else if (to.is_cpu()) to_host_ += from.nbytes();
  }
  void count_read(int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    to_host_ += num_bytes;
  }
  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = allocated_;
    peak_active_ = allocated_ + held();
    peak_reserved_ = sum_of_pools();
  }
  void set_limit(int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = num_bytes;
  }
  int64_t allocated() { return read(allocated_); }
  int64_t peak() { return read(peak_); }
  int64_t peak_active() { return read(peak_active_); }
  int64_t peak_reserved() { return read(peak_reserved_); }
  int64_t limit() { return read(limit_); }
  int64_t retries() { return read(retries_); }
  int64_t to_device() { return read(to_device_); }
  int64_t to_host() { return read(to_host_); }

 private:
  struct Held {
    int64_t num_bytes;
    Clock until;
  };
  static StreamId pool_of(StreamId home) { return home <= 0 ? home : 1 + (home - 1) % kStreams; }
  int64_t sum_of_pools() const {
    int64_t sum = 0;
    for (const auto& [stream, pool] : pools_) sum += pool.peak;
    return sum;
  }
  void empty_pools() {
    for (auto& [stream, pool] : pools_) pool.peak = pool.allocated;
  }
  int64_t held() {
    int64_t sum = 0;
    held_.erase(
        std::remove_if(held_.begin(), held_.end(), [](const Held& each) { return order().host_knows(each.until); }),
        held_.end());
    for (const auto& each : held_) sum += each.num_bytes;
    return sum;
  }
  int64_t read(const int64_t& value) {
    std::lock_guard<std::mutex> lock(mutex_);
    return value;
  }
  std::mutex mutex_;
  int64_t allocated_ = 0, peak_ = 0, peak_active_ = 0, peak_reserved_ = 0, limit_ = -1, to_device_ = 0, to_host_ = 0;
  int64_t retries_ = 0;
  std::map<StreamId, Pool> pools_;
  std::vector<Held> held_;
};

Accounts& accounts() {
  static Accounts* one = new Accounts;  // never destroyed: tensors may outlive everything static
  return *one;
}

// The memory of a device pointer: allocated for it, or a CPU storage that an operator's kernel allocated.
struct Block {
  void* own = nullptr;
  c10::Storage adopted;
  int64_t num_bytes = 0;
  History history{current_stream()};
  Block() { order().allocate(history); }
};

void forget_pending(const Block* block);

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  forget_pending(block);
  order().release(block->history);
  accounts().give_back(block->num_bytes, block->history.home);
  Clock until;
  for (StreamId stream : block->history.recorded) until[stream] = order().clock_of(stream)[stream];
  if (!until.empty()) accounts().hold(block->num_bytes, std::move(until));
  if (block->own != nullptr) c10::free_cpu(block->own);
  delete block;
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, nullptr, &no_release, kDevice};
    accounts().take(static_cast<int64_t>(num_bytes), current_stream());
    auto* block = new Block;
    block->own = c10::alloc_cpu(num_bytes);
    block->num_bytes = static_cast<int64_t>(num_bytes);
    return {block->own, block, &release, kDevice};
  }
  // No raw deleter: the context is not the data pointer.
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  static void no_release(void*) {}
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator)

Block* block_of(const Tensor& tensor) {
  const auto& data = tensor.storage().data_ptr();
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

// Pinned memory is plain memory that is recorded, with what copies have done to it.
struct PinnedAllocator final : at::Allocator {
  struct Pinned {
    size_t num_bytes;
    History history;
  };
  at::DataPtr allocate(size_t num_bytes) override {
    void* data = c10::alloc_cpu(std::max<size_t>(num_bytes, 1));
    std::lock_guard<std::mutex> lock(mutex());
    blocks()[data] = {std::max<size_t>(num_bytes, 1), {}};
    return {data, data, &unpin, kHost};
  }
  at::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  // Return the block that holds an address, and where it begins; null if the address is not pinned.
  static Pinned* find(const void* pointer, const char** begin = nullptr) {
    std::lock_guard<std::mutex> lock(mutex());
    auto after = blocks().upper_bound(const_cast<void*>(pointer));
    if (after == blocks().begin()) return nullptr;
    auto& [start, block] = *--after;
    if (pointer >= static_cast<const char*>(start) + block.num_bytes) return nullptr;
    if (begin != nullptr) *begin = static_cast<const char*>(start);
    return &block;
  }
  static void unpin(void* data) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      blocks().erase(data);
    }
    c10::free_cpu(data);
  }
  static std::mutex& mutex() {
    static auto* one = new std::mutex;
    return *one;
  }
  static std::map<void*, Pinned>& blocks() {
    static auto* one = new std::map<void*, Pinned>;
    return *one;
  }
};

PinnedAllocator pinned_allocator;

}  // namespace
}  // namespace simulated
