// "simccl": collectives of the simulated device, by NCCL's rules, over a gloo backend that moves the bytes.
//
// - Only device tensors, contiguous, of NCCL's dtypes. Sums are computed in the dtype that is sent, rounded after each
//   addition, in the order of a ring.
// - Work of one communicator runs in the order in which it was started, on one thread and one stream. A group has one
//   communicator, which its messages between two ranks share, as where NCCL is bound to a device, so that a message
//   waits for those that were asked for before it, from whatever rank (`TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_
//   WARNING`).
// - A communicator is made when it is first used, and until then the host blocks for the other ranks; where NCCL is
//   bound that has happened when the group was made, so messages don't.
// - Messages carry a tag made of the call and its number. Ranks that call different things wait for each other until
//   gloo's time limit, and `wait` raises.
// - `wait` lets the current stream wait, not the host: to other streams and to the host the result is unordered.
//   (The thread blocks until the work is done, because kernels run at once.)
// - Like torch's, this backend composes gathers and reductions of unequal sizes from broadcasts and reductions; the
//   single-tensor calls refuse them.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <ATen/Functions.h>
#include <ATen/core/ivalue_inl.h>

#include <functional>
#include <memory>

#include "device.h"
#include "lanes.h"

namespace simulated {
namespace {

using c10d::ReduceOp;

int tag_of(const std::string& text) { return static_cast<int>(std::hash<std::string>()(text) & 0x3fffffff); }

void check(const Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().type() == kDevice.type(), "simccl takes tensors of the simulated device, not of ",
      tensor.device());
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "simccl takes contiguous tensors");
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK(
      dtype != at::kShort && !tensor.is_complex(), "simccl, as NCCL, has no data type for ", toString(dtype));
}

Tensor bytes_of(const Tensor& host) {  // dense, in memory order
  return at::from_blob(host.data_ptr(), {host.numel()}, [host](void*) {}, host.options());
}

class SimulatedBackend final : public Backend {
 public:
  explicit SimulatedBackend(c10::intrusive_ptr<Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_lane().num_started; }

