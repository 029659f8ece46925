// I/O engine: threads that move the pieces of batches between files and memory, and sum them.
//
// A piece is small enough to be in a core's L2 cache while it is summed: after its read, or before its write. A device
// read passes through the thread's DeviceStage, in pieces of another size, and is summed by the device. Smaller reads
// that are adjacent in the file and wait at the same time are read together, up to the size of a piece.
//
// A file whose calls hang in the kernel takes no thread from other files: see Engine::widen.
//
// Loading the library starts no thread; an engine belongs to the process that made it.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "batch.h"
#include "checksum.h"
#include "device_stage.h"
#include "transfer.h"

namespace kvtier {

// Layout of the C interface, which kvtier/io/ring.py packs. Pieces are multiples of a page.
struct EngineOptions {
  uint32_t threads;
  uint32_t queued_ops_max;  // operations with pieces to take (I4)
  uint64_t read_piece_bytes;
  uint64_t write_piece_bytes;
  int32_t device_ordinal = -1;  // -1: no device reads, and CUDA is not loaded
  uint32_t device_slots = 0;    // pinned buffers a thread, of a device piece each
  uint64_t device_piece_bytes = 0;

  bool has_device() const { return device_ordinal >= 0; }
};
static_assert(sizeof(EngineOptions) == 40, "the layout is part of the C interface");

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // Throws std::system_error when the threads cannot be started, CudaFailed when the device cannot be used.
  static std::shared_ptr<Engine> start(const EngineOptions& options);

  // Returns 0; EAGAIN: the queue has no room for the whole batch, and none of it was taken; ESHUTDOWN: closed.
  int submit(const std::shared_ptr<Batch>& batch);

  // Drops the pieces not yet taken; their operations end with ECANCELED once the pieces in flight have returned.
  void cancel(const std::shared_ptr<Batch>& batch);

  // Takes the files of which no call has returned for `hung_after` as hanging. They get no further thread until one
  // returns, and other threads stand in for those that they hold, at most `threads`; these end with a later call.
  // Throws CudaFailed, or std::system_error when threads cannot be started.
  void widen(std::chrono::nanoseconds hung_after);

  // Cancels queued operations and waits for the threads until `timeout`; one that hangs in the kernel keeps its own
  // reference to the engine. True when all have ended.
  bool close(std::chrono::nanoseconds timeout);

  bool has_device() const { return options_.has_device(); }

 private:
  // File in use by threads, each with a run of it.
  struct InUse {
    uint32_t threads = 0;
    bool hangs = false;
    std::chrono::steady_clock::time_point moved;  // when a call last returned, or the first thread began
  };
  struct Next {
    size_t batch = 0;  // position in the lane
    Op* op = nullptr;  // null: none
  };

  explicit Engine(const EngineOptions& options);
  void add_threads(uint32_t n, bool stand_in);
  void work(std::unique_ptr<DeviceStage> stage, std::unique_ptr<Gaps> gaps, bool stand_in);
  // Under mutex_:
  int choose() const;  // lane of the next run, or -1
  Next find(int kind) const;  // the operation of which the next run is
  bool has_work(int kind) const { return hung_files_ == 0 ? !lanes_[kind].empty() : find(kind).op != nullptr; }
  Run take(int kind);
  void take_neighbours(Run& run, const std::shared_ptr<Batch>& batch, int kind);
  void give_back(int kind, int fd);  // of the thread that has moved a run
  Piece piece_of(Op& op) const;  // its next piece, not taken yet: without its batch
  bool give_out(const std::shared_ptr<Batch>& batch, int kind, Piece& piece);  // true: its operation's last piece
  void drop_queued(Batch& batch);
  // Without it:
  uint64_t piece_bytes(const Op& op) const;
  void perform(Run run, DeviceStage* stage, Gaps& gaps, Writer& writer);
  void report(const Run& run, Writer& writer);
  void land(const Run& run, Gaps& gaps);
  void store(const Piece& piece, Writer& writer);
  void sum(const Piece& piece);
  void piece_done(const Piece& piece, Writer& writer);
  void write_header(Batch& batch, Op& op, Writer& writer);

  const EngineOptions options_;
  const SumFunction sum_;
  std::mutex mutex_;
  std::condition_variable work_or_stop_, thread_ended_;
  std::deque<std::shared_ptr<Batch>> lanes_[kLanes];  // batches with pieces of that kind to take
  size_t queued_ops_ = 0;
  uint32_t threads_alive_ = 0;
  uint32_t stand_ins_ = 0, stand_ins_wanted_ = 0;  // threads beside the engine's own
  uint32_t idle_ = 0;                     // threads that wait for work
  uint32_t writing_ = 0;                  // threads with a write piece
  uint32_t reads_in_a_row_ = 0;           // runs taken while writes waited
  std::unordered_map<int, InUse> files_;  // by file descriptor; those not in use any more stay
  uint32_t hung_files_ = 0;               // of files_
  bool stop_ = false;
};

}  // namespace kvtier
