// I/O engine: threads that move the pieces of batches between files and memory, and sum them.
//
// An operation is cut into pieces small enough that a piece is still in a core's L2 cache when it is summed: a read
// piece is summed as soon as it has landed, a write piece just before it goes out. A read for a device goes through the
// thread's DeviceStage, in pieces of its own size, and is summed by the device.
// Reads that are smaller are taken together with their neighbours in the file, as far as these are waiting too, up to
// the size of a piece.
//
// Nothing is started when the library is loaded; an engine belongs to the process that made it.
#pragma once
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "batch.h"
#include "checksum.h"
#include "device_stage.h"
#include "pinned_files.h"
#include "transfer.h"

namespace kvtier {

// As it crosses the C interface; kvtier/io/ring.py packs the same layout. Pieces are multiples of a page.
struct EngineOptions {
  uint32_t threads;
  uint32_t queued_ops_max;  // operations that still have pieces to give out (I4)
  uint64_t read_piece_bytes;
  uint64_t write_piece_bytes;
  int32_t device_ordinal = -1;  // -1: no reads for a device, and CUDA is not touched
  uint32_t device_slots = 0;    // pinned buffers a thread, of a device piece each
  uint64_t device_piece_bytes = 0;
  uint32_t touch_written = 0;   // of a file system in memory: see touch_pages()
  uint32_t unused = 0;

  bool has_device() const { return device_ordinal >= 0; }
};
static_assert(sizeof(EngineOptions) == 48, "the layout is part of the C interface");

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // Throws std::system_error when the threads cannot be started, CudaFailed when the device cannot be used.
  static std::shared_ptr<Engine> start(const EngineOptions& options);

  // 0; EAGAIN: the queue has no room for all of the batch, none of it was taken; ESHUTDOWN: closed.
  int submit(const std::shared_ptr<Batch>& batch);

  // Drops the pieces that nobody has taken; their operations end with ECANCELED once those in flight have returned.
  void cancel(const std::shared_ptr<Batch>& batch);

  // The caller is about to close this descriptor, and no read of it is under way: what is pinned of its file is
  // unregistered, by a thread of the engine, because that takes a while (40 ns a page).
  void forget(int fd);

  // See PinnedFiles::pin. Throws std::system_error: ENODEV without a device.
  void pin_file(int fd, int64_t end);

  // Cancels everything queued and waits for the threads, but no longer than `timeout`: a thread that hangs in the
  // kernel is left behind (it holds its own reference to the engine). True when all have ended.
  bool close(std::chrono::nanoseconds timeout);

  bool has_device() const { return options_.has_device(); }

 private:
  explicit Engine(const EngineOptions& options);
  void work(std::unique_ptr<DeviceStage> stage, std::unique_ptr<Gaps> gaps);
  void let_go_of_one(std::unique_lock<std::mutex>& lock);  // of forgotten_, which is not empty
  int choose();                                    // lane of the next run, -1: none. Under mutex_
  bool may_take_pinned() const;                    // under mutex_
  Run take(int kind);                              // of a lane; under mutex_
  void take_neighbours(Run& run, const std::shared_ptr<Batch>& batch, int kind);  // under mutex_
  Piece next_piece(Batch& batch, int kind) const;  // only looked at: without its owner. Under mutex_
  bool give_out(const std::shared_ptr<Batch>& batch, int kind, Piece& piece);  // true: its operation's last. Under mutex_
  void drop_queued(const std::shared_ptr<Batch>& batch, std::vector<Op*>* ended);  // under mutex_
  uint64_t piece_bytes(const Op& op) const;
  void perform(Run run, DeviceStage* stage, Gaps& gaps, Writer& writer);
  void report_landed(DeviceStage& stage, Writer& writer);
  void finish_oldest(DeviceStage& stage, Writer& writer);
  void report(const Run& run, Writer& writer);
  void land(const Run& run, Gaps& gaps);
  void store(const Piece& piece, Writer& writer);
  void sum(const Piece& piece);
  void piece_done(const Piece& piece, Writer& writer);
  void write_header(Batch& batch, Op& op, Writer& writer);

  const EngineOptions options_;
  const SumFunction sum_;
  PinnedFiles pinned_;
  std::mutex mutex_;
  std::condition_variable work_or_stop_, thread_ended_;
  std::deque<std::shared_ptr<Batch>> lanes_[kLanes];  // batches with pieces of that kind to give out
  std::vector<std::shared_ptr<const PinnedFile>> forgotten_;
  bool letting_go_ = false;               // a thread unregisters one of those
  size_t queued_ops_ = 0;
  uint32_t threads_alive_ = 0;
  uint32_t idle_ = 0;           // threads that wait for work
  std::atomic<uint32_t> pinned_runs_{0};  // on their way
  bool pinned_last_ = false;    // the last read that was taken: the two lanes of reads take turns
  uint32_t writing_ = 0;        // threads that hold a write piece
  uint32_t reads_in_a_row_ = 0; // runs given out while writes waited
  bool stop_ = false;
};

}  // namespace kvtier
