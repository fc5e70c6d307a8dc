// What runs the collectives of the simulated device: operations, the thread and stream of a communicator, and what a
// caller waits for. Included by collectives.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ATen/core/ivalue_inl.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "device.h"

namespace simulated {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Works = std::vector<c10::intrusive_ptr<Work>>;

// A part of an operation: messages to start, and what to do when they have arrived.
struct Step {
  std::function<void(Works&)> start;
  std::function<void()> finish;
};

struct Operation {
  std::vector<Step> steps;
  Tensors inputs, outputs;  // kept until somebody has waited
  c10::intrusive_ptr<Backend> backend;  // while this runs
  Clock clock;  // of the communicator's stream after this operation
  c10::intrusive_ptr<at::ivalue::Future> future;
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  std::exception_ptr error;

  void run() {
    try {
      Works works;
      for (auto& step : steps) step.start(works);
      for (auto& work : works) work->wait();
      for (auto& step : steps)
        if (step.finish) step.finish();
    } catch (...) {
      error = std::current_exception();
    }
    recorded_clock() = &clock;
    if (error) future->setErrorIfNeeded(error);
    else future->markCompleted(c10::IValue(outputs));
    recorded_clock() = nullptr;
    steps.clear();
    backend.reset();
    std::lock_guard<std::mutex> lock(mutex);
    is_done = true;
    changed.notify_all();
  }
};

// The thread and the stream of a communicator. The thread ends when nobody can start work any more.
class Lane {
 public:
  Lane() : state_(std::make_shared<State>()) {
    std::thread([state = state_] { serve(*state); }).detach();
  }
  ~Lane() {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->is_closed = true;
    state_->changed.notify_all();
  }
  const StreamId stream = order().new_communicator_stream();
  int64_t num_started = 0;
  bool is_connected = false;

  void add(std::shared_ptr<Operation> operation) {
    std::deque<std::shared_ptr<Operation>> done;  // freed on this thread: Python's tensors need the interpreter's lock
    std::lock_guard<std::mutex> lock(state_->mutex);
    done.swap(state_->done);
    state_->waiting.push_back(std::move(operation));
    running().begin();
    state_->changed.notify_all();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Operation>> waiting, done;
    bool is_closed = false;
  };
  static void serve(State& state) {
    std::unique_lock<std::mutex> lock(state.mutex);
    while (true) {
      state.changed.wait(lock, [&] { return state.is_closed || !state.waiting.empty(); });
      if (state.waiting.empty()) return;
      auto operation = state.waiting.front();
      state.waiting.pop_front();
      lock.unlock();
      operation->run();
      running().end();
      lock.lock();
      state.done.push_back(std::move(operation));
    }
  }
  std::shared_ptr<State> state_;
};

class SimulatedWork final : public Work {
 public:
  SimulatedWork(int rank, OpType type, std::shared_ptr<Operation> operation, bool blocks_host)
      : Work(rank, type), operation_(std::move(operation)), blocks_host_(blocks_host) {}
  bool isCompleted() override {
    std::lock_guard<std::mutex> lock(operation_->mutex);
    return operation_->is_done;
  }
  bool isSuccess() const override { return operation_->is_done && !operation_->error; }
  std::exception_ptr exception() const override { return operation_->error; }
  bool wait(std::chrono::milliseconds) override {
    {
      std::unique_lock<std::mutex> lock(operation_->mutex);
      operation_->changed.wait(lock, [&] { return operation_->is_done; });
    }
    operation_->inputs.clear();
    operation_->outputs.clear();
    if (!has_future_) operation_->future.reset();
    if (operation_->error) std::rethrow_exception(operation_->error);
    order().wait(current_stream(), operation_->clock);
    if (blocks_host_) order().host_waits(operation_->clock);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK(operation_->future.defined(), "simccl has no future of work that was waited for");
    has_future_ = true;
    return operation_->future;
  }

 private:
  std::shared_ptr<Operation> operation_;
  bool blocks_host_, has_future_ = false;
};

}  // namespace
}  // namespace simulated