  void startCoalescing() override { batch_ = std::make_unique<Batch>(); }
  c10::intrusive_ptr<Work> endCoalescing() override {
    auto batch = std::move(batch_);
    if (!batch) return nullptr;
    return enqueue(connected(), OpType::COALESCED, std::move(batch->steps), batch->inputs, batch->outputs);
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto& tensor = single(tensors);
    return collective(OpType::BROADCAST, {broadcast_step(tensor, tensor, opts.rootRank)}, {tensor}, {tensor});
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto& tensor = single(tensors);
    return collective(OpType::ALLREDUCE, {reduce_step("allreduce", tensor, tensor, opts.reduceOp, -1)}, {tensor}, {tensor});
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    std::vector<Step> steps;
    for (auto& tensor : tensors) steps.push_back(reduce_step("allreduce", checked(tensor), tensor, opts.reduceOp, -1));
    return collective(OpType::ALLREDUCE_COALESCED, std::move(steps), tensors, tensors);
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto& tensor = single(tensors);
    return collective(
        OpType::REDUCE, {reduce_step("reduce", tensor, tensor, opts.reduceOp, opts.rootRank)}, {tensor}, {tensor});
  }
  c10::intrusive_ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    auto& input = single(inputs);
    auto& parts = outputs.at(0);
    for (auto& part : parts) checked(part);
    const bool is_even = std::all_of(
        parts.begin(), parts.end(), [&](const Tensor& part) { return part.numel() == input.numel(); });
    if (is_even) return collective(OpType::ALLGATHER, {gather_step("allgather", input, parts, -1)}, {input}, parts);
    std::vector<Step> steps;
    for (int rank = 0; rank < size_; ++rank)
      steps.push_back(broadcast_step(rank == rank_ ? input : parts[rank], parts[rank], rank));
    return collective(OpType::ALLGATHER, std::move(steps), {input}, parts);
  }
  c10::intrusive_ptr<Work> _allgather_base(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return collective(OpType::_ALLGATHER_BASE, {gather_base_step(output, input)}, {input}, {output});
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    std::vector<Step> steps;
    for (size_t i = 0; i < inputs.size(); ++i) steps.push_back(gather_base_step(outputs[i], inputs[i]));
    return collective(OpType::COALESCED, std::move(steps), inputs, outputs);
  }
  c10::intrusive_ptr<Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto& input = single(inputs);
    Tensors parts = rank_ == opts.rootRank ? outputs.at(0) : Tensors();
    return collective(OpType::GATHER, {gather_step("gather", input, parts, opts.rootRank)}, {input}, parts);
  }
  c10::intrusive_ptr<Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto& output = single(outputs);
    Tensors sent(size_), received(size_);
    if (rank_ == opts.rootRank) sent = inputs.at(0);
    received[opts.rootRank] = output;
    const auto what = call("scatter", output) + std::to_string(opts.rootRank);
    Tensors read = rank_ == opts.rootRank ? inputs.at(0) : Tensors();
    return collective(OpType::SCATTER, {exchange_step(what, sent, received)}, read, {output});
  }
  c10::intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto& output = single(outputs);
    auto& parts = inputs.at(0);
    std::vector<Step> steps;  // a reduction to each rank, whether sizes are equal or not
    for (int rank = 0; rank < size_; ++rank)
      steps.push_back(reduce_step(
          "reduce_scatter", checked(parts[rank]), rank == rank_ ? output : Tensor(), opts.reduceOp, rank));
    return collective(OpType::REDUCE_SCATTER, std::move(steps), parts, {output});
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    auto steps = scatter_base_steps(output, input, opts.reduceOp);
    return collective(OpType::_REDUCE_SCATTER_BASE, std::move(steps), {input}, {output});
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    std::vector<Step> steps;
    for (size_t i = 0; i < inputs.size(); ++i)
      for (auto& step : scatter_base_steps(outputs[i], inputs[i], opts.reduceOp)) steps.push_back(std::move(step));
    return collective(OpType::COALESCED, std::move(steps), inputs, outputs);
  }
  c10::intrusive_ptr<Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions&) override {
    auto sent = split(checked(input), input_splits), received = split(checked(output), output_splits);
    const auto what = "alltoall " + std::string(toString(input.scalar_type()));
    return collective(OpType::ALLTOALL_BASE, {exchange_step(what, sent, received)}, {input}, {output});
  }
  c10::intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    for (auto* tensors : {&outputs, &inputs})
      for (auto& tensor : *tensors) checked(tensor);
    return collective(OpType::ALLTOALL, {exchange_step("alltoall", inputs, outputs)}, inputs, outputs);
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int peer, int) override {
    auto& tensor = single(tensors);
    return point_to_point(OpType::SEND, tensor, rank_, peer, [this, tensor = cpu_view(tensor), peer](Works& works, int tag) {
      if (tensor.numel() > 0) put(works, tensor, peer, tag);
    });
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int peer, int) override {
    auto& tensor = single(tensors);
    return point_to_point(OpType::RECV, tensor, peer, rank_, [this, tensor = cpu_view(tensor), peer](Works& works, int tag) {
      if (tensor.numel() > 0) take(works, tensor, peer, tag);
    });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override {
    auto step = meeting("barrier " + std::to_string(num_steps_++), everyone());
    return enqueue(connected(), OpType::BARRIER, {std::move(step)}, {}, {}, /*blocks_host=*/true);
  }

 private:
  struct Batch {
    std::vector<Step> steps;
    Tensors inputs, outputs;
  };

  static const Tensor& checked(const Tensor& tensor) {
    check(tensor);
    return tensor;
  }
  static Tensor& single(Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "simccl takes one tensor per call");
    check(tensors[0]);
    return tensors[0];
  }
  static std::string call(const char* name, const Tensor& tensor) {
    return std::string(name) + " " + toString(tensor.scalar_type()) + " " + std::to_string(tensor.numel()) + " ";
  }

  // ---- communicators

  Lane& group_lane() {
    return lane_;
  }
  std::vector<int> everyone() const {
    std::vector<int> peers;
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_) peers.push_back(peer);
    return peers;
  }
  // Return the group's communicator; the first time, the host blocks until every rank has come.
  Lane& connected() {
    auto& lane = group_lane();
    if (!lane.is_connected) meet("communicator of the group", everyone());
    lane.is_connected = true;
    return lane;
  }
  void meet(const std::string& what, const std::vector<int>& peers) {
    Works works;
    auto step = meeting(what, peers);
    step.start(works);
    for (auto& work : works) work->wait();
  }
  Step meeting(const std::string& what, const std::vector<int>& peers) {
    return {[this, tag = tag_of(what), peers](Works& works) {
              for (int peer : peers) {
                put(works, at::zeros({1}), peer, tag);
                take(works, at::zeros({1}), peer, tag);
              }
            },
            nullptr};
  }

  // ---- starting work

  c10::intrusive_ptr<Work> collective(OpType type, std::vector<Step> steps, const Tensors& inputs, const Tensors& outputs) {
    if (!batch_) return enqueue(connected(), type, std::move(steps), inputs, outputs);
    for (auto& step : steps) batch_->steps.push_back(std::move(step));
    batch_->inputs.insert(batch_->inputs.end(), inputs.begin(), inputs.end());
    batch_->outputs.insert(batch_->outputs.end(), outputs.begin(), outputs.end());
    return nullptr;
  }
  c10::intrusive_ptr<Work> point_to_point(
      OpType type, const Tensor& tensor, int from, int to, std::function<void(Works&, int)> transfer) {
    const int peer = from == rank_ ? to : from;
    TORCH_CHECK(peer != rank_, "simccl can't send from a rank to itself outside of a batch");
    const auto size = std::to_string(tensor.nbytes());
    const auto direction = "message " + std::to_string(from) + " " + std::to_string(to) + " ";
    Tensors inputs, outputs;
    (type == OpType::SEND ? inputs : outputs).push_back(tensor);
    if (batch_) {
      const int tag = tag_of("batched " + direction + size + " " + std::to_string(num_batched_[direction]++));
      return collective(type, {{[transfer, tag](Works& works) { transfer(works, tag); }, nullptr}}, inputs, outputs);
    }
    auto& lane = group_lane();
    const int tag = tag_of(direction + size + " " + std::to_string(num_sent_[peer]++));
    return enqueue(lane, type, {{[transfer, tag](Works& works) { transfer(works, tag); }, nullptr}}, inputs, outputs);
  }
  c10::intrusive_ptr<Work> enqueue(
      Lane& lane, OpType type, std::vector<Step> steps, const Tensors& inputs, const Tensors& outputs,
      bool blocks_host = false) {
    order().wait(lane.stream, order().clock_of(current_stream()));
    order().begin(lane.stream);
    for (const auto& tensor : inputs) access(tensor, lane.stream, /*is_write=*/false, "a collective");
    for (const auto& tensor : outputs) access(tensor, lane.stream, /*is_write=*/true, "a collective");
    auto operation = std::make_shared<Operation>();
    operation->steps = std::move(steps);
    operation->inputs = inputs;
    operation->outputs = outputs;
    operation->backend = c10::intrusive_ptr<Backend>::reclaim_copy(this);
    operation->clock = order().clock_of(lane.stream);
    operation->future = c10::make_intrusive<at::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{kDevice});
    ++lane.num_started;
    lane.add(operation);
    return c10::make_intrusive<SimulatedWork>(rank_, type, operation, blocks_host);
  }

  // ---- what is sent

  void put(Works& works, const Tensor& host, int peer, int tag) {
    Tensors message{bytes_of(host)};
    works.push_back(gloo_->send(message, peer, tag));
  }
  void take(Works& works, const Tensor& host, int peer, int tag) {
    Tensors message{bytes_of(host)};
    works.push_back(gloo_->recv(message, peer, tag));
  }
  int next_tag(const std::string& what) {
    return tag_of(what + " " + std::to_string(num_steps_++));
  }
  Step exchange_step(const std::string& what, const Tensors& sent, const Tensors& received) {
    std::vector<Tensor> from(size_), into(size_);
    for (int rank = 0; rank < size_; ++rank) {
      if (sent[rank].defined()) from[rank] = cpu_view(sent[rank]);
      if (received[rank].defined()) into[rank] = cpu_view(received[rank]);
    }
    return {[this, from, into, tag = next_tag(what)](Works& works) {
              for (int rank : everyone()) {
                if (from[rank].defined() && from[rank].numel()) put(works, from[rank], rank, tag);
                if (into[rank].defined() && into[rank].numel()) take(works, into[rank], rank, tag);
              }
              if (into[rank_].defined() && from[rank_].defined() && into[rank_].data_ptr() != from[rank_].data_ptr())
                bytes_of(into[rank_]).copy_(bytes_of(from[rank_]));
            },
            nullptr};
  }
  Step broadcast_step(const Tensor& input, const Tensor& output, int64_t root) {
    checked(input);
    Tensors sent(size_), received(size_);
    if (rank_ == root) sent.assign(size_, input);
    received[root] = output;
    return exchange_step(call("broadcast", input) + std::to_string(root), sent, received);
  }
  Step gather_step(const char* name, const Tensor& input, const Tensors& parts, int64_t root) {
    Tensors sent(size_), received(size_);
    for (int rank = 0; rank < size_; ++rank)
      if (root < 0 || rank == root) sent[rank] = input;
    if (!parts.empty()) received = parts;
    return exchange_step(call(name, input) + std::to_string(root), sent, received);
  }
  Step gather_base_step(const Tensor& output, const Tensor& input) {
    TORCH_CHECK(
        checked(output).numel() == checked(input).numel() * size_ && output.scalar_type() == input.scalar_type(),
        "simccl: output tensor size must be equal to world_size times input tensor size; got ", output.numel(), " and ",
        input.numel());
    return gather_step("allgather", input, split(output, {}), -1);
  }
  // Sum each rank's tensor into the output of a rank, or of all where ``root`` is -1.
  Step reduce_step(const char* name, const Tensor& input, const Tensor& output, const ReduceOp& op, int64_t root) {
    checked(input);
    const bool takes = root < 0 || root == rank_;
    auto own = cpu_view(input);
    auto others = std::make_shared<Tensors>(size_);
    const auto what = call(name, input) + std::to_string(static_cast<int>(op.op_)) + " " + std::to_string(root);
    auto target = takes && output.defined() ? cpu_view(output) : Tensor();
    return {[this, own, others, takes, root, tag = next_tag(what)](Works& works) {
              if (own.numel() == 0) return;
              for (int rank : everyone()) {
                if (root < 0 || rank == root) put(works, own, rank, tag);
                if (takes) {
                  (*others)[rank] = at::empty({own.numel()}, own.options());
                  take(works, (*others)[rank], rank, tag);
                }
              }
            },
            [this, own, others, takes, target, op, root] {
              if (!takes || own.numel() == 0) return;
              (*others)[rank_] = bytes_of(own);
              auto result = root < 0 ? ring_of_slices(*others, op) : around_ring(*others, op, root);
              bytes_of(target).copy_(result);
              others->clear();
            }};
  }
  std::vector<Step> scatter_base_steps(const Tensor& output, const Tensor& input, const ReduceOp& op) {
    TORCH_CHECK(
        checked(input).numel() == checked(output).numel() * size_ && output.scalar_type() == input.scalar_type(),
        "simccl: input tensor must be the same size as output size times world size; got ", input.numel(), " and ",
        output.numel());
    const auto parts = split(input, {});
    std::vector<Step> steps;
    for (int rank = 0; rank < size_; ++rank)
      steps.push_back(reduce_step("reduce_scatter", parts[rank], rank == rank_ ? output : Tensor(), op, rank));
    return steps;
  }
  // A ring's all-reduce: the slice of each rank is summed beginning at the rank after it.
  Tensor ring_of_slices(const Tensors& terms, const ReduceOp& op) {
    Tensors sums;
    const auto numel = terms[0].numel();
    for (int rank = 0; rank < size_; ++rank) {
      const auto begin = numel * rank / size_, end = numel * (rank + 1) / size_;
      Tensors slices;
      for (const auto& term : terms) slices.push_back(term.slice(0, begin, end));
      sums.push_back(around_ring(slices, op, rank));
    }
    return at::cat(sums);
  }
  Tensor around_ring(const Tensors& terms, const ReduceOp& op, int64_t last) {
    at::NoGradGuard no_grad;
    const auto first = (last + 1) % size_;
    Tensor total = scaled(terms[first], op);
    for (int step = 1; step < size_; ++step) total = combined(total, scaled(terms[(first + step) % size_], op), op);
    if (op.op_ == ReduceOp::AVG && !at::isFloatingType(total.scalar_type())) total = at::div(total, size_, "trunc");
    return total;
  }
  // NCCL averages by scaling the terms. After torch 2.10 the supplement has another name as well.
  Tensor scaled(const Tensor& term, const ReduceOp& op) {
    if (op.op_ == ReduceOp::AVG && at::isFloatingType(term.scalar_type())) return term.mul(1.0 / size_);
    if (op.op_ != ReduceOp::PREMUL_SUM) return term.clone();
    auto* factor = reinterpret_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    if (factor->tensor_factor.defined()) return term.mul(cpu_view(factor->tensor_factor).to(term.scalar_type()));
    return term.mul(factor->double_factor);
  }
  static Tensor combined(const Tensor& one, const Tensor& other, const ReduceOp& op) {
    switch (op.op_) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
      case ReduceOp::PREMUL_SUM:
        return one.scalar_type() == at::kBool ? at::logical_or(one, other) : at::add(one, other);
      case ReduceOp::PRODUCT: return at::mul(one, other);
      case ReduceOp::MIN: return at::fmin(one, other);  // as NCCL's, a number wins over NaN
      case ReduceOp::MAX: return at::fmax(one, other);
      default: TORCH_CHECK(false, "simccl, as NCCL, has no bitwise reductions");
    }
  }
  Tensors split(const Tensor& tensor, const std::vector<int64_t>& lengths) const {
    Tensors parts;
    int64_t offset = 0;
    const auto rows = tensor.dim() ? tensor.size(0) : 1;
    const auto row = rows ? tensor.numel() / rows : 0;
    auto flat = tensor.view({-1});
    TORCH_CHECK(!lengths.empty() || tensor.numel() % size_ == 0, "simccl: tensor can't be split evenly");
    for (int rank = 0; rank < size_; ++rank) {
      const auto numel = lengths.empty() ? tensor.numel() / size_ : lengths[rank] * row;
      parts.push_back(flat.narrow(0, offset, numel));
      offset += numel;
    }
    return parts;
  }

  c10::intrusive_ptr<Backend> gloo_;
  std::map<int, int> num_sent_;  // messages with each rank, either way, outside of batches
  Lane lane_;
  std::unique_ptr<Batch> batch_;
  std::map<std::string, int64_t> num_batched_;
  int64_t num_steps_ = 0;
};

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using simulated::SimulatedBackend;
  pybind11::module_::import("torch.distributed");
  pybind11::class_<SimulatedBackend, c10::intrusive_ptr<SimulatedBackend>, c10d::Backend>(module, "SimulatedBackend")
      .def(pybind11::init([](const c10::intrusive_ptr<c10d::Backend>& gloo) {
        return c10::make_intrusive<SimulatedBackend>(gloo);
      }));
}
