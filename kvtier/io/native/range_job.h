// Range read: threads that read the pieces of a plan into slots and move their bytes to host or device memory.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checksum.h"
#include "pinned.h"
#include "range_plan.h"

namespace kvtier {

// Layout of the C interface.
struct RangeOptions {
  uint32_t threads;
  uint32_t slots;  // buffers a thread, of a piece each
  uint64_t piece_bytes;
  uint64_t block_bytes;         // that one checksum covers
  int32_t device_ordinal = -1;  // -1: no target is on a device, and CUDA is not loaded
  uint32_t unused = 0;

  bool has_device() const { return device_ordinal >= 0; }
};
static_assert(sizeof(RangeOptions) == 32, "the layout is part of the C interface");

struct RangeTarget {
  uint64_t address;  // 0: the bytes are read, and given to no target
  uint64_t on_device;
};
static_assert(sizeof(RangeTarget) == 16, "the layout is part of the C interface");

// Buffers of the threads, kept from one read to the next. They are allocated and pinned one by one, when a thread needs
// another one or ahead of the first read, while others are used: pinning all of 128 MiB takes as long as reading 1 GB.
class RangeSlots : public std::enable_shared_from_this<RangeSlots> {
 public:
  explicit RangeSlots(const RangeOptions& options);  // throws CudaFailed

  // Starts threads that make all slots. What fails is tried again by the read, which reports it.
  void prepare();

  // Of one thread: `made` buffers can be used. A buffer is added under `making`.
  struct OfThread {
    std::vector<std::unique_ptr<PinnedBuffer>> buffers;
    std::atomic<size_t> made{0};
    std::mutex making;
  };
  OfThread& of_thread(uint32_t thread) { return threads_[thread]; }

  // Makes one more, unless all are made; under `making`. Throws CudaFailed, or std::system_error without memory.
  void make_one(OfThread& slots) const;

  const RangeOptions options;
  const std::shared_ptr<PrimaryContext> context;  // null without a device

 private:
  std::vector<OfThread> threads_;
};

// First failure of a read.
struct RangeFailure {
  int error = 0;  // errno; ENODATA: the file ends at `offset`; EREMOTEIO: CUDA's error is in `message`
  uint32_t file = 0;
  uint64_t offset = 0;
  std::string message;
};

// One read. Owns copies of the file descriptors, so that a thread that hangs in the kernel does no harm later. Memory of
// targets and of files' arrays belongs to the caller and must stay until wait() gave true or cancel() has returned.
class RangeJob : public std::enable_shared_from_this<RangeJob> {
 public:
  RangeJob(std::shared_ptr<RangeSlots> slots, RangePlan plan, std::vector<RangeTarget> targets);
  ~RangeJob();
  RangeJob(const RangeJob&) = delete;
  RangeJob& operator=(const RangeJob&) = delete;

  void start();  // once; throws std::system_error when a file cannot be opened again, or threads cannot be started

  bool wait(std::chrono::nanoseconds timeout);  // true: all threads have ended

  // Reads no further piece. When it returns, no byte will land any more: what a hanging thread reads later is dropped.
  void cancel();

  uint64_t bytes_landed() const { return landed_.load(std::memory_order_relaxed); }
  uint64_t bytes_read() const { return read_.load(std::memory_order_relaxed); }
  // The first piece that has not landed, as pieces are ordered, by file and offset; null: all have.
  const RangePiece* first_missing() const {
    const size_t number = first_missing_.load(std::memory_order_acquire);
    return number < plan_.pieces().size() ? &plan_.pieces()[number] : nullptr;
  }
  RangeFailure failure();

 private:
  struct Stage;

  void work(uint32_t thread);
  void move_pieces(Stage& stage);
  bool read(const RangePiece& piece, const std::vector<PieceRange>& ranges, uint8_t* slot);
  void sum(const RangePiece& piece, uint8_t* slot) const;
  uint64_t land(const std::vector<Part>& parts, const uint8_t* slot, Stage& stage);
  bool begin_landing();
  void end_landing(size_t piece, uint64_t bytes);
  void fail(RangeFailure failure);
  void thread_ended();

  const std::shared_ptr<RangeSlots> slots_;
  const RangePlan plan_;
  const std::vector<RangeTarget> targets_;
  const SumFunction sum_;
  const uint64_t seed_;
  std::vector<int> fds_;
  std::atomic<size_t> next_{0};
  std::atomic<uint64_t> landed_{0}, read_{0};
  std::atomic<bool> stop_{false};  // no further piece is read
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> has_landed_;  // each piece
  std::atomic<size_t> first_missing_{0};
  uint32_t threads_alive_ = 0, landing_ = 0;  // landing_: pieces whose bytes are being moved
  bool cancelled_ = false;
  RangeFailure failure_;
};

}  // namespace kvtier
