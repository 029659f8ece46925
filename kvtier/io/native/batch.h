// Operations, and the batch that holds their state. Does no I/O.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace kvtier {

constexpr size_t kPageBytes = 4096;
constexpr size_t kChecksumsOffset = 128;  // in a record's header page: see kvtier/format/record.py
constexpr size_t kCrcOffset = 12;
constexpr size_t kSlabsMax = (kPageBytes - kChecksumsOffset) / 8;

constexpr uint64_t round_down(uint64_t value, uint64_t unit) { return value / unit * unit; }
constexpr uint64_t round_up(uint64_t value, uint64_t unit) { return round_down(value + unit - 1, unit); }

enum Kind : int32_t { kRead = 0, kWrite = 1, kFlush = 2 };

// Separate queues: reads (kRead), and writes and flushes (kWrite).
constexpr int kLanes = 2;

// Bits of OpSpec::flags.
constexpr uint32_t kVerify = 1;    // compare with the expected checksums; if a write differs, its header is not written
constexpr uint32_t kOnDevice = 2;  // read: `address` is device memory; the device computes the checksums

// One operation in the layout of the C interface, which kvtier/io/ring.py packs.
//   read : `offset` and `address` of the first slab
//   write: `offset` and `address` of the header page; the slabs follow it in the file and in memory
//   flush: fdatasync of `fd`; all other fields are 0
struct OpSpec {
  int32_t kind;
  int32_t fd;
  int64_t offset;
  uint64_t address;
  uint64_t slab_bytes;
  uint32_t n_slabs;
  uint32_t first_head;
  uint32_t first_layer;
  uint32_t flags;
  uint8_t key[16];
};
static_assert(sizeof(OpSpec) == 64, "the layout is part of the C interface");

struct Op {
  OpSpec spec;
  size_t first_sum = 0;     // position of its first slab in the batch's arrays
  uint32_t n_pieces = 0;    // set by Engine::submit
  uint32_t next_piece = 0;  // first piece not yet taken by a thread; guarded by the engine's mutex
  std::atomic<uint32_t> unfinished{0};
  std::atomic<int> error{0};

  bool is_given_out() const { return next_piece == n_pieces; }
  bool verify() const { return (spec.flags & kVerify) != 0; }
  bool on_device() const { return (spec.flags & kOnDevice) != 0; }
  int lane() const { return spec.kind == kRead ? kRead : kWrite; }
  uint64_t payload_bytes() const { return spec.slab_bytes * spec.n_slabs; }
  uint8_t* slabs() const {
    return reinterpret_cast<uint8_t*>(spec.address) + (spec.kind == kWrite ? kPageBytes : 0);
  }
  int64_t slabs_offset() const { return spec.offset + (spec.kind == kWrite ? static_cast<int64_t>(kPageBytes) : 0); }
  int64_t end() const { return slabs_offset() + static_cast<int64_t>(payload_bytes()); }
  void fail(int code) {
    int none = 0;
    error.compare_exchange_strong(none, code);
  }
};

// Operations of one queue, in order, and the first that has pieces to take. Guarded by the engine's mutex.
struct Lane {
  std::vector<uint32_t> ops;
  size_t next = 0;
  bool empty() const { return next == ops.size(); }
};

// Shared by the caller's handle and every piece in flight. Memory and file descriptors of its operations belong to the
// caller and must stay until done(), also after a timeout or cancel(): a read that hangs in the kernel cannot be
// cancelled.
class Batch {
 public:
  // `expected`: one checksum a slab, over all operations in order; unused for operations without kVerify.
  Batch(const OpSpec* specs, size_t n_ops, const uint64_t* expected);

  bool wait(std::chrono::nanoseconds timeout);
  bool done() const { return ops_left_.load(std::memory_order_acquire) == 0; }

  size_t size() const { return n_ops_; }
  size_t slabs() const { return sums_.size(); }
  Op& op(size_t i) { return ops_[i]; }
  Lane& lane(int lane) { return lanes_[lane]; }
  void add_to_sum(size_t slab, uint64_t summand) { sums_[slab].fetch_add(summand, std::memory_order_relaxed); }
  uint64_t sum(size_t slab) const { return sums_[slab].load(std::memory_order_relaxed); }

  // True if the operation has no error and the checksum of its slab `position` is not the expected one.
  bool is_bad(const Op& op, uint32_t position) const;
  bool is_any_bad(const Op& op) const;

  // True if no operation has an error, and all checksums are the expected ones. Only when done.
  bool is_clean() const;

  // Call once per operation, after its last piece has returned and its result is final.
  void op_done();

 private:
  size_t n_ops_;
  std::unique_ptr<Op[]> ops_;
  std::vector<std::atomic<uint64_t>> sums_;
  std::vector<uint64_t> expected_;
  Lane lanes_[kLanes];
  std::mutex mutex_;
  std::condition_variable all_done_;
  std::atomic<size_t> ops_left_;  // falls under mutex_ only, so that no waiter misses the last one
};

// Part of an operation, at most a piece of the engine; keeps its batch alive.
struct Piece {
  std::shared_ptr<Batch> batch;
  Op* op = nullptr;
  uint64_t start = 0, bytes = 0;  // within the payload

  int64_t offset() const { return op->slabs_offset() + static_cast<int64_t>(start); }  // in the file
  int64_t end() const { return offset() + static_cast<int64_t>(bytes); }
  uint8_t* memory() const { return op->slabs() + start; }
  uint64_t target() const { return op->spec.address + start; }  // on a device
};

}  // namespace kvtier
