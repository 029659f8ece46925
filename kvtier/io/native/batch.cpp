#include "batch.h"

#include <numeric>

namespace kvtier {
namespace {

size_t total_slabs(const OpSpec* specs, size_t n_ops) {
  return std::accumulate(specs, specs + n_ops, size_t{0}, [](size_t n, const OpSpec& op) { return n + op.n_slabs; });
}

}  // namespace

Batch::Batch(const OpSpec* specs, size_t n_ops, const uint64_t* expected)
    : n_ops_(n_ops), ops_(new Op[n_ops]), sums_(total_slabs(specs, n_ops)), ops_left_(n_ops) {
  expected_.assign(expected, expected + sums_.size());
  size_t first_sum = 0;
  for (size_t i = 0; i < n_ops; i++) {
    ops_[i].spec = specs[i];
    ops_[i].first_sum = first_sum;
    first_sum += specs[i].n_slabs;
    lanes_[ops_[i].lane()].ops.push_back(static_cast<uint32_t>(i));
  }
}

bool Batch::wait(std::chrono::nanoseconds timeout) {
  // A wait with no time left is a system call all the same: 15 us, while the caller holds the interpreter lock.
  if (done() || timeout.count() <= 0) return done();
  std::unique_lock<std::mutex> lock(mutex_);
  return all_done_.wait_for(lock, timeout, [this] { return done(); });
}

void Batch::op_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ops_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) all_done_.notify_all();
}

bool Batch::is_bad(const Op& op, uint32_t position) const {
  if (!op.verify() || op.error.load() != 0) return false;
  const size_t slab = op.first_sum + position;
  return sum(slab) != expected_[slab];
}

bool Batch::is_any_bad(const Op& op) const {
  for (uint32_t position = 0; position < op.spec.n_slabs; position++)
    if (is_bad(op, position)) return true;
  return false;
}

bool Batch::is_clean() const {
  for (size_t i = 0; i < n_ops_; i++)
    if (ops_[i].error.load() != 0 || is_any_bad(ops_[i])) return false;
  return true;
}

}  // namespace kvtier
